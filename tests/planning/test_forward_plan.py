"""Plans of forwards alone: near what a worker less would show, and stages are spread only where that pays."""

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
    plan = plan_forward(costs, 1, [1] * 4, FAST, 0.0)
    assert forward_seconds(plan, costs, 1, [1] * 4, FAST) == pytest.approx(24.0)


def test_by_hand() -> None:
    """Two stages on two workers: the second follows the first by one microbatch."""
    plan, costs = ForwardPlan((Span(0, 0), Span(1, 1))), costs_of(2.0, 1.0)
    assert forward_seconds(plan, costs, 2, [1] * 3, FAST) == pytest.approx(3 * 2.0 + 1.0)
    # At 1,000 bytes a second the first upload takes a second, and the second one ends meanwhile.
    assert forward_seconds(plan, costs, 2, [1] * 3, 1000.0) == pytest.approx(1.0 + 3 * 2.0 + 1.0)
    # The last microbatch has two samples.
    assert forward_seconds(plan, costs, 2, [1, 1, 2], FAST) == pytest.approx(4 * 2.0 + 2 * 1.0)


def test_by_hand_where_all_stages_are_spread() -> None:
    """Each of two workers takes two of four microbatches through both stages, and receives both."""
    plan, costs = ForwardPlan((Span(0, 0), Span(1, 1)), 2, 0), costs_of(2.0, 1.0)
    assert forward_seconds(plan, costs, 2, [1] * 4, FAST) == pytest.approx(2 * 3.0)
    # The upload of the second stage ends while the first one computes.
    assert forward_seconds(plan, costs, 2, [1] * 4, 1000.0) == pytest.approx(1.0 + 2 * 3.0)


def test_a_turn_costs_time_so_stages_are_no_shorter_than_they_must_be() -> None:
    """One worker, two microbatches, two layers of 1 s: a stage each makes four turns, both in one stage two."""
    costs, one, two = costs_of(1.0, 1.0), ForwardPlan((Span(0, 1),)), ForwardPlan((Span(0, 0), Span(1, 1)))
    assert forward_seconds(one, costs, 1, [1, 1], FAST, 0.5) == pytest.approx(4.0 + 2 * 0.5)
    assert forward_seconds(two, costs, 1, [1, 1], FAST, 0.5) == pytest.approx(4.0 + 4 * 0.5)
    assert plan_forward(costs, 1, [1, 1], FAST, 0.5).stages == one.stages


def test_all_stages_are_spread_where_copies_are_fast() -> None:
    """Equal layers, which fill and drain a pipeline: four workers are four times as fast as one."""
    costs = costs_of(*[1.0] * 6, 8.0, weight_bytes=1000)
    plan = plan_forward(costs, 4, [1] * 8, FAST, 0.0, 1000)
    assert (plan.spread, plan.first_spread) == (4, 0)
    assert 8 * 14 / forward_seconds(plan, costs, 4, [1] * 8, FAST) == pytest.approx(4.0)


def test_a_long_last_layer_is_spread() -> None:
    """30 layers, and an output layer that takes as long as eight of them: on one worker, three would be idle."""
    costs, sizes = costs_of(*[1.0] * 30, 8.0, weight_bytes=1000), [1] * 8
    for stage_bytes, rate in ((None, 2000.0), (1000, 2000.0), (1000, FAST)):
        plan = plan_forward(costs, 4, sizes, rate, 0.0, stage_bytes)
        assert plan.spread == 4
        assert 8 * 38 / forward_seconds(plan, costs, 4, sizes, rate) > 3.5
        alone = ForwardPlan(plan.stages)
        assert forward_seconds(alone, costs, 4, sizes, rate) > forward_seconds(plan, costs, 4, sizes, rate)


def test_none_is_where_copies_take_longer() -> None:
    costs = costs_of(*[1e-3] * 12, weight_bytes=10**6)
    plan = plan_forward(costs, 4, [1] * 8, 1e7, 0.0, 10**6)
    assert plan.spread == 1


def test_shares() -> None:
    """The largest is as small as possible, and the first ones, whose microbatches arrive first, are filled."""
    assert ForwardPlan((Span(0, 0),), 4).shares([1] * 7) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert [len(share) for share in ForwardPlan((Span(0, 0),), 4).shares([1] * 2)] == [1, 1]
    assert ForwardPlan((Span(0, 0),)).shares([1] * 3) == [range(3)]
    assert ForwardPlan((Span(0, 0),), 4).shares([1] * 8 + [2]) == [range(3), range(3, 6), range(6, 8), range(8, 9)]
    assert ForwardPlan((Span(0, 0),), 2).shares([8, 1, 1]) == [range(1), range(1, 3)]
    assert ForwardPlan((Span(0, 0),), 2).shares([1, 8]) == [range(1), range(1, 2)]


def test_stages_fit() -> None:
    plan = plan_forward(costs_of(*[1.0] * 12), 3, [1] * 6, FAST, 0.0, stage_bytes=2000)
    assert max(map(len, plan.stages)) <= 2
    assert [call for span in plan.stages for call in span.calls()] == list(range(12))
