"""Plans of forwards alone: near what a worker less would show, and the last stage is spread only where that pays."""

from __future__ import annotations

import pytest

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.forward_plan import ForwardPlan, forward_seconds, plan_forward
from lightning_roundpipe.planning.span import Span

FAST = 1e12


def costs_of(*seconds: float, weight_bytes: int = 1000) -> Costs:
    return Costs(
        tuple(
            CallCost(f"layer {number}", taken, 0.0, weight_bytes, 0, 0, 0, needs_backward=False)
            for number, taken in enumerate(seconds)
        )
    )


def test_one_worker_takes_the_sum() -> None:
    costs = costs_of(1.0, 2.0, 3.0)
    plan = plan_forward(costs, 1, 4, FAST)
    assert forward_seconds(plan, costs, 1, 4, FAST) == pytest.approx(24.0)


def test_by_hand() -> None:
    """Two stages on two workers: the second follows the first by one microbatch."""
    plan, costs = ForwardPlan((Span(0, 0), Span(1, 1))), costs_of(2.0, 1.0)
    assert forward_seconds(plan, costs, 2, 3, FAST) == pytest.approx(3 * 2.0 + 1.0)
    # At 1,000 bytes a second the first upload takes a second, and the second one ends meanwhile.
    assert forward_seconds(plan, costs, 2, 3, 1000.0) == pytest.approx(1.0 + 3 * 2.0 + 1.0)


def test_a_long_last_layer_is_spread() -> None:
    """30 layers, and an output layer that takes as long as eight of them: on one worker, three would be idle."""
    costs = costs_of(*[1.0] * 30, 8.0)
    for stage_bytes in (None, 1000):
        plan = plan_forward(costs, 4, 8, FAST, stage_bytes)
        assert plan.spread == 4
        assert 8 * 38 / forward_seconds(plan, costs, 4, 8, FAST) > 3.5
        assert forward_seconds(ForwardPlan(plan.stages), costs, 4, 8, FAST) > forward_seconds(plan, costs, 4, 8, FAST)


def test_it_is_not_where_copies_take_longer() -> None:
    costs = costs_of(*[1e-3] * 12, weight_bytes=10**6)
    plan = plan_forward(costs, 4, 8, 1e7, 10**6)
    assert plan.spread == 1


def test_shares() -> None:
    assert [len(share) for share in ForwardPlan((Span(0, 0),), 4).shares(7)] == [1, 2, 2, 2]
    assert [len(share) for share in ForwardPlan((Span(0, 0),), 4).shares(2)] == [1, 1]
    assert ForwardPlan((Span(0, 0),)).shares(3) == [range(3)]


def test_stages_fit() -> None:
    plan = plan_forward(costs_of(*[1.0] * 12), 3, 6, FAST, stage_bytes=2000)
    assert max(map(len, plan.stages)) <= 2
    assert [call for span in plan.stages for call in span.calls()] == list(range(12))
