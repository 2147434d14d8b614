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
    Parameters,
    ahead_bytes,
    arena_bytes,
    device_bytes,
    device_items,
    fits,
    host_items,
    partition_within,
    planned_bytes,
    reserved_within,
    waiting_bytes,
)
from lightning_roundpipe.planning.shapes import sizes_of
from lightning_roundpipe.planning.span import Span


def test_counted_by_hand() -> None:
    """Calls of 100 weights, 40 gradients and 10 activations: the largest stage, and its neighbours on the worker."""
    costs = even(4)

    def both(text: str, costs: Costs = costs, workers: int = 1) -> tuple[int, int]:
        plan = Plan.parse(text)
        return device_bytes(plan, costs, workers), device_bytes(plan, costs, workers, most=True)

    # 300 for the forward stage, while the 140 of the backward stage before it leave.
    assert both("forward 0-2; fused 3; backward 2 1 0; round 1") == (300 + 10, 300 + 140 + 10)
    assert both("forward 0 1; fused 2-3; backward 1 0; round 1") == (280 + 20, 140 + 280 + 20)
    assert both(str(Plan.per_call(4))) == (140 + 10, 140 + 140 + 10)
    # On two workers, the forward stage's 300 run while the backward stage's 300 come.
    assert both("forward 0-2; fused 3; backward 0-2; round 1", workers=2) == (420 + 10, 300 + 300 + 10)
    frozen = Costs(tuple(call(f"layer{i}", needs_backward=i > 1) for i in range(4)))
    assert both(str(Plan.single(4)), frozen) == (480 + 20, 2 * 480 + 20)


def test_without_a_budget_the_partitioner_decides() -> None:
    assert partition_within(even(6), 2, 4, None, None) == greedy_partition(even(6), 2, 4)
    assert partition_within(even(6), 2, 4, 3, None).round_microbatches == 3


def test_large_weights_and_large_activations_of_different_stages() -> None:
    """Each stage fits into the budget, and the largest weights do not beside the largest activations."""
    frozen = (call(f"frozen{i}", 0.1, 0.0, gradients=0, needs_backward=False) for i in range(6))
    wide = (call(f"wide{i}", weights=20, gradients=20, activations=450, forward_bytes=1) for i in range(2))
    costs, budget = Costs((*frozen, *wide)), 1000
    plan = partition_within(costs, 1, 1, None, budget)
    assert device_bytes(plan, costs, 1) <= budget
    assert device_bytes(greedy_partition(costs, 1, 1, stage_bytes=budget), costs, 1) > budget


def test_a_budget_that_nothing_fits_into() -> None:
    costs = Costs((*even(2), call("table", weights=900)))
    with pytest.raises(ValueError, match=r"may use 900 bytes, .* needs 950.*'table'.*Raise memory_budget"):
        partition_within(costs, 2, 2, None, 900)
    assert device_bytes(partition_within(costs, 2, 2, None, 950), costs, 2) == 950


def test_rounds_are_as_large_as_fits() -> None:
    """Of 8 microbatches: all, or else equal parts of them, but 3 (as many as workers), or what is asked for."""
    costs = Costs(tuple(call(f"layer{i}", waiting=10, returning=10) for i in range(4)))
    for size in (8, 4, 3):
        exact = device_bytes(Plan.per_call(4, size), costs, 3, most=True)
        for room in (0, 9):  # the next larger part takes more
            plan = partition_within(costs, 3, 8, None, exact + room)
            assert plan.round_microbatches == size
            assert device_bytes(plan, costs, 3) <= exact + room
    exact = device_bytes(Plan.per_call(4, 3), costs, 3)
    with pytest.raises(ValueError, match="2 waiting microbatches with up to 20"):
        partition_within(costs, 3, 8, None, exact - 1)
    with pytest.raises(ValueError, match="3 waiting microbatches"):
        partition_within(costs, 3, 8, None, exact, min_round=4)
    with pytest.raises(ValueError, match="7 waiting microbatches"):
        partition_within(costs, 3, 8, 8, exact)


def test_an_arena_has_what_is_left() -> None:
    """From the smallest to the largest, when tensors that are brought ahead have their room."""
    costs = Costs(tuple(call(f"layer{i}", input_bytes=4, waiting=4) for i in range(4)))
    plan = Plan.per_call(4)
    least, most = arena_bytes(plan, costs, 2)
    ahead, beside = ahead_bytes(plan, costs, 2), device_bytes(plan, costs, 2) - least
    assert (least, most) == (140, 280) and ahead > 0
    for budget, arena in ((None, most), (0, least), (ahead, least), (ahead + 50, least + 50), (ahead + 999, most)):
        limit = None if budget is None else least + beside + budget
        reserved = reserved_within(plan, costs, 2, limit)
        assert reserved.arena == arena
        assert limit is None or planned_bytes(plan, costs, 2, limit) <= limit
        assert reserved.room is None or budget is None or reserved.room >= min(ahead, budget)
    assert fits(plan, costs, 2, most + beside, most=True) and not fits(plan, costs, 2, most + beside - 1, most=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6), data=st.data())
def test_the_table_of_plans_counts_as_the_plan_does(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    costs = Costs(tuple(call(f"{i}", weights=w, gradients=g) for i, (w, g) in enumerate(sizes)))
    first, workers = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(1, 3))
    cut = Plan.per_call(len(sizes))
    plan = replace(cut, forward=cut.forward[:first], fused=Span(first, len(sizes) - 1), backward=cut.backward[-first:])
    if not first:
        plan = Plan.single(len(sizes))
    shape, cuts = sizes_of(plan)
    for most in (False, True):
        need = device_bytes(plan, costs, workers, most=most)
        for memory, expected in ((need, True), (need - 1, False)):
            if memory > 0:
                assert MemoryTable(costs, workers, memory, most=most).fits(shape, np.array([cuts])) == expected


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
    held_bytes=st.integers(0, 10),
    returning_bytes=st.integers(0, 20),
    backward_held_bytes=st.integers(0, 10),
    shared=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=1, max_size=7), budget=st.integers(0, 1500), workers=st.integers(1, 4))
def test_whatever_the_model_the_plan_fits_or_nothing_does(calls: list[CallCost], budget: int, workers: int) -> None:
    costs = Costs(tuple(calls))
    least = device_bytes(Plan.per_call(len(calls), min(workers, 3)), costs, workers)
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
    # On several workers, those of the worker's stage before may be more.
    assert waiting_bytes(plan, costs, 2) == [3 * 11, 3 * 3, 3 * 12, 3 * 11, 3 * 12]
    least, arena = arena_bytes(plan, costs, 1)
    assert (least, arena) == (280, 280 + 200)
    assert arena_bytes(plan, costs, 2) == (280, 280 + 140)
    assert device_bytes(plan, costs, 1) == least + 10 + 3 * 12
    # The first backward stage: its own call's inputs, and the gradients, which one worker has already. In the
    # second one the other call's inputs come as well.
    assert planned_bytes(plan, costs, 1, None) == arena + 10 + 3 * 12 + 4 + max(0, 4 - 3)
    assert planned_bytes(plan, costs, 2, None) == 280 + 140 + 14 + 3 * 12 + 4 + 12  # in the second backward stage
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


def test_calls_in_flight_come_before_a_larger_arena() -> None:
    calls = tuple(call(str(i), input_bytes=4, waiting=i, returning=10 + i, forward_bytes=1) for i in range(4))
    plan, costs = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 4"), Costs(calls)
    need, ahead = device_bytes(plan, costs, 2), ahead_bytes(plan, costs, 2)
    least, _ = arena_bytes(plan, costs, 2)
    assert ahead > 0
    for budget, lead in ((None, 50), (need, 0), (need + ahead, 0), (need + ahead + 20, 20), (need + ahead + 90, 50)):
        reserved = reserved_within(plan, costs, 2, budget, 50)
        assert reserved.lead == lead
        if budget is not None:
            assert reserved.arena == least + (40 if lead == 50 else 0)
            assert planned_bytes(plan, costs, 2, budget, 50) == budget


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
