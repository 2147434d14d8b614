from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even, timed

from lightning_roundpipe.planning import CallCost, Costs, Plan, Span, greedy_partition
from lightning_roundpipe.planning.memory import device_bytes, partition_within
from lightning_roundpipe.planning.partition import pipeline_length


def longest_s(plan: Plan, costs: Costs) -> float:
    return max(costs.stage_time_s(stage.first, stage.last, stage.phase) for stage in plan.stages())


def objective_s(plan: Plan, costs: Costs, workers: int, microbatches: int) -> float:
    stages = len(plan.stages())
    length = pipeline_length(stages, workers, microbatches)
    return length * longest_s(plan, costs)


def counted_length(stages: int, workers: int, microbatches: int) -> int:
    """The last end of ``stages`` slots of length 1, by the engine's rules, one operation after another."""
    end: dict[tuple[int, int], int] = {}
    for slot in range(stages):
        for m in range(microbatches):
            before = end.get((slot - 1, m), 0)
            worker = end.get((slot, m - 1), 0) if m else end.get((slot - workers, microbatches - 1), 0)
            end[slot, m] = max(before, worker) + 1
    return max(end.values())


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_pipeline_length_is_what_counting_slots_gives(workers: int) -> None:
    for stages in range(1, 20):
        for microbatches in range(1, 12):
            counted = workers * counted_length(stages, workers, microbatches)
            length = pipeline_length(stages, workers, microbatches)
            if stages < workers or microbatches < workers or stages % workers == 0:
                assert length == counted, (stages, microbatches)
            else:
                assert length <= counted, (stages, microbatches)


def test_one_stage_is_no_plan_for_several_workers() -> None:
    """The paper's count alone gives a single stage the bubble of a full pipeline, and would choose it here."""
    calls = tuple(call(f"layer{i}") for i in range(6))
    assert len(greedy_partition(Costs(calls), 2, 3).stages()) > 1


def fits(plan: Plan, costs: Costs, stage_bytes: int | None) -> bool:
    return stage_bytes is None or all(
        costs.stage_bytes(stage.first, stage.last, stage.phase).total <= stage_bytes for stage in plan.stages()
    )


def cuttings(n: int) -> Iterator[tuple[Span, ...]]:
    """Every way to cut calls 0 to n - 1 into consecutive spans."""
    if n == 0:
        yield ()
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            yield tuple(Span(a, b - 1) for a, b in zip((0, *cuts), (*cuts, n), strict=True))


def every_plan(n: int) -> Iterator[Plan]:
    for fused in range(n):
        for forward in cuttings(fused):
            for backward in cuttings(fused):
                yield Plan(forward, Span(fused, n - 1), backward[::-1], 1)


def made(
    costs: Costs,
    workers: int = 4,
    microbatches: int = 4,
    stage_bytes: int | None = None,
    stage_s: float | None = None,
) -> str:
    plan = greedy_partition(costs, workers, microbatches, stage_bytes=stage_bytes, stage_s=stage_s)
    plan.validate(costs.layers)
    return str(plan)


# -- the objective ---------------------------------------------------------------------------------------------------

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
def test_no_plan_of_the_family_is_better(
    calls: list[CallCost], workers: int, microbatches: int, stage_bytes: int | None
) -> None:
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


@pytest.mark.parametrize("seed", range(20))
def test_optimal_for_times_that_are_no_round_numbers(seed: int) -> None:
    random = Random(seed)
    costs = timed([random.random() for _ in range(7)], [random.uniform(1, 3) for _ in range(7)])
    workers, microbatches = random.randint(1, 6), random.randint(1, 12)
    plan = greedy_partition(costs, workers, microbatches)
    best = min(objective_s(other, costs, workers, microbatches) for other in every_plan(7))
    assert objective_s(plan, costs, workers, microbatches) == pytest.approx(best, rel=1e-9)


# -- what it decides -------------------------------------------------------------------------------------------------


def test_golden_for_equal_layers() -> None:
    """A forward stage holds three times the layers of a backward stage, as recomputation makes backward three times."""
    assert made(even(12), workers=4, microbatches=16) == (
        "forward 0-1 2-4 5-7 8-10; fused 11; backward 10 9 8 7 6 5 4 3 2 1 0; round 16"
    )


def test_one_worker_needs_no_cut() -> None:
    assert made(even(9), workers=1) == "forward none; fused 0-8; backward none; round 4"


def test_stages_are_cut_to_match_a_heavy_head() -> None:
    costs = timed([1.0] * 20 + [9.0], [2.0] * 20 + [18.0])
    assert made(costs) == "forward 0-18; fused 19-20; backward 9-18 0-8; round 4"


def test_round_is_passed_on() -> None:
    assert greedy_partition(even(4), 2, 8).round_microbatches == 8
    assert greedy_partition(even(4), 2, 8, round_microbatches=3).round_microbatches == 3


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage_bytes", [150, 200, 320, 450, 700, 1000, 5000])
def test_stages_stay_within_memory(stage_bytes: int) -> None:
    costs = even(20)
    plan = greedy_partition(costs, 1, 4, stage_bytes=stage_bytes)
    plan.validate(costs.layers)
    assert fits(plan, costs, stage_bytes)


def test_memory_binds_by_phase() -> None:
    """450 bytes: four layers forward (4 x 100 + 10), three backward (3 x 140 + 10), three fused (3 x 140 + 3 x 10)."""
    assert made(even(11), stage_bytes=450, stage_s=1e3) == (
        "forward 0-3 4-7; fused 8-10; backward 5-7 2-4 0-1; round 4"
    )


def test_kept_graph_limits_the_fused_stage() -> None:
    """In the fused stage activations add up; in a backward stage only the worst call's count."""
    costs = Costs(tuple(call(f"layers.{n}", weights=10, gradients=10, activations=100) for n in range(8)))
    assert made(costs, stage_bytes=260, stage_s=1e3) == "forward 0-5; fused 6-7; backward 0-5; round 4"


def test_layer_called_again_takes_no_more_memory_but_for_its_gradients() -> None:
    costs = Costs(tuple(call("shared", activations=0) for _ in range(6)))
    assert made(costs, workers=1, stage_bytes=100 + 6 * 40) == "forward none; fused 0-5; backward none; round 4"


def test_call_that_fits_nowhere_is_named() -> None:
    costs = Costs((call("a"), call("wide", weights=900), call("c")))
    message = (
        r"Layer 'wide' \(call 1\) needs 950 bytes .*900 of weights, 40 of gradients, 10 of activations.*"
        r"may hold 800. Raise memory_budget, lower microbatch_size, or name smaller modules in layers="
    )
    with pytest.raises(ValueError, match=message):
        greedy_partition(costs, 2, 2, stage_bytes=800)


def test_frozen_call_must_fit_forward() -> None:
    costs = Costs((call("embed", weights=900, needs_backward=False), call("b")))
    with pytest.raises(ValueError, match=r"'embed' \(call 0\) needs 910 bytes"):
        greedy_partition(costs, 2, 2, stage_bytes=800)
    assert made(costs, stage_bytes=910) == "forward 0; fused 1; backward 0; round 4"


# -- odd cases -------------------------------------------------------------------------------------------------------


def test_one_call() -> None:
    assert made(even(1)) == "forward none; fused 0; backward none; round 4"


def test_two_calls() -> None:
    assert made(even(2), workers=1) == "forward none; fused 0-1; backward none; round 4"
    assert made(even(2), stage_bytes=200) == "forward 0; fused 1; backward 0; round 4"


def test_costs_of_nothing() -> None:
    assert made(timed([0.0] * 5, [0.0] * 5)) == "forward none; fused 0-4; backward none; round 4"


def test_calls_without_backward_join_a_backward_stage_for_nothing() -> None:
    blocks = [call(f"layers.{n}") for n in range(6)]
    frozen = [call("vision", 3.0, needs_backward=False), call("embed", 0.0, needs_backward=False)]
    plan = greedy_partition(Costs((*frozen, *blocks)), 4, 8)
    assert plan.backward[-1] == Span(0, 2)


def test_nothing_needs_backward() -> None:
    costs = Costs(tuple(call(f"layers.{n}", needs_backward=False) for n in range(6)))
    greedy_partition(costs, 2, 4).validate(costs.layers)


@pytest.mark.parametrize(("workers", "microbatches", "message"), [(0, 1, "workers=0"), (1, 0, "microbatches=0")])
def test_numbers_that_make_no_sense(workers: int, microbatches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_partition(even(2), workers, microbatches)


def test_hundred_unequal_calls_are_planned_quickly() -> None:
    random = Random(0)
    costs = timed([random.random() for _ in range(100)], [random.random() for _ in range(100)])
    start = time.process_time()
    greedy_partition(costs, 8, 16, stage_bytes=900)
    assert time.process_time() - start < 2.0  # takes about 0.2 s; twice the promise, for slow machines


def test_stages_of_a_given_length() -> None:
    """Layers of 1 s forward and 3 s backward (with recomputation), a head of 1 s and 2 s that is fused."""
    costs = even(7)
    plan = greedy_partition(costs, 2, 4, stage_s=6.0)
    assert str(plan).startswith("forward 0-4; fused 5-6; backward 3-4 1-2 0")
    assert len(greedy_partition(costs, 2, 4, stage_s=3.0).backward) == 6
    for phase, spans in (("forward", plan.forward), ("fused", (plan.fused,)), ("backward", plan.backward)):
        assert all(costs.stage_time_s(span.first, span.last, phase) <= 6 for span in spans)
    assert partition_within(costs, 2, 4, None, 10**6, stage_s=6.0) == plan
    small = partition_within(costs, 2, 4, None, 700, stage_s=6.0)  # memory is kept to, too
    assert device_bytes(small, costs, 2, most=True) <= 700 < device_bytes(plan, costs, 2, most=True)
    for attempt in (
        lambda: greedy_partition(costs, 2, 4, stage_s=2.9),
        lambda: partition_within(costs, 2, 4, None, 700, stage_s=2.9),
    ):
        with pytest.raises(ValueError, match=r"stage_seconds=2.9 is shorter .* 'layers.\d' 3 s \(fused\)"):
            attempt()
