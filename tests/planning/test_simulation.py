from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even, timed

from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.partition import pipeline_length
from lightning_roundpipe.planning.simulation import HostTime, Simulation, simulate


def rows(simulation: Simulation) -> list[tuple[int, int, int, float, float]]:
    return [(t.slot, t.worker, t.microbatch, t.start_s, t.end_s) for t in simulation.turns]


def test_counted_by_hand() -> None:
    """Forward 1, fused 1 + 2, backward 1 + 2, two microbatches on two workers."""
    simulation = simulate(Plan.parse("forward 0; fused 1; backward 0; round 2"), even(2), 2, 2)
    assert rows(simulation) == [
        (0, 0, 0, 0, 1),
        (0, 0, 1, 1, 2),
        (1, 1, 0, 1, 4),
        (1, 1, 1, 4, 7),
        (2, 0, 0, 4, 7),
        (2, 0, 1, 7, 10),
    ]
    assert simulation.makespan_s == 10
    assert simulation.busy_s == 14
    assert simulation.bubble_pct == pytest.approx(30)


def test_rounds_follow_each_other_and_add_to_the_same_sums_one_after_another() -> None:
    simulation = simulate(Plan.parse("forward 0; fused 1; backward 0; round 2"), even(2), 2, 4)
    assert rows(simulation)[6:] == [
        (3, 1, 2, 7, 8),  # worker 1 is free from 7 on
        (3, 1, 3, 8, 9),
        (4, 0, 2, 10, 13),
        (4, 0, 3, 13, 16),
        (5, 1, 2, 13, 16),
        (5, 1, 3, 16, 19),
    ]
    # Four workers: the second round's fused stage waits for the first one's, though its own worker is idle.
    slow = timed([0.0, 1.0], [0.0, 9.0])
    turns = simulate(Plan.parse("forward 0; fused 1; backward 0; round 2"), slow, 4, 4).turns
    fused = [(t.worker, t.start_s, t.end_s) for t in turns if t.phase == "fused"]
    assert fused == [(1, 0, 10), (1, 10, 20), (0, 20, 30), (0, 30, 40)]


def test_rounds_of_one_microbatch_run_side_by_side() -> None:
    """A microbatch is as far behind the one before as the longest call, a backward of 2, takes."""
    plan = Plan.parse("forward none; fused 0-1; backward none; round 1")
    simulation = simulate(plan, even(2), 2, 4)
    assert rows(simulation) == [(0, 0, 0, 0, 6), (1, 1, 1, 2, 8), (2, 0, 2, 6, 12), (3, 1, 3, 8, 14)]
    assert simulate(plan, even(2), 1, 4).makespan_s == 24
    # A slot is closed behind that of the microbatch before, and that worker is not free earlier.
    short = timed([1.0, 1.0], [0.0, 0.0])
    assert [t.start_s for t in simulate(plan, short, 2, 4).turns] == [0, 1, 2, 3]


def test_what_needs_no_backward_costs_none() -> None:
    costs = Costs((call("table", 1, 9, needs_backward=False), call("head", 1, 2)))
    simulation = simulate(Plan.parse("forward 0; fused 1; backward 0; round 1"), costs, 1, 1)
    assert simulation.makespan_s == 1 + 3


def test_host_time() -> None:
    plan = Plan.parse("forward 0; fused 1; backward 0; round 1")
    host = HostTime(call_s=0.5, turn_s=0.25, hop_s=3)
    turns = simulate(plan, even(2), 1, 1, host).turns
    assert [(t.start_s, t.end_s) for t in turns] == [(0, 1.75), (1.75, 6), (6, 9.75)]  # nothing changes workers
    turns = simulate(plan, even(2), 2, 1, host).turns
    assert [t.start_s for t in turns] == [0, 4.75, 12]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5])
def test_equal_stages_take_what_the_partitioner_counts(workers: int, microbatches: int) -> None:
    """It counts stages of one length; here a forward takes as long as a recomputation and backward together."""
    for calls in range(1, 7):
        costs = Costs(tuple(call(f"layer{i}", 1, 0) for i in range(calls)))
        plan = Plan.per_call(calls, microbatches)
        stages = len(plan.stages())
        if stages >= workers and microbatches >= workers and stages % workers:
            continue  # the count is the paper's formula there, which is a little less
        counted = pipeline_length(stages, workers, microbatches) / workers
        assert simulate(plan, costs, workers, microbatches).makespan_s == pytest.approx(counted)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    times=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=8),
    workers=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    round_microbatches=st.integers(1, 7),
)
def test_the_engines_rules_hold(
    times: list[tuple[float, float]], workers: int, microbatches: int, round_microbatches: int
) -> None:
    costs = timed([forward for forward, _ in times], [backward for _, backward in times])
    plan = Plan.per_call(len(times), round_microbatches)
    simulation = simulate(plan, costs, workers, microbatches)
    stages = len(plan.stages())
    ended: dict[tuple[int, int], float] = {}
    free = [0.0] * workers
    for turn in simulation.turns:
        assert turn.worker == turn.slot % workers
        assert turn.start_s >= free[turn.worker]
        assert turn.start_s >= ended.get((turn.microbatch, turn.slot % stages - 1), 0.0)
        free[turn.worker] = ended[turn.microbatch, turn.slot % stages] = turn.end_s
    assert len(ended) == microbatches * stages
    assert simulation.busy_s == pytest.approx(sum(t.end_s - t.start_s for t in simulation.turns))
    assert simulation.makespan_s * workers >= simulation.busy_s - 1e-9
    assert 0 <= simulation.bubble_pct + 1e-9 <= 100


def test_what_makes_no_sense_is_refused() -> None:
    plan = Plan.per_call(2)
    with pytest.raises(ValueError, match="workers=0"):
        simulate(plan, even(2), 0, 1)
    with pytest.raises(ValueError, match="microbatches=0"):
        simulate(plan, even(2), 1, 0)
    with pytest.raises(ValueError, match=r"layers\.2"):
        simulate(plan, even(3), 1, 1)
    with pytest.raises(ValueError, match="hop_s=-1"):
        HostTime(hop_s=-1)
