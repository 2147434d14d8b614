"""Buffers that calls have changed, on their way to the host."""

import threading

import torch
from patience import PATIENCE_S
from torch import nn

from lightning_roundpipe.devices import Event
from lightning_roundpipe.memory.module_buffers import HostBuffers


class OnItsWay(Event):
    """An event that ``over`` ends, and whether it is waited for."""

    time = None

    def __init__(self):
        self.waited_for, self.over = threading.Event(), threading.Event()

    def wait(self):
        self.waited_for.set()
        assert self.over.wait(PATIENCE_S)

    def done(self):
        return self.over.is_set()


def test_a_call_loads_its_buffers_while_user_code_waits_for_others(device):
    """The call has the baton, and waited for the download that user code, which had given the baton up, waited for."""
    changed, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers, arrives = HostBuffers(), OnItsWay()
    before = buffers.now(changed, "running_mean", device)
    buffers.put(changed, "running_mean", before, torch.ones(2), arrives, microbatch=0)
    reading = threading.Thread(target=buffers.settle, daemon=True)
    reading.start()
    assert arrives.waited_for.wait(PATIENCE_S)
    loading = threading.Thread(target=buffers.now, args=(other, "running_mean", device), daemon=True)
    loading.start()
    loading.join(PATIENCE_S)
    assert not loading.is_alive() and reading.is_alive()
    arrives.over.set()
    reading.join(PATIENCE_S)
    assert changed.running_mean.tolist() == [1, 1]
