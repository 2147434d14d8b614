from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even

from lightning_roundpipe.planning import CallCost, Costs, Plan, greedy_partition
from lightning_roundpipe.planning.limits import MemoryTable
from lightning_roundpipe.planning.memory import (
    BOTH,
    SINGLE,
    Parameters,
    ahead_bytes,
    arenas_within,
    device_bytes,
    device_items,
    host_items,
    lead_within,
    partition_within,
    planned_bytes,
    smallest_within,
    waiting_bytes,
)
from lightning_roundpipe.planning.shapes import sizes_of


def test_counted_by_hand() -> None:
    """Calls of 100 weights, 40 gradients and 10 activations."""
    costs = even(4)
    assert device_bytes(Plan.parse("forward 0-2; fused 3; backward 2 1 0; round 1"), costs, 1) == 2 * 300 + 2 * 40 + 10
    assert device_bytes(Plan.parse("forward 0 1; fused 2-3; backward 1 0; round 1"), costs, 1) == 2 * 200 + 2 * 80 + 20
    assert device_bytes(Plan.per_call(4), costs, 1) == 2 * 100 + 2 * 40 + 10
    frozen = Costs(tuple(call(f"layer{i}", needs_backward=i > 1) for i in range(4)))
    assert device_bytes(Plan.single(4), frozen, 1) == 2 * 400 + 2 * 80 + 2 * 10


def test_without_a_budget_the_partitioner_decides() -> None:
    assert partition_within(even(6), 2, 4, None, None) == greedy_partition(even(6), 2, 4)
    assert partition_within(even(6), 2, 4, 3, None).round_microbatches == 3


def test_large_weights_and_large_gradients_of_different_stages() -> None:
    """Each stage fits into half of the budget, and the arenas for both kinds of stage do not fit together."""
    costs = Costs((*(call(f"frozen{i}", gradients=0, needs_backward=False) for i in range(6)), *even(2)))
    budget = 2 * 500
    plan = partition_within(costs, 1, 1, None, budget)
    assert device_bytes(plan, costs, 1) <= budget
    assert device_bytes(greedy_partition(costs, 1, 1, stage_bytes=budget), costs, 1) > budget


def test_a_budget_that_nothing_fits_into() -> None:
    costs = Costs((*even(2), call("table", weights=900)))
    with pytest.raises(ValueError, match=r"may use 900 bytes, .* needs 950.*'table'.*Raise memory_budget"):
        partition_within(costs, 2, 2, None, 900)
    for budget, arenas in ((950, SINGLE), (1889, SINGLE), (1890, BOTH)):
        plan = partition_within(costs, 2, 2, None, budget)
        assert plan.arenas == arenas and device_bytes(plan, costs, 2) in (950, 1890)


def test_rounds_are_as_large_as_fits() -> None:
    """Of 8 microbatches: all, or else equal parts of them, but 3 (as many as workers), or what is asked for."""
    costs = Costs(tuple(call(f"layer{i}", waiting=10, returning=10) for i in range(4)))
    for size in (8, 4, 3):
        exact = device_bytes(Plan.per_call(4, size), costs, 3)
        for room in (0, 9):  # the next larger part takes more
            plan = partition_within(costs, 3, 8, None, exact + room)
            assert plan.round_microbatches == size
            assert device_bytes(plan, costs, 3) <= exact + room
    exact = device_bytes(Plan.per_call(4, 3).with_arenas(SINGLE), costs, 3)
    with pytest.raises(ValueError, match="2 waiting microbatches with up to 20"):
        partition_within(costs, 3, 8, None, exact - 1)
    with pytest.raises(ValueError, match="3 waiting microbatches"):
        partition_within(costs, 3, 8, None, exact, min_round=4)
    with pytest.raises(ValueError, match="7 waiting microbatches"):
        partition_within(costs, 3, 8, 8, exact)


def test_arenas_are_single_only_where_two_do_not_fit() -> None:
    """Of weights, of gradients, or of both; a plan says so, and takes less by exactly one arena."""
    costs = even(4)  # 100 of weights, 40 of gradients, 10 of activations
    plan = Plan.per_call(4)
    assert [one.arenas for one in arenas_within(plan, costs, 1, None)] == [BOTH]
    for budget, arenas in ((290, [BOTH]), (289, [(2, 1), (1, 2)]), (249, [(1, 2)]), (189, [SINGLE]), (149, [])):
        fitting = arenas_within(plan, costs, 1, budget)
        assert [one.arenas for one in fitting] == arenas, budget
        assert all(device_bytes(one, costs, 1) <= budget for one in fitting)
        shape, sizes = sizes_of(plan)
        assert MemoryTable(costs, 1, budget, arenas=SINGLE).fits(shape, np.array([sizes])) == bool(arenas)
        assert MemoryTable(costs, 1, budget).fits(shape, np.array([sizes])) == (arenas == [BOTH])
    assert smallest_within(costs, 1, 4, 1, 189).arenas == SINGLE


CALLS = st.builds(
    CallCost,
    layer=st.sampled_from("abcdefgh"),
    forward_s=st.floats(0, 2),
    backward_s=st.floats(0, 2),
    weight_bytes=st.integers(0, 100),
    gradient_bytes=st.integers(0, 100),
    boundary_bytes=st.just(0),
    activation_bytes=st.integers(0, 100),
    needs_backward=st.booleans(),
    kept_bytes=st.none() | st.integers(0, 100),
    forward_bytes=st.none() | st.integers(0, 100),
    input_bytes=st.integers(0, 20),
    waiting_bytes=st.integers(10, 20),
    leaving_bytes=st.integers(0, 10),
    held_bytes=st.integers(0, 10),
    returning_bytes=st.integers(0, 20),
    backward_held_bytes=st.integers(0, 10),
    shared=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=1, max_size=7), budget=st.integers(0, 1500), workers=st.integers(1, 4))
def test_whatever_the_model_the_plan_fits_or_nothing_does(calls: list[CallCost], budget: int, workers: int) -> None:
    costs = Costs(tuple(calls))
    least = device_bytes(Plan.per_call(len(calls), min(workers, 3)).with_arenas(SINGLE), costs, workers)
    if least > budget:
        with pytest.raises(ValueError, match="memory_budget"):
            partition_within(costs, workers, 3, None, budget)
        return
    plan = partition_within(costs, workers, 3, None, budget)
    plan.validate(costs.layers)
    assert device_bytes(plan, costs, workers) <= budget


@pytest.mark.parametrize(
    "text",
    ["forward 0-2; fused 3; backward 2 1 0; round 2", "forward 0 1; fused 2-3; backward 1 0; round 2"],
)
def test_items_add_up(text: str) -> None:
    calls = tuple(call(str(i), input_bytes=4, waiting=5 + i, returning=3, kept_bytes=8 - i) for i in range(4))
    plan, costs = Plan.parse(text), Costs(calls)
    for workers in (1, 2, 3):
        need = device_bytes(plan, costs, workers)
        assert planned_bytes(plan, costs, workers, None) > need
        for budget in (None, need, need + 1):
            items = device_items(plan, costs, workers, budget)
            assert sum(item.nbytes for item in items) == planned_bytes(plan, costs, workers, budget)
        assert planned_bytes(plan, costs, workers, need + 1) == need + 1


def test_what_waits_and_what_is_brought() -> None:
    """Outputs wait in forward and gradients in backward, of the three others of a round."""
    calls = tuple(call(str(i), input_bytes=4, waiting=i, returning=10 + i, forward_bytes=1) for i in range(4))
    plan, costs = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 4"), Costs(calls)
    # Behind the stages: calls 2 and 3 are waited for, then the backward of 2, of 1, and nothing.
    assert waiting_bytes(plan, costs, 1) == [3 * 2, 3 * 3, 3 * 12, 3 * 12, 3 * 11]
    # On several workers, two of the three hold a gradient. All of them hold an output, unless the next call takes it.
    assert waiting_bytes(plan, costs, 2) == [2 * 11 + 2, 2 * 3 + 3, 2 * 12 + 2, 2 * 11 + 3, 2 * 12]
    leaving = Costs(tuple(replace(each, leaving_bytes=each.waiting_bytes) for each in costs))
    assert waiting_bytes(plan, leaving, 2) == [2 * 11, 2 * 3, 2 * 12, 2 * 11, 2 * 12]
    assert waiting_bytes(plan, leaving, 1) == waiting_bytes(plan, costs, 1)
    arenas = 2 * 200 + 2 * 80
    assert device_bytes(plan, costs, 1) == arenas + 10 + 3 * 12
    # The first backward stage: its own call's inputs, and the gradients, which one worker has already. In the
    # second one the other call's inputs come as well, but fewer gradients wait.
    assert planned_bytes(plan, costs, 1, None) == arenas + 10 + 3 * 12 + 4 + max(0, 4 - 3)
    assert planned_bytes(plan, costs, 2, None) == arenas + 14 + 2 * 12 + 4 + 12  # in the second backward stage
    alone = Plan.parse("forward none; fused 0-3; backward none; round 4")
    assert planned_bytes(alone, costs, 1, None) == 2 * 400 + 2 * 160 + 40


def test_what_user_code_holds_counts_beside_each_call_and_for_each_that_waits() -> None:
    calls = tuple(
        call(str(i), waiting=i + 4, held_bytes=i, backward_held_bytes=20 + i, returning=3, forward_bytes=10)
        for i in range(4)
    )
    plan, costs = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 3"), Costs(calls)
    assert [costs.stage_bytes(first, last, "forward").activations for first, last in ((0, 1), (2, 2))] == [11, 12]
    assert [costs.stage_bytes(first, last, "backward").activations for first, last in ((2, 2), (0, 1))] == [32, 31]
    assert costs.stage_bytes(2, 3, "fused").activations == 2 * 10 + 2
    assert waiting_bytes(plan, costs, 1) == [2 * 6, 2 * 7, 2 * 25, 2 * 25, 2 * 24]
    graph = costs.stage_bytes(0, 1, "backward", ahead=True)
    assert graph.activations == 2 * 10 + 21


def test_outputs_from_before_a_fused_stage_count_once() -> None:
    """User code holds what the stage's last call takes already."""
    calls = (call("0"), call("1", held_bytes=8), call("2", passed=((2, 8),), input_bytes=8))
    assert Costs(calls).stage_bytes(1, 2, "fused").activations == 8 + 10 + 2


def test_calls_in_flight_get_what_nothing_else_needs() -> None:
    calls = tuple(call(str(i), input_bytes=4, waiting=i, returning=10 + i, forward_bytes=1) for i in range(4))
    plan, costs = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 4"), Costs(calls)
    need, ahead = device_bytes(plan, costs, 2), ahead_bytes(plan, costs, 2)
    assert ahead > 0
    for budget, lead in ((None, 50), (need, 0), (need + ahead, 0), (need + ahead + 20, 20), (need + ahead + 90, 50)):
        assert lead_within(plan, costs, 2, budget, 50) == lead
        without = planned_bytes(plan, costs, 2, budget)
        assert planned_bytes(plan, costs, 2, budget, 50) == without + lead
        assert budget is None or without + lead <= budget


def test_the_host_holds_each_number_once() -> None:
    plan = Plan.parse("forward 0-1; fused 2-3; backward 1 0; round 3")
    frozen = Costs((call("a", needs_backward=False), *even(3)))
    mixed = {item.name: item for item in host_items(plan, frozen, Parameters(1000, 10, 2))}
    assert [item.nbytes for item in mixed.values()] == [4000, 2000, 20, 4000, 8000, 3 * 5]
    assert [item.locked for item in mixed.values()] == [False, True, True, True, False, True]
    shared = host_items(plan, Costs(tuple(call(str(i), gradients=1500) for i in range(4))), Parameters(1000, 0, 4))
    assert shared[1].nbytes == 4 * 1500  # a weight of two layers has two sums
    late = host_items(plan, frozen, Parameters(1000, 0, 4, apart=True))
    assert [item.nbytes for item in late] == [4000, 4000, 4000, 8000, 3 * 5]
    assert [item.locked for item in late] == [False, True, True, False, True]
    same = host_items(plan, frozen, Parameters(1000, 0, 4))
    assert [item.nbytes for item in same] == [4000, 4000, 8000, 3 * 5]  # masters are what is copied
    assert same[0].locked


@pytest.mark.parametrize("reduced", [None, 200])
def test_gradients_of_rounds_side_by_side_arrive_beside_the_sums(reduced: int | None) -> None:
    costs = Costs(tuple(call(str(i), gradients=400) for i in range(4)))
    costs = Costs(tuple(replace(one, reduced_bytes=reduced) for one in costs))
    plan, parameters = Plan.single(4, 1), Parameters(400, 0, 4)
    alone, beside = (
        {item.name: item for item in host_items(plan, costs, parameters, workers, 4)} for workers in (1, 2)
    )
    arrive = "gradients as they arrive"
    assert beside[arrive].nbytes == 4 * (reduced or 400) and beside[arrive].locked
    assert beside["gradients, fp32"] == alone["gradients, fp32"]
    assert (arrive in alone) == (reduced is not None)
