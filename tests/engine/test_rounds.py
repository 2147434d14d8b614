"""Any plan, any delays, calls that are skipped, repeated and swapped, errors anywhere: plain weights, and no hang."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from engine_rounds import Boom, Engined, Round, run
from patience import until

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.grad_readiness import GradReadiness


@pytest.mark.timeout(300)
def test_rounds() -> None:
    outcomes = [run(seed) for seed in range(16)]
    assert "failed" in outcomes and "trained" in outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(2))
def test_many_rounds(part: int) -> None:
    for seed in range(100):
        run(1000 + 700 * part + seed)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_update_that_fails_beside_a_step_is_raised_once(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next window begins: the step in flight has failed with it, and is over when the error is raised."""
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)  # or all might be stepped in one call
    drawn = replace(Round.draw(0), apart=True, overlap=True, plan=None, staleness=staleness, error=None)
    ours = Engined(drawn, Emulation())
    try:
        state, momentum = copy.deepcopy(ours.network.state_dict()), ours.momentum()
        for _ in range(3):
            ours.window(drawn.windows[0])
        ours.engine.settle()
        ours.fuse.place, ours.fuse.left = "optimizer", 2
        ours.window(drawn.windows[0])
        updates = ours.engine.updates
        assert updates is not None
        until(lambda: not updates.whole, "no update fails")
        with pytest.raises(Boom):
            ours.window(drawn.windows[0])
        ours.restore(state, momentum)
        ours.window(drawn.windows[0])
        ours.engine.settle()
    finally:
        ours.engine.close()


def test_a_step_whose_predecessor_fails_while_it_is_made_fails_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the step before, nothing is left in flight, and the engine trains on."""
    drawn = replace(Round.draw(0), apart=True, overlap=True, plan=None, staleness=0, error=None)
    ours = Engined(drawn, Emulation())
    try:
        state, momentum = copy.deepcopy(ours.network.state_dict()), ours.momentum()
        for _ in range(3):
            ours.window(drawn.windows[0])
        before = ours.engine._step_in_flight
        assert before is not None

        def readiness(*args: Any, **options: Any) -> GradReadiness:  # the first thing that a step makes
            before.spec.scope.fail(Boom("before"))
            return GradReadiness(*args, **options)

        with monkeypatch.context() as patch, pytest.raises(Boom, match="before"):
            patch.setattr("lightning_roundpipe.engine.step.GradReadiness", readiness)
            ours.window(drawn.windows[0])
        ours.restore(state, momentum)
        ours.window(drawn.windows[0])
        ours.engine.settle()
    finally:
        ours.engine.close()
