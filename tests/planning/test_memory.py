import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even

from lightning_roundpipe.planning import CallCost, Costs, Plan
from lightning_roundpipe.planning.batch import MemoryTable, sizes_of
from lightning_roundpipe.planning.memory import Parameters, boundary_bytes, device_bytes, fits, host_items
from lightning_roundpipe.planning.partition import TooSmall, partition_within
from lightning_roundpipe.planning.problem import Problem


def test_counted_by_hand():
    """Calls of 100 weights, 40 gradients and 10 activations: the largest stage, and its neighbours on the worker."""
    costs = even(4)

    def both(text, costs=costs, workers=1):
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


def test_a_budget_that_nothing_fits_into():
    costs = Costs((*even(2), call("table", weights=900)))
    with pytest.raises(TooSmall, match=r"may use 900 bytes, .* needs 950.*'table'") as raised:
        partition_within(Problem.usual(costs, 2, 2, 900))
    assert (raised.value.enough, raised.value.round_microbatches, raised.value.parts) == (950, None, None)
    assert device_bytes(partition_within(Problem.usual(costs, 2, 2, 950)), costs, 2) == 950


def test_rounds_are_as_large_as_fits():
    """Of 8 microbatches: all, or else equal parts of them, but 3 (as many as workers), or what is asked for."""
    costs = Costs(tuple(call(f"layer{i}", waiting=10, returning=10) for i in range(4)))
    for size in (8, 4, 3):
        exact = device_bytes(Plan.per_call(4, size), costs, 3, most=True)
        for room in (0, 9):  # the next larger part takes more
            plan = partition_within(Problem.usual(costs, 3, 8, exact + room))
            assert plan.round_microbatches == size
            assert device_bytes(plan, costs, 3) <= exact + room
    exact = device_bytes(Plan.per_call(4, 3), costs, 3)
    with pytest.raises(ValueError, match="2 waiting microbatches with up to 20"):
        partition_within(Problem.usual(costs, 3, 8, exact - 1))
    with pytest.raises(ValueError, match="3 waiting microbatches"):
        partition_within(replace(Problem.usual(costs, 3, 8, exact), min_round=4))
    with pytest.raises(ValueError, match="7 waiting microbatches"):
        partition_within(Problem.usual(costs, 3, 8, exact), 8)


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
    handing_bytes=st.integers(0, 20),
    shared=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=2).map(tuple),
)


def test_a_fused_stage_holds_what_code_between_its_layers_makes():
    """And before the first graph that it keeps, the outputs of its calls that code holds."""
    held = {"kept_bytes": 10, "held_bytes": 7, "made_bytes": 2}
    calls = call("a", needs_backward=False), call("b", **held), call("c", **held | {"held_bytes": 19, "made_bytes": 4})
    costs = Costs(calls)
    sizes = [costs.stage_bytes(0, last, "fused").activations for last in range(3)]
    assert sizes == [10, 10 + 7, 2 * 10 + (7 - 2) + 4]


def test_a_backward_of_code_between_layers_runs_beside_another_workers_stage():
    """With one worker it runs in the turn of its own stage."""
    costs, plan = even(4), Plan.per_call(4, 3)
    more = costs.map(lambda call: replace(call, handing_bytes=30))
    assert device_bytes(plan, more, 1) == device_bytes(plan, costs, 1)
    assert device_bytes(plan, more, 2) == device_bytes(plan, costs, 2) + 30
    sizes = sizes_of(plan)
    for budget, enough in ((device_bytes(plan, more, 2), True), (device_bytes(plan, more, 2) - 1, False)):
        assert MemoryTable(more, 2, budget).fits(sizes[0], np.array([sizes[1]])) == [enough]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=1, max_size=7), budget=st.integers(0, 1500), workers=st.integers(1, 4))
def test_whatever_the_model_the_plan_fits_or_nothing_does(calls, budget, workers):
    costs = Costs(tuple(calls))
    problem = Problem.usual(costs, workers, 3, max(1, budget))
    least = device_bytes(Plan.per_call(len(calls), min(workers, 3)), costs, workers)
    if least > budget:
        with pytest.raises(ValueError, match="memory_budget"):
            partition_within(problem)
        return
    plan = partition_within(problem)
    plan.validate(costs.layers)
    assert device_bytes(plan, costs, workers) <= budget


def test_the_host_holds_each_number_once():
    plan = Plan.parse("forward 0-1; fused 2-3; backward 1 0; round 3")
    frozen = Costs((call("a", needs_backward=False), *even(3)))
    mixed = {item.name: item for item in host_items(plan, frozen, Parameters(1000, 10, 2))}
    assert [item.nbytes for item in mixed.values()] == [4000, 2000, 20, 4000, 8000, 3 * 5]
    assert [item.locked for item in mixed.values()] == [False, True, True, True, False, True]
    shared = host_items(plan, Costs(tuple(call(str(i), gradients=1500) for i in range(4))), Parameters(1000, 0, 4))
    assert shared[1].nbytes == 4 * 1500  # a weight of two layers has two sums
    late = host_items(plan, frozen, Parameters(1000, 0, 4, double_buffered=True))
    assert [item.nbytes for item in late] == [4000, 4000, 4000, 8000, 3 * 5]
    assert [item.locked for item in late] == [False, True, True, False, True]
    same = host_items(plan, frozen, Parameters(1000, 0, 4))
    assert [item.nbytes for item in same] == [4000, 4000, 8000, 3 * 5]  # masters are what is copied
    assert same[0].locked


@pytest.mark.parametrize(
    ("form", "weight", "moments"), [("fp32", 4, 8.0), ("bf16", 4, 4.0), ("int8", 4, 2 * (1 + 4 / 256))]
)
def test_forms_of_moments_and_gradients_in_flight(form, weight, moments):
    layers, each = 40, 10_000
    trained = layers * each
    costs = Costs(tuple(call(str(i), gradients=4 * each) for i in range(layers)))
    plan = Plan.per_call(layers, 4)
    known = Parameters(trained, 0, 2, optimizer_state=form, shares=True, by_layer=True)
    one_round = {item.name: item.nbytes for item in host_items(plan, costs, known, workers=1, microbatches=4)}
    boundaries = sum(nbytes for name, nbytes in one_round.items() if name.startswith("boundary"))
    in_flight = 3 * 4 * each  # of a layer a worker, and two more
    first_window = 4 * trained
    assert sum(one_round.values()) - boundaries == weight * trained + max(
        math.ceil(moments * trained) + in_flight, first_window
    )
    rounds = host_items(plan, costs, known, workers=1, microbatches=8)
    assert next(item.nbytes for item in rounds if item.name == "gradients, fp32") == 4 * trained


@pytest.mark.parametrize(
    ("by_layer", "microbatches", "state", "gradients"),
    [
        # What is in flight travels in half the bytes, and is used as it has come.
        (True, 4, "fp32", 3 * 2),
        # With clipping by norm, all is there as it has come; a layer at a time is widened for its norm.
        (False, 4, "fp32", 40 * 2 + 4),
        # Rounds are summed, and what arrives is added.
        (True, 8, "fp32", 40 * 4 + 3 * 2),
        # Moments in int8 take less than what the first window has: all gradients, of one microbatch as it sends them.
        (True, 1, "int8", 3 * 2),
        (True, 4, "int8", 40 * 4 + 2),
    ],
)
def test_narrow_gradients_stay_as_they_have_come_if_nothing_is_added(by_layer, microbatches, state, gradients):
    layers, each = 40, 10_000
    costs = Costs(tuple(call(str(i), gradients=4 * each, reduced_bytes=2 * each) for i in range(layers)))
    known = Parameters(layers * each, 0, 2, optimizer_state=state, shares=True, by_layer=by_layer)
    items = host_items(Plan.per_call(layers, 4), costs, known, workers=1, microbatches=microbatches)
    assert sum(item.nbytes for item in items if item.name.startswith("gradients")) == gradients * each


def test_stages_that_make_inputs_again_keep_less_on_the_host():
    call = CallCost("0", 1.0, 2.0, 100, 50, 10, 1000, needs_backward=True, input_bytes=10)
    calls = (replace(call, layer=str(i), recomputable=((1, 0, 10),) if i else ()) for i in range(7))
    costs, plan = Costs(tuple(calls)), Plan.per_call(7, 2)
    assert boundary_bytes(plan, costs) == boundary_bytes(replace(plan, recompute_ahead=True), costs) == 2 * 6 * 10
    budget = 3 * 150 + 100 + 3 * 1000
    found = Problem.usual(costs, 2, 2, budget).keeping_least(plan)
    assert [len(span) for span in found.backward] == [3, 3]
    assert fits(found, costs, 2, budget)
    assert boundary_bytes(found, costs) == 2 * 2 * 10
    assert Problem.usual(costs, 2, 2).keeping_least(plan) == plan
