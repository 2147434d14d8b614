"""Machines meet within ``machine_timeout``, or each says where it has looked for the others."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from several_machines import free_port

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines.liveness import Liveness
from lightning_roundpipe.machines.peers import GRADIENTS, MAIN, Peers, meet

TIMEOUT = 0.5
"""Seconds. The setting's least is 5, which only makes this test longer."""


def comes_and_goes(port):
    """Come to the store as machine 1, and do not go on."""
    store = dist.TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=5))
    dist.PrefixStore("roundpipe/start/1", store).set("here/1", "there")


@pytest.mark.parametrize("who", ["the first machine", "another machine", "all, but gloo cannot connect"])
def test_a_machine_that_meets_nobody_says_where_it_looked(who, monkeypatch):
    """It waited for half an hour. A firewall may let machines pass to the store, and not to each other."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rank = 1 if who == "another machine" else 0
    joins = ThreadPoolExecutor()
    if who.startswith("all"):
        joins.submit(comes_and_goes, port)
    began = time.monotonic()
    says = rf"machine {rank} of 2 .* at 127.0.0.1:{port} .* machine_timeout=0.5 seconds: "
    missing = r"1 machine did not come: 1\. Here are 0 \(.+\)\." if who == "the first machine" else ""
    with pytest.raises(RoundPipeError, match=says + missing):
        meet(rank, 2, TIMEOUT)
    assert time.monotonic() - began < 60
    joins.shutdown()
    assert not dist.is_initialized()


def test_messages_take_connections_in_turn():
    """All went over one connection, which is seldom busy in both directions."""
    peers = Peers(0, ["here", "there"], Liveness(dist.HashStore(), 0, ["here", "there"], TIMEOUT), GROUPS)
    used = [peers.start(lambda tensor, group, async_op: group, torch.zeros(1), name) for name in WANTED]
    assert used == ["first", "main", "second", "first", "main"]


GROUPS = {MAIN: ["main"], GRADIENTS: ["first", "second"]}
WANTED = [GRADIENTS, MAIN, GRADIENTS, GRADIENTS, MAIN]
