from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even

from lightning_roundpipe.planning import Costs, Plan, Span, greedy_partition
from lightning_roundpipe.planning.memory import device_bytes
from lightning_roundpipe.planning.partition import partition_within, pipeline_length
from lightning_roundpipe.planning.problem import Problem


def objective_s(plan, costs, workers, microbatches):
    stages = len(plan.stages())
    length = pipeline_length(stages, workers, microbatches)
    return length * max(costs.stage_time_s(stage.first, stage.last, stage.phase) for stage in plan.stages())


def counted_length(stages, workers, microbatches):
    """The last end of ``stages`` slots of length 1, by the engine's rules, one operation after another."""
    end = {}
    for slot in range(stages):
        for m in range(microbatches):
            before = end.get((slot - 1, m), 0)
            worker = end.get((slot, m - 1), 0) if m else end.get((slot - workers, microbatches - 1), 0)
            end[slot, m] = max(before, worker) + 1
    return max(end.values())


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_pipeline_length_is_what_counting_slots_gives(workers):
    for stages in range(1, 20):
        for microbatches in range(1, 12):
            counted = workers * counted_length(stages, workers, microbatches)
            length = pipeline_length(stages, workers, microbatches)
            if stages < workers or microbatches < workers or stages % workers == 0:
                assert length == counted, (stages, microbatches)
            else:
                assert length <= counted, (stages, microbatches)


def fits(plan, costs, stage_bytes):
    return stage_bytes is None or all(
        costs.stage_bytes(stage.first, stage.last, stage.phase).total <= stage_bytes for stage in plan.stages()
    )


def cuttings(n):
    """Every way to cut calls 0 to n - 1 into consecutive spans."""
    if n == 0:
        yield ()
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            yield tuple(Span(a, b - 1) for a, b in zip((0, *cuts), (*cuts, n), strict=True))


def every_plan(n):
    for fused in range(n):
        for forward in cuttings(fused):
            for backward in cuttings(fused):
                yield Plan(forward, Span(fused, n - 1), backward[::-1], 1)


call_costs = st.builds(
    call,
    st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h"]),
    st.integers(0, 9).map(float),
    st.integers(0, 20).map(float),
    weights=st.integers(0, 100),
    gradients=st.integers(0, 100),
    activations=st.integers(0, 100),
    needs_backward=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(call_costs, min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 16),
    st.none() | st.integers(300, 900),
)
def test_no_plan_of_the_family_is_better(calls, workers, microbatches, stage_bytes):
    costs = Costs(tuple(calls))
    plan = greedy_partition(costs, workers, microbatches, stage_bytes=stage_bytes)
    plan.validate(costs.layers)
    assert fits(plan, costs, stage_bytes)
    best = min(
        (objective_s(other, costs, workers, microbatches), len(other.stages()))
        for other in every_plan(len(calls))
        if fits(other, costs, stage_bytes)
    )
    assert (objective_s(plan, costs, workers, microbatches), len(plan.stages())) == best


def test_golden_for_equal_layers():
    """A forward stage holds three times the layers of a backward stage, as recomputation makes backward three times."""
    assert str(greedy_partition(even(12), 4, 16)) == (
        "forward 0-1 2-4 5-7 8-10; fused 11; backward 10 9 8 7 6 5 4 3 2 1 0; round 16"
    )


def test_call_that_fits_nowhere_is_named():
    costs = Costs((call("a"), call("wide", weights=900), call("c")))
    message = (
        r"Layer 'wide' \(call 1\) needs 950 bytes .*900 of weights, 40 of gradients, 10 of activations.*"
        r"may hold 800. Raise memory_budget, lower microbatch_size, or name smaller modules in layers="
    )
    with pytest.raises(ValueError, match=message):
        greedy_partition(costs, 2, 2, stage_bytes=800)


def test_stages_of_a_given_length():
    """Layers of 1 s forward and 3 s backward (with recomputation), a head of 1 s and 2 s that is fused."""
    costs = even(7)
    plan = greedy_partition(costs, 2, 4, stage_s=6.0)
    assert str(plan).startswith("forward 0-4; fused 5-6; backward 3-4 1-2 0")
    assert len(greedy_partition(costs, 2, 4, stage_s=3.0).backward) == 6
    for phase, spans in (("forward", plan.forward), ("fused", (plan.fused,)), ("backward", plan.backward)):
        assert all(costs.stage_time_s(span.first, span.last, phase) <= 6 for span in spans)
    assert partition_within(Problem.usual(costs, 2, 4, 10**6), stage_s=6.0) == plan
    small = partition_within(Problem.usual(costs, 2, 4, 700), stage_s=6.0)  # memory is kept to, too
    assert device_bytes(small, costs, 2, most=True) <= 700 < device_bytes(plan, costs, 2, most=True)
    for attempt in (
        lambda: greedy_partition(costs, 2, 4, stage_s=2.9),
        lambda: partition_within(Problem.usual(costs, 2, 4, 700), stage_s=2.9),
    ):
        with pytest.raises(ValueError, match=r"stage_seconds=2.9 is shorter .* 'layers.\d' 3 s \(fused\)"):
            attempt()
