"""Any plan, any delays, calls that are skipped, repeated and swapped, errors anywhere: plain weights, and no hang."""

import contextlib
import copy
import functools
from dataclasses import replace

import pytest
from engine_rounds import Boom, Engined, Round, run
from patience import until

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.devices.queued import ThreadEvent
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.grad_readiness import GradReadiness


@pytest.mark.timeout(300)
def test_rounds():
    outcomes = [run(seed) for seed in range(6)]
    assert "failed" in outcomes and "trained" in outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(2))
def test_many_rounds(part):
    for seed in range(60):
        run(1000 + 700 * part + seed)


@contextlib.contextmanager
def engined(staleness):
    """An engine that has trained, with what trains one more window. Behind the error of a step it trains on."""
    drawn = replace(Round.draw(0), apart=True, overlap=True, plan=None, staleness=staleness, error=None)
    ours = Engined(drawn, Emulation())
    train = functools.partial(ours.window, drawn.windows[0])
    try:
        state, momentum = copy.deepcopy(ours.network.state_dict()), ours.momentum()
        for _ in range(3):
            train()
        yield ours, train
        ours.restore(state, momentum)
        train()
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
