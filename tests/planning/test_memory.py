from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even

from lightning_roundpipe.planning import CallCost, Costs, Plan, greedy_partition
from lightning_roundpipe.planning.memory import Parameters, device_bytes, device_items, host_items, partition_within


def test_counted_by_hand() -> None:
    """Calls of 100 weights, 40 gradients and 10 activations."""
    costs = even(4)
    assert device_bytes(Plan.parse("forward 0-2; fused 3; backward 2 1 0; round 1"), costs) == 2 * 300 + 2 * 40 + 10
    assert device_bytes(Plan.parse("forward 0 1; fused 2-3; backward 1 0; round 1"), costs) == 2 * 200 + 2 * 80 + 20
    assert device_bytes(Plan.per_call(4), costs) == 2 * 100 + 2 * 40 + 10
    frozen = Costs(tuple(call(f"layer{i}", needs_backward=i > 1) for i in range(4)))
    assert device_bytes(Plan.single(4), frozen) == 2 * 400 + 2 * 80 + 2 * 10 + 10


def test_without_a_budget_the_partitioner_decides() -> None:
    assert partition_within(even(6), 2, 4, None, None) == greedy_partition(even(6), 2, 4)
    assert partition_within(even(6), 2, 4, 3, None).round_microbatches == 3


def test_large_weights_and_large_gradients_of_different_stages() -> None:
    """Each stage fits into half of the budget, and the arenas for both kinds of stage do not fit together."""
    costs = Costs((*(call(f"frozen{i}", gradients=0, needs_backward=False) for i in range(6)), *even(2)))
    budget = 2 * 500
    plan = partition_within(costs, 1, 1, None, budget)
    assert device_bytes(plan, costs) <= budget
    assert device_bytes(greedy_partition(costs, 1, 1, stage_bytes=budget), costs) > budget


def test_a_budget_that_nothing_fits_into() -> None:
    costs = Costs((*even(2), call("table", weights=900)))
    with pytest.raises(ValueError, match=r"may use 1,500 bytes, .* needs 1,890.*'table'.*Raise memory_budget"):
        partition_within(costs, 2, 2, None, 1500)
    assert device_bytes(partition_within(costs, 2, 2, None, 1890), costs) == 1890


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
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=1, max_size=7), budget=st.integers(0, 1500), workers=st.integers(1, 4))
def test_whatever_the_model_the_plan_fits_or_nothing_does(calls: list[CallCost], budget: int, workers: int) -> None:
    costs = Costs(tuple(calls))
    least = device_bytes(Plan.per_call(len(calls)), costs)
    if least > budget:
        with pytest.raises(ValueError, match="memory_budget"):
            partition_within(costs, workers, 3, None, budget)
        return
    plan = partition_within(costs, workers, 3, None, budget)
    plan.validate(costs.layers)
    assert device_bytes(plan, costs) <= budget


@pytest.mark.parametrize(
    "text",
    ["forward 0-2; fused 3; backward 2 1 0; round 2", "forward 0 1; fused 2-3; backward 1 0; round 2"],
)
def test_items_add_up(text: str) -> None:
    plan, costs = Plan.parse(text), even(4)
    assert sum(item.nbytes for item in device_items(plan, costs)) == device_bytes(plan, costs)


def test_the_host_holds_each_number_once() -> None:
    plan = Plan.parse("forward 0-1; fused 2-3; backward 1 0; round 3")
    frozen = Costs((call("a", needs_backward=False), *even(3)))
    mixed = {item.name: item for item in host_items(plan, frozen, Parameters(1000, 10, 2))}
    assert [item.nbytes for item in mixed.values()] == [4000, 2000, 20, 4000, 8000, 3 * 5]
    assert [item.locked for item in mixed.values()] == [False, True, True, True, False, True]
    same = host_items(plan, frozen, Parameters(1000, 0, 4))
    assert [item.nbytes for item in same] == [4000, 4000, 8000, 3 * 5]  # masters are what is copied
    assert same[0].locked
