"""Plans of forwards alone: stages that take about equally long and fit."""

from __future__ import annotations

import pytest

from lightning_roundpipe.planning.forward_plan import ForwardPlan, plan_forward
from lightning_roundpipe.planning.span import Span


def plan_of(*seconds: float, workers: int = 1, stage_bytes: int | None = None) -> ForwardPlan:
    """The plan of layers of 1,000 bytes each, all called once."""
    layers = range(len(seconds))
    return plan_forward(seconds, layers, dict.fromkeys(layers, 1000), workers, stage_bytes)


def test_one_worker_has_one_stage() -> None:
    assert plan_of(1.0, 2.0, 3.0).forward == (Span(0, 2),)


def test_equal_layers_are_shared_equally() -> None:
    plan = plan_of(*[1.0] * 12, workers=4)
    assert len(plan.forward) == 4
    assert {len(span) for span in plan.forward} == {3}


def test_a_long_last_layer_is_a_stage() -> None:
    """30 layers, and an output layer that takes as long as eight of them."""
    assert plan_of(*[1.0] * 30, 8.0, workers=4).forward[-1] == Span(30, 30)


def test_stages_fit() -> None:
    plan = plan_of(*[1.0] * 12, workers=3, stage_bytes=2000)
    assert max(map(len, plan.forward)) == 2
    assert [call for span in plan.forward for call in span.calls()] == list(range(12))


def test_a_layer_that_is_called_twice_is_held_once() -> None:
    plan = plan_forward([1.0] * 4, [0, 0, 1, 1], {0: 1000, 1: 1000}, 1, stage_bytes=1000)
    assert plan.forward == (Span(0, 1), Span(2, 3))


@pytest.mark.parametrize(("stages", "workers", "in_flight", "expected"), [(4, 4, 8, 8), (1, 4, 8, 2), (2, 4, 2, 1)])
def test_a_round_has_batches_for_all_workers(stages: int, workers: int, in_flight: int, expected: int) -> None:
    assert ForwardPlan(tuple(Span(s, s) for s in range(stages))).round_batches(workers, in_flight) == expected
