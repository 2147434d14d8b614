"""Several machines with a network of a stated rate and latency between them, and with one that stalls."""

import re
import time

import pytest
import several_machines
from patience import PATIENCE_S
from slow_network import SlowNetwork, unavailable
from test_several_machines import assert_one

WHY_NOT = unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(10 * PATIENCE_S),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


@pytest.fixture
def between():
    """Makes a network between machines, which send so many bytes a second, with 5 ms of latency."""
    made = []

    def make(machines, rate):
        made.append(SlowNetwork(machines, rate, 0.005))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.mark.parametrize("machines", [3])
def test_over_a_slow_network(machines, between, tmp_path):
    network = between(machines, 12.5e6)
    common = {"microbatches": 6, "samples": 12}
    stale = {"options": {"staleness": 1}, "gradient_clip_val": 0.1}
    cases = [common, common | stale, common | {"lora": True, "accumulate_grad_batches": 3, "even": True}]
    found = several_machines.results("cases", tmp_path, machines=machines, network=network, cases=cases)
    for case, ones in zip(cases, zip(*found, strict=True), strict=True):
        assert_one(case, list(ones), ours="options" in case)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_network_that_stalls_ends_all_machines(all_of_it, between, tmp_path):
    """All of it, so that machines do not hear of each other; or the connections of gloo only."""
    network = between(2, 12.5e6)
    processes = several_machines.start("fault", 2, tmp_path, {"kind": "goes on"}, network=network)
    deadline = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("checkpoints/*.ckpt")):
        assert time.monotonic() < deadline and not any(one.poll() for one in processes)
        time.sleep(0.1)
    network.stall() if all_of_it else network.stall_gloo()
    for one in several_machines.collect(processes, tmp_path, 2 * PATIENCE_S):
        assert one.status not in (0, several_machines.LEFT), one.output
        assert one.after < PATIENCE_S
        expected = (
            r"machine \d \(.*\)(, which keeps the job's store,)? has not answered for|this machine, which keeps"
            if all_of_it
            else r"the network has stalled: all machines answer|the network between them has stalled"
        )
        assert re.search(expected, one.output), one.output
