"""Workers of different kinds: each gets stages that are cut for its speed and memory, and the numbers stay the same."""

import contextlib
import dataclasses
import threading

import pytest
import torch
import zoo
from harness import Chain, assert_same, ours, run
from stress import all_reports
from torch import nn

from lightning_roundpipe.devices import emulated_work
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.engine import planner
from lightning_roundpipe.planning import Costs

FORWARD_S, BACKWARD_S = 0.02, 0.04
BLOCKS = 12
_here = threading.local()


@pytest.fixture
def kinds(monkeypatch):
    """Makes emulated devices differ: ``kinds(speeds)`` gives each a name, which layers below read their speed from."""
    monkeypatch.setattr(planner, "_SHORTEST_SEARCH_S", 0.5)

    def make(*speeds, memory=()):
        original, acquire_core = EmulatedDevice.__init__, EmulatedDevice.acquire_core

        @contextlib.contextmanager
        def with_speed(self):
            with acquire_core(self):
                _here.speed = speeds[self.index]
                yield

        def init(self, index, device, emulation):
            original(self, index, device, dataclasses.replace(emulation, memory=memory[index]) if memory else emulation)

        monkeypatch.setattr(EmulatedDevice, "acquire_core", with_speed)
        monkeypatch.setattr(EmulatedDevice, "__init__", init)
        monkeypatch.setattr(EmulatedDevice, "kind", property(lambda self: f"a device of speed {speeds[self.index]}"))

    return make


class _TakeTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        emulated_work(FORWARD_S / getattr(_here, "speed", 1.0))
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        emulated_work(BACKWARD_S / getattr(_here, "speed", 1.0))
        return grad * 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return _TakeTime.apply(self.linear(x))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_numbers_are_those_of_plain_training(kinds, name, monkeypatch):
    kinds(1.0, 0.5, 0.5)
    monkeypatch.setattr(planner, "worker_speeds", lambda *_: [1.0, 0.5, 0.5])
    batches = zoo.make_batches(name, 3, 8)
    plain = run("auto", zoo.make_module(name), batches)
    unequal = run(ours(num_microbatches=4, loss_weight="targets"), zoo.make_module(name), batches, devices=3)
    assert_same(plain, unequal)
    assert unequal.report is not None and Costs.from_dict(unequal.report["costs"]).unequal


@pytest.mark.slow
def test_each_worker_has_stages_for_its_memory(kinds):
    """The small one could not hold what the large one has, and neither exceeds what it has."""
    small, large = 7_000, 60_000
    kinds(1.0, 0.4, memory=(large, small))
    with all_reports() as made:
        batches = [torch.randn(16, 16)] * 3
        run(ours(num_microbatches=8), Chain(Block() for _ in range(BLOCKS)), batches, devices=2, watch=False)
    reports = [report for make in made if not (report := make())["profiled"]]
    assert reports
    for report in reports:
        assert report["peak_device_bytes"][1] <= small < report["peak_device_bytes"][0] <= large
