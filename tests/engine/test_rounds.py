"""Errors beside and behind a step, in an engine without a Trainer: they come out once, and the engine trains on."""

import contextlib
import copy

import pytest
import torch
from harness import seeded
from patience import PATIENCE_S, until
from torch import nn

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import Emulation, Options
from lightning_roundpipe.devices.emulated import EmulatedDevice, make_emulated
from lightning_roundpipe.devices.queued import ThreadEvent
from lightning_roundpipe.engine.context import make_context
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.grad_readiness import GradReadiness

WIDTH, MICROBATCHES = 8, 4


class Boom(Exception):
    """Nobody else raises this."""


class Fuse:
    """Raises when code comes to a place for the ``left``-th time; copies of the model share it."""

    def __init__(self):
        self.place, self.left = "", 0

    def __deepcopy__(self, memo):
        return self

    def __call__(self, place):
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                raise Boom(place)


class FusedSGD(torch.optim.SGD):
    """Comes to the place ``optimizer``."""

    independent_parameters = True

    def __init__(self, fuse, *args, **options):
        super().__init__(*args, **options)
        self._fuse = fuse

    def step(self, closure=None):
        self._fuse("optimizer")
        return super().step(closure)


class Engined:
    """An engine whose optimizer has a thread of its own."""

    def __init__(self, staleness):
        self.fuse, self.module, self._windows = Fuse(), nn.Module(), 0
        with seeded(3):
            self.module.net = self.network = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self._batches = list(torch.randn(MICROBATCHES, 2, WIDTH))
        options = Options(layers=["Linear"], plan="static", staleness=staleness, watchdog_timeout=PATIENCE_S)
        devices = make_emulated([torch.device("cpu")] * 2, Emulation())
        self.engine = Engine(make_context(self.module, devices, options, lambda text: None, Formats(None)))
        self._optimizer = FusedSGD(self.fuse, self.network.parameters(), lr=0.05, momentum=0.5)
        self.engine.enable_async_optimizer(lambda: self._optimizer)

    def loss(self, x):
        for layer in self.network:
            x = layer(x).tanh()
            self.fuse("user code")
        return x.square().mean()

    def window(self):
        self._windows += 1
        functions = [lambda x=x: self.loss(x) for x in self._batches]
        weights = LossWeights(None, [2] * MICROBATCHES, list(range(MICROBATCHES)))
        result = self.engine.train_window(functions, weights, (0, self._windows))
        if result.error is not None:
            raise result.error
        pairs = [(m.loss, m.differentiable) for m in result.microbatches]
        for loss in result.gradients.losses(pairs):
            torch.autograd.backward(loss)
        self.engine.updates.submit(None)

    def momentum(self):
        return copy.deepcopy(self._optimizer.state_dict())

    def restore(self, state, momentum):
        """Go on from other weights, as from a checkpoint."""
        self.fuse.place = ""
        self.engine.settle()
        with torch.no_grad():
            self.network.load_state_dict(state)
        self._optimizer.load_state_dict(momentum)


@contextlib.contextmanager
def engined(staleness):
    """An engine that has trained, with what trains one more window. Behind the error of a step it trains on."""
    ours = Engined(staleness)
    try:
        state, momentum = copy.deepcopy(ours.network.state_dict()), ours.momentum()
        for _ in range(3):
            ours.window()
        yield ours, ours.window
        ours.restore(state, momentum)
        ours.window()
        ours.engine.settle()
    finally:
        ours.engine.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_update_that_fails_beside_a_step_is_raised_once(staleness, monkeypatch):
    """Before the next window begins: the step in flight has failed with it, and is over when the error is raised."""
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)  # or all might be stepped in one call
    with engined(staleness) as (ours, train):
        ours.engine.settle()
        ours.fuse.place, ours.fuse.left = "optimizer", 2
        train()
        updates = ours.engine.updates
        assert updates is not None
        until(lambda: not updates.whole, "no update fails")
        with pytest.raises(Boom):
            train()


def test_a_step_whose_predecessor_fails_while_it_is_made_fails_with_it(monkeypatch):
    """The error is that of the step before, nothing is left in flight, and the engine trains on."""
    with engined(staleness=0) as (ours, train):
        before = ours.engine._step_in_flight
        assert before is not None

        def readiness(*args, **options):  # the first thing that a step makes
            before.spec.scope.fail(Boom("before"))
            return GradReadiness(*args, **options)

        with monkeypatch.context() as patch, pytest.raises(Boom, match="before"):
            patch.setattr("lightning_roundpipe.engine.step.GradReadiness", readiness)
            train()


def test_gradients_that_a_failed_step_never_downloads_are_not_waited_for():
    """The error comes out behind the window that returned their losses. The next window trains on."""
    with engined(staleness=0) as (ours, train):
        ours.engine.settle()
        for device in ours.engine.context.pool.devices:
            device.gradients_down.wait(ThreadEvent("never reached", device._switch, timed=False))
        train()
        step = ours.engine._step_in_flight
        assert step is not None
        until(lambda: any(sums.arrived is not None for sums in step.slots.sums.values()), "no download is enqueued")
        step.spec.scope.fail(Boom("behind the window"))
        with pytest.raises(Boom, match="behind the window"):
            ours.engine.settle()


def test_devices_are_reset_behind_the_last_upload(monkeypatch):
    """The optimizer's thread, which publishes weights, is no thread of the step: nothing else waits for its uploads."""
    left = []
    reset = EmulatedDevice.reset

    def resetting(device):
        left.extend(bool(worker.planned._queue) for worker in ours.engine.context.pool.workers)
        reset(device)

    def failing(*args):
        slot = ours.engine.context.pool.workers[0].tickets.slots[-1]
        with monkeypatch.context() as patch:
            patch.setattr(type(slot.layers[0].bucket), "has", lambda bucket, version: False)
            patch.setattr(type(slot.layers[0].bucket), "when", lambda *args: True)
            ours.engine.context.pool.workers[0].planned.prepare(slot)  # weights that are published too late
        raise Boom("late")

    with engined(staleness=0) as (ours, train):
        ours.engine.settle()
        with monkeypatch.context() as patch, pytest.raises(Boom, match="late"):
            patch.setattr(EmulatedDevice, "reset", resetting)
            patch.setattr(type(ours.fuse), "__call__", failing)
            train()
    assert left and not any(left)
