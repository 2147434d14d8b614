from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
from planning.judge import Times, step_ends
from planning.making import call, even, keeps, timed

from lightning_roundpipe.engine import planner
from lightning_roundpipe.planning import CallCost, Costs, Plan, anneal, greedy_partition, pipeline, search
from lightning_roundpipe.planning.anneal import PlanTimer
from lightning_roundpipe.planning.batch import Pace
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits, MemoryTable
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.memory import device_bytes
from lightning_roundpipe.planning.moves import Neighbours, evened, recuts
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.search import baseline_within, paper_plan, search_partition
from lightning_roundpipe.planning.seeds import deal, round_choices
from lightning_roundpipe.planning.shapes import PlanShape, plan_of, sizes_of
from lightning_roundpipe.planning.timing import Timing
from lightning_roundpipe.planning.updates import UpdateModel

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its files import each other by their names

from paper_bubble import find_bubble
from paper_cases import Case, read_cases
from paper_schedules import run_case

PAPER = Path(__file__).parents[2] / "conf" / "cases" / "paper.json"
CASES = {case.model: case for case in read_cases(PAPER) if case.schedule == "roundpipe"}


@pytest.fixture(autouse=True)
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the work, but for slow tests."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(search, "_WORK_PER_SECOND", search._WORK_PER_SECOND / 10)


def ratio(case: Case, staleness: int, seconds: float) -> float:
    """Our time over the paper's: a plan's step alone (staleness 0), or the mean of 16 of many (1), judged apart."""
    host = HostTime(hop_s=case.hop_ms / 1e3)
    plan = search_partition(
        case.costs(), case.workers, case.microbatches, None, 1 if staleness else 0, host, search_seconds=seconds
    )
    assert plan.round_microbatches >= case.workers
    assert len(plan.fused) <= math.ceil(case.layers / 8) + 1
    assert Plan.parse(str(plan)) == plan
    plan.validate(case.costs().layers)
    times = Times(
        case.layers, case.forward_ms, case.backward_ms, case.head_forward_ms, case.head_backward_ms, case.hop_ms
    )
    row: dict[str, Any] = {
        "forward": [len(span) for span in plan.forward],
        "fused": len(plan.fused) - 1,
        "backward": [len(span) for span in plan.backward],
        "round_microbatches": plan.round_microbatches,
    }
    bubble = find_bubble(run_case(case))
    if not staleness:
        [makespan] = step_ends(times, row, case.workers, case.microbatches, 1)
        return makespan / bubble.makespan_ms
    ends = step_ends(times, row, case.workers, case.microbatches, 33)
    work = case.layers * (2 * case.forward_ms + case.backward_ms) + case.head_forward_ms + case.head_backward_ms
    paper = case.microbatches * work / (case.workers * (1 - bubble.asynchronous_pct / 100))
    return (ends[-1] - ends[-17]) / 16 / paper


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_papers_small_models_are_beaten_within_seconds(staleness: int) -> None:
    for model, most in (("qwen3-1.7b", (0.95, 0.96)), ("llama3.1-8b", (0.96, 0.975))):
        assert ratio(CASES[model], staleness, 30.0) <= most[staleness]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("staleness", "each", "mean"), [(0, 1.0005, 0.970), (1, 0.975, 0.960)])
def test_all_of_the_papers_models_are_beaten_by_default(staleness: int, each: float, mean: float) -> None:
    ratios = [ratio(case, staleness, 10.0) for case in CASES.values()]
    assert len(ratios) == 5
    assert max(ratios) <= each
    assert math.exp(sum(map(math.log, ratios)) / 5) <= mean


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_microbatches_hide_what_staleness_0_costs() -> None:
    """Step against period with 64 microbatches. Annealing millions of plans found no better one for staleness 0."""
    case = CASES["qwen3-1.7b"]
    steps = [
        judged(
            search_partition(case.costs(), 8, 64, staleness=staleness, search_seconds=30.0),
            case.costs(), 8, 64, staleness, 0.0,
        )
        for staleness in (0, 1)
    ]  # fmt: skip
    assert steps[0] <= 1.045 * steps[1]


def judged(plan: Plan, costs: Costs, workers: int, microbatches: int, staleness: int, hop_s: float) -> float:
    rules = Rules(1 if staleness else 0, host=HostTime(hop_s=hop_s))
    run = run_steps(replace(plan, recompute_ahead=True), costs, workers, microbatches, rules, 32 if staleness else 1)
    return run.period_s(16) if staleness else run.makespan_s


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("staleness", [0, 1])
def test_never_worse_than_the_papers_algorithm(workers: int, staleness: int) -> None:
    random = Random(workers)
    for microbatches in (workers, 2 * workers + 1, *([64] if workers in (2, 8) else [])):
        layers = random.randint(3, 20)
        head = random.uniform(0, 4)
        costs = Costs(
            (
                *(call(f"layers.{i}", 1.0, random.uniform(1, 3), weights=100, gradients=100) for i in range(layers)),
                call("head", head, 2 * head, weights=300, gradients=300, activations=50),
            )
        )
        for memory in (None, 1700):
            limits = Limits.usual(costs, workers, microbatches, memory)
            host = HostTime(hop_s=0.05)
            plan = search_partition(
                costs, workers, microbatches, limits, 1 if staleness else 0, host, search_seconds=1.0
            )
            assert keeps(limits, plan, costs, workers)
            baseline = baseline_within(costs, workers, microbatches, limits)
            assert keeps(limits, baseline, costs, workers)
            ours, papers = (judged(p, costs, workers, microbatches, staleness, 0.05) for p in (plan, baseline))
            assert ours <= papers * (1 + 1e-9)


def test_the_same_question_has_the_same_answer() -> None:
    costs = CASES["llama3.1-8b"].costs()
    one, two = (search_partition(costs, 8, 16, host=HostTime(hop_s=0.003), search_seconds=5.0) for _ in range(2))
    assert one == two


def test_a_busy_machine_has_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between two looks at any clock, while plans are searched for and judged within memory."""
    costs = Costs(tuple(call(f"{i}", weights=100, gradients=100, activations=50) for i in range(9)))
    rules = Rules(0, links=Links(200.0, 200.0))

    def best() -> Plan:
        return search_partition(
            costs, 2, 4, Limits(2, 4, 1200), search_seconds=2.0,
            judge=lambda plan: pipeline.step_ends(plan, costs, 2, 4, rules)[0],
        )  # fmt: skip

    idle, hours = best(), itertools.count(0, 3600)
    for clock in ("monotonic", "perf_counter", "process_time", "time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    assert best() == idle


def test_a_search_ends_where_no_plan_nearby_is_allowed() -> None:
    """Nothing is timed there, so what is looked at has to count as work, too."""
    costs = Costs(tuple(call(f"{i}", weights=100, gradients=100, activations=50) for i in range(3)))
    limits = Limits(2, 2, device_bytes(Plan.parse("forward 0 1; fused 2; backward 1 0; round 2"), costs, 2))
    search_partition(costs, 2, 2, limits, search_seconds=1.0, judge=lambda plan: 1.0)


def test_longer_search_is_no_worse() -> None:
    costs, host = CASES["gpt-oss-20b"].costs(), HostTime(hop_s=0.002)
    times = [
        judged(search_partition(costs, 8, 16, host=host, search_seconds=seconds), costs, 8, 16, 0, 0.002)
        for seconds in (0, 3.0, 10.0)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_limits() -> None:
    costs = even(16)
    usual = Limits.usual(costs, 4, 8)
    assert (usual.min_round, usual.max_fused, usual.memory) == (4, 2, None)
    assert Limits.usual(costs, 4, 2).min_round == 2
    tight = Limits(8, 0, None)
    plan = search_partition(costs, 4, 8, tight, search_seconds=2.0)
    assert plan.round_microbatches == 8
    assert len(plan.fused) == 1
    assert search_partition(costs, 1, 4, Limits(1, 15), search_seconds=2.0).forward == ()  # nothing to recompute
    with pytest.raises(ValueError, match="memory_budget"):
        search_partition(costs, 4, 8, Limits(4, 2, 100))
    with pytest.raises(ValueError, match="max_fused=-1"):
        Limits(4, -1)
    with pytest.raises(ValueError, match="search_seconds"):
        search_partition(costs, 4, 8, search_seconds=-1)


def test_the_baseline_is_the_papers_plan() -> None:
    costs = CASES["qwen3-1.7b"].costs()
    limits = Limits.usual(costs, 8, 16)
    assert baseline_within(costs, 8, 16, limits) == greedy_partition(costs, 8, 16)
    # On one worker it would fuse everything.
    assert str(baseline_within(even(9), 1, 4, Limits(1, 1))) == "forward 0-6; fused 7-8; backward 0-6; round 4"


def test_memory_of_many_plans_is_that_of_each() -> None:
    random = Random(3)
    costs = Costs(
        tuple(
            call(
                random.choice("abcdefgh"),
                weights=random.randint(0, 9),
                gradients=random.randint(0, 9),
                activations=random.randint(0, 9),
                needs_backward=random.random() < 0.8,
                waiting=random.randint(2, 4),
                returning=random.randint(0, 3),
            )
            for _ in range(9)
        )
    )
    for n in (1, 2, 3, 4):
        plan = greedy_partition(costs, n, 8)
        shape, sizes = sizes_of(plan)
        need = device_bytes(plan, costs, n)
        row = np.array([sizes])
        assert MemoryTable(costs, n, need).fits(shape, row).all()
        assert not MemoryTable(costs, n, need - 1).fits(shape, row).any()


def test_neighbours_run_every_call_once() -> None:
    sizes = np.array([2, 1, 3, 1, 2])
    near = Neighbours(2, sizes).plans()
    rows = {tuple(row) for row in near.tolist()}
    moved, fused = {(1, 2, 3, 1, 2), (2, 1, 3, 2, 1)}, (1, 1, 4, 1, 1)
    assert rows == {*moved, fused, *_given_back((2, 1, 3, 1, 2))}
    assert {tuple(row) for row in Neighbours(2, sizes, 3).plans().tolist()} == rows - {fused}
    assert {tuple(row) for row in Neighbours(2, sizes, 2).plans().tolist()} == rows - {fused} - moved
    assert (Neighbours(2, sizes).plans(np.array([0, 5])) == near[[0, 5]]).all()
    assert not len(Neighbours(0, np.array([4])))


def test_the_search_makes_only_plans_that_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 94 layers has more neighbours than are timed, and making them all took most of the search's time."""
    made, known, plans = [0], [0], Neighbours.plans

    def counted(self: Neighbours, chosen: Any = None) -> Any:
        rows = plans(self, chosen)
        made.append(len(rows))
        known.append(len(self))
        return rows

    monkeypatch.setattr(Neighbours, "plans", counted)
    calls = [CallCost(f"{n}", 0.02, 0.04, 0, 0, 0, 0, needs_backward=True) for n in range(94)]
    search_partition(Costs(tuple(calls)), 8, 16, search_seconds=2)
    assert max(made) <= 512 < max(known)


def cut_anew(shape: PlanShape, sizes: Any) -> dict[PlanShape, Any]:
    """All plans of a stage more or fewer, which are the same if each is made alone."""
    found = {near.shape: near.plans() for near in recuts(shape, sizes)}
    for near in recuts(shape, sizes):
        assert len(near) == len(found[near.shape])
        alone = [near.plans(np.array([number]))[0] for number in range(len(near))]
        assert (np.array(alone) == found[near.shape]).all()
    return found


def test_plans_of_a_stage_more_or_fewer() -> None:
    found = {
        shape: {tuple(map(int, row)) for row in rows}
        for shape, rows in cut_anew(PlanShape(2, 2, 8), np.array([2, 1, 3, 1, 2])).items()
    }
    assert found == {
        PlanShape(1, 2, 8): {(3, 3, 1, 2)},
        PlanShape(3, 2, 8): {(1, 1, 1, 3, 1, 2)},
        PlanShape(2, 1, 8): {(2, 1, 3, 3)},
        PlanShape(2, 3, 8): {(2, 1, 3, 1, 1, 1)},
    }
    longer = cut_anew(PlanShape(1, 3, 4), np.array([3, 1, 1, 1, 1]))
    assert {tuple(map(int, row)) for row in longer[PlanShape(2, 3, 4)]} == {(1, 2, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1)}
    for shape, rows in longer.items():
        for row in rows:
            plan_of(shape, row.tolist()).validate()
    assert not list(recuts(PlanShape(0, 0, 8), np.array([3])))


def test_passes_that_are_cut_evenly() -> None:
    """By seconds, of the calls that a pass has: the first two and the last one take none here."""
    forward_s = np.array([0.0, 0, 0, 1, 2, 3, 4, 4, 9])
    backward_s = np.array([0.0, 2, 4, 6, 8, 10, 12, 14, 20])
    found = [
        (shape, row.tolist())
        for shape, rows in evened(PlanShape(2, 2, 8), np.array([1, 6, 1, 5, 2]), forward_s, backward_s)
        for row in rows
    ]
    assert found == [
        (PlanShape(1, 2, 8), [7, 1, 5, 2]),
        (PlanShape(2, 2, 8), [4, 3, 1, 5, 2]),
        (PlanShape(3, 2, 8), [3, 2, 2, 1, 5, 2]),
        (PlanShape(2, 1, 8), [1, 6, 1, 7]),
        (PlanShape(2, 2, 8), [1, 6, 1, 3, 4]),
        (PlanShape(2, 3, 8), [1, 6, 1, 2, 3, 2]),
    ]
    assert not list(evened(PlanShape(0, 0, 8), np.array([3]), forward_s, backward_s))
    assert {near.forward for near, _ in evened(PlanShape(1, 1, 8), np.array([1, 1, 1]), forward_s, backward_s)} == {1}


def test_moves_of_a_wandering_plan() -> None:
    """Each changes what it says and leaves a plan."""
    random = Random(0)
    sizes, forward = [2, 1, 3, 1, 2], 2
    met: dict[str, set[tuple[int, ...]]] = {}
    for _ in range(2000):
        move, there = random.choice(anneal._MOVES), list(sizes)
        if (ahead := move(there, forward, random)) is None:
            continue
        plan_of(PlanShape(ahead, len(there) - ahead - 1, 8), there).validate()
        met.setdefault(move.__name__, set()).add((ahead, *there))
    assert met["_shift"] == {(2, 1, 2, 3, 1, 2), (2, 2, 1, 3, 2, 1)}
    assert met["_swap"] == {(2, 1, 2, 3, 1, 2), (2, 2, 1, 3, 2, 1)}
    assert met["_fuse"] == {(2, 1, 1, 4, 1, 1)} | {(2, *row) for row in _given_back((2, 1, 3, 1, 2))}
    assert met["_cut"] == {(3, 1, 1, 1, 3, 1, 2), (2, 2, 1, 3, 1, 1, 1)}
    assert met["_join"] == {(1, 3, 3, 1, 2), (2, 2, 1, 3, 3)}
    assert {row[0] for row in met["_both"]} == {1, 2, 3}


def test_a_wandering_plan_keeps_to_limits_and_spends_what_it_may() -> None:
    costs, spent = even(16), []
    pace = Pace.of(costs, HostTime(), ahead=False)

    def spend(seconds: float) -> float:
        spent.append(seconds)
        return len(spent) / 3000

    def is_kept(shape: PlanShape, sizes: list[int]) -> bool:
        return sizes[shape.forward] <= 2 and shape.backward >= 3

    start = PlanShape(1, 5, 8), [15, 1, 3, 3, 3, 3, 3]
    clock = PlanTimer(pace, 4)
    shape, sizes, seconds = anneal.anneal(clock, *start, 8, is_kept, Random(0), spend)
    assert len(spent) == 3000
    assert is_kept(shape, sizes)
    assert seconds == clock(shape.forward, sizes, [8]) < 0.7 * clock(1, start[1], [8])
    plan_of(shape, sizes).validate(costs.layers)


def _given_back(sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    rows = set()
    for ahead in (0, 1):
        for behind in (3, 4):
            row = list(sizes)
            row[2] -= 1
            row[ahead] += 1
            row[behind] += 1
            rows.add(tuple(row))
    return rows


def test_calls_are_dealt_out_by_time() -> None:
    flat = np.arange(11.0)
    assert deal(flat, np.ones((1, 3))).tolist() == [[3, 3, 4]]
    assert deal(flat, np.array([[0.2, 0.8], [0.5, 0.5]])).tolist() == [[2, 8], [5, 5]]
    assert deal(np.array([0.0, 8, 9, 10, 11]), np.ones((1, 2))).tolist() == [[1, 3]]
    assert deal(np.array([0.0, 0, 0, 0, 9]), np.ones((1, 4))).tolist() == [[1, 1, 1, 1]]


def test_rounds_that_are_tried() -> None:
    assert round_choices(16, Limits(8, 0)) == [16, 9, 8]
    assert round_choices(64, Limits(4, 0)) == [64, 32, 22, 16, 5, 4]
    assert round_choices(2, Limits(2, 0)) == [2]


def test_unequal_calls() -> None:
    costs = timed([0.1, *[1.0] * 9, 3.0], [0.0, *[2.0] * 9, 6.0])
    plan = search_partition(costs, 3, 6, search_seconds=3.0)
    plan.validate(costs.layers)
    assert judged(plan, costs, 3, 6, 0, 0) < judged(greedy_partition(costs, 3, 6), costs, 3, 6, 0, 0)


def test_searches_where_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four of them, the first as long as all searches, and two for what is near their best plans.

    What is found for 0 seconds is the paper's plan.
    """
    works: list[float] = []

    class Timed(Timing):
        def __init__(self, pace: Pace, workers: int, microbatches: int, staleness: int, work: float) -> None:
            works.append(work)
            super().__init__(pace, workers, microbatches, staleness, work)

    monkeypatch.setattr(search, "Timing", Timed)
    costs = Costs(tuple(call(f"{i}", weights=100, gradients=100, activations=50) for i in range(9)))
    limits = Limits(2, 4, 700)
    search_partition(costs, 2, 4, limits, search_seconds=5.0, judge=lambda plan: 1.0)
    assert works[1:] == [works[0] * search._OTHERS] * 3 + [works[0] * search._NEARBY] * 2
    found = search_partition(costs, 2, 4, limits, search_seconds=0, judge=lambda plan: -len(plan.forward))
    assert found == paper_plan(costs, 2, 4, limits)


def whole_model(gradient_bytes: int = 100) -> Costs:
    """Six calls, of which a worker with 4,000 bytes holds all, in the smallest arena at least."""
    calls = [
        CallCost(f"layers.{n}", 1.0, 2.0, 100, gradient_bytes, 10, 50, needs_backward=True, waiting_bytes=10)
        for n in range(6)
    ]
    return Costs(tuple(calls))


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_rounds_side_by_side_are_data_parallelism_where_a_worker_holds_the_model(seconds: float) -> None:
    costs = whole_model()

    def step_s(plan: Plan) -> float:
        return run_steps(plan, costs, 4, 8).makespan_s

    for memory, fits in ((4000, True), (1000, False)):
        limits = Limits.usual(costs, 4, 8, memory)
        plan = search_partition(costs, 4, 8, limits, search_seconds=seconds, judge=step_s)
        assert keeps(limits, plan, costs, 4)
        assert plan.side_by_side(4, 8) == (plan == Plan.single(6, 1)) == fits
        if fits:  # workers begin a call behind each other, and then nothing waits
            assert step_s(plan) == 2 * 18 + 3 * 2
    for limits in (Limits(4, 5, 4000), Limits.usual(costs, 4, 8)):
        assert not search_partition(costs, 4, 8, limits, search_seconds=seconds, judge=step_s).side_by_side(4, 8)


@pytest.mark.parametrize("memory", [None, 900])
def test_plans_near_the_best_one_hide_what_only_the_judge_knows(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates limit the steps here, which the search does not know."""
    calls = [CallCost(f"layers.{n}", 1.0, 2.0, 100, 100, 10, 50, needs_backward=True) for n in range(24)]
    costs, rules = Costs(tuple(calls)), Rules(updates=UpdateModel(bytes_per_s=2.5))
    limits = Limits.usual(costs, 4, 16, memory)

    def step_s(plan: Plan) -> float:
        return pipeline.step_ends(plan, costs, 4, 16, rules, 4)[-1]

    plan = search_partition(costs, 4, 16, limits, search_seconds=20.0, judge=step_s, judged=32)
    assert keeps(limits, plan, costs, 4)
    monkeypatch.setattr(search, "_descent", lambda plan, *_: plan)
    without = search_partition(costs, 4, 16, limits, search_seconds=20.0, judge=step_s, judged=32)
    assert step_s(plan) < step_s(without)


def test_recomputation_ahead_is_left_out_where_the_judge_says_so() -> None:
    """It takes memory that copies may need more."""
    costs = Costs(tuple(call(f"{n}") for n in range(12)))

    def step_s(plan: Plan) -> float:
        return run_steps(plan, costs, 2, 4).makespan_s * (1.5 if plan.recompute_ahead else 1.0)

    limits = Limits(2, 2)
    found = search_partition(costs, 2, 4, limits, judge=step_s)
    assert found.backward and not found.recompute_ahead
    assert search_partition(
        costs, 2, 4, limits, judge=lambda plan: run_steps(plan, costs, 2, 4).makespan_s
    ).recompute_ahead


def test_neighbours_that_are_judged() -> None:
    """They come fastest first, few that take equally long, within the limits, and the plan with the other flag."""
    costs = Costs(tuple(call(f"{n}", weights=100, gradients=100, activations=50) for n in range(9)))
    limits, host = Limits(2, 4, 900), HostTime()
    plan = replace(paper_plan(costs, 2, 4, limits), recompute_ahead=False)
    assert plan.backward
    first, *others = search._near(costs, 2, 4, limits, 0, host, 1.0)(plan)
    assert first == replace(plan, recompute_ahead=True)
    assert len(others) > 2 and len({*others}) == len(others)
    timing = Timing(Pace.of(costs, host, ahead=False), 2, 4, 0, 1.0)
    times = [float(timing.settled(other)[0]) for other in others]
    assert times == sorted(times)
    assert max(times.count(one) for one in times) <= 2
    for other in others:
        other.validate(costs.layers)
        assert keeps(limits, other, costs, 2)


def test_rounds_side_by_side_need_the_smallest_arena() -> None:
    costs = whole_model()
    need = device_bytes(Plan.single(6, 1), costs, 4)
    assert Limits.usual(costs, 4, 8, need).beside(costs, 4, 8) == [Plan.single(6, 1)]
    assert not Limits.usual(costs, 4, 8, need - 1).beside(costs, 4, 8)
    assert not Limits.usual(costs, 1, 8, need).beside(costs, 1, 8)
    assert not Limits.usual(costs, 4, 1, need).beside(costs, 4, 1)


def test_rounds_side_by_side_are_taken_where_nothing_else_fits() -> None:
    """What waits of a round's other microbatches may take more than the whole model."""
    calls = [CallCost(f"layers.{n}", 1.0, 2.0, 1, 1, 10, 9, needs_backward=True, waiting_bytes=500) for n in range(3)]
    costs = Costs(tuple(calls))
    limits = Limits.usual(costs, 4, 8, 100)
    plan = search_partition(costs, 4, 8, limits, judge=lambda plan: 1.0)
    assert plan.side_by_side(4, 8)
    with pytest.raises(ValueError, match="memory_budget: workers may use 100 bytes"):
        search_partition(costs, 4, 8, limits)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_search_for_a_short_step_is_within_three_percent_of_the_best(staleness: Literal[0, 1]) -> None:
    """Of ten profiles: the paper's five models, steps alone and overlapping, by the engine's figure."""
    for case in CASES.values():
        costs, host = case.costs(), HostTime(hop_s=case.hop_ms / 1e3)
        rules = Rules(staleness, host=host)

        def step_s(plan: Plan, costs: Costs = costs, rules: Rules = rules, case: Case = case) -> float:
            run = run_steps(plan, costs, case.workers, case.microbatches, rules, 8 if staleness else 1)
            return run.period_s(4) if staleness else run.makespan_s

        short, full = (
            search_partition(
                costs, case.workers, case.microbatches, None, staleness, host, seconds, judge=step_s,
                judged=4,
            )
            for seconds in (planner._SHORTEST_SEARCH_S, search.SEARCH_SECONDS)
        )  # fmt: skip
        assert step_s(short) <= 1.03 * step_s(full), case.model


# -- unequal workers -------------------------------------------------------------------------------------------------


def tokens_a_second(costs: Costs, workers: int, staleness: Literal[0, 1], hop_s: float) -> float:
    """In microbatches; the plan is searched for, and judged by the full simulation."""
    microbatches, host = 64, HostTime(hop_s=hop_s)
    plan = search_partition(
        costs, workers, microbatches, Limits.usual(costs, workers, microbatches), staleness, host, 10.0
    )
    run = run_steps(plan, costs, workers, microbatches, Rules(staleness, host=host), 32 if staleness else 1)
    return microbatches / (run.period_s(16) if staleness else run.makespan_s)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("model", "speeds"),
    [
        ("llama3.1-8b", [1, 0.5]),
        ("qwen3-1.7b", [1, 1, 0.4, 0.4]),
        *(pytest.param(model, [1, 0.5] * 4, marks=pytest.mark.slow) for model in CASES),
        *(pytest.param(model, [1] * 4 + [0.5] * 4, marks=pytest.mark.slow) for model in CASES),
    ],
)
def test_unequal_workers_reach_most_of_what_each_reaches_alone(
    model: str, speeds: list[float], staleness: Literal[0, 1]
) -> None:
    case = CASES[model]
    together = tokens_a_second(case.costs().at_speeds(speeds), len(speeds), staleness, case.hop_ms / 1e3)
    alone = tokens_a_second(case.costs(), 1, staleness, 0.0) * sum(speeds)
    assert 0.9 * alone <= together <= 1.001 * alone


@pytest.mark.slow
def test_a_small_worker_gets_what_it_has_memory_for() -> None:
    """Plans where all workers had the least are among those that are looked at."""
    costs = Costs(tuple(call(f"layers.{n}", weights=100, gradients=200, activations=50) for n in range(12)))
    costs = costs.at_speeds([1, 0.4])

    def period_s(plan: Plan) -> float:
        return run_steps(plan, costs, 2, 8, Rules(1), 12).period_s(6)

    def best(*memory: int) -> Plan:
        limits = Limits.usual(costs, 2, 8, memory)
        return search_partition(costs, 2, 8, limits, 1, search_seconds=10.0, judge=period_s, judged=6)

    plan = best(3_000, 1_000)
    assert [device_bytes(plan, costs, 2, worker) <= most for worker, most in enumerate((3_000, 1_000))] == [True, True]
    assert device_bytes(plan, costs, 2) > 1_000, "the large one has what the small one could not hold"
    assert period_s(best(3_000, 3_000)) <= period_s(plan) < period_s(best(1_000, 1_000))


def test_memory_of_many_plans_on_unequal_workers_is_that_of_each() -> None:
    random = Random(1)
    costs = Costs(
        tuple(call(f"layers.{n}", weights=random.randrange(9), gradients=random.randrange(9)) for n in range(8))
    )
    answers = set()
    for forward, backward in itertools.product((1, 2, 3), (1, 2, 3, 3, 3)):
        shape, rest = PlanShape(forward, backward, 3), np.arange(6.0)
        ahead, behind = (deal(rest, np.ones((1, stages)))[0].tolist() for stages in (forward, backward))
        sizes = [*ahead, 3, *behind[::-1]]
        plan, memory = plan_of(shape, sizes), tuple(random.randrange(30, 130) for _ in range(4))
        each = [device_bytes(plan, costs, 4, worker) <= most for worker, most in enumerate(memory)]
        [found] = MemoryTable(costs, 4, memory).fits(shape, np.array([sizes]))
        assert found == all(each)
        answers.add(bool(found))
    assert answers == {True, False}


@pytest.mark.parametrize(("bytes_per_s", "is_worth_it"), [(1e3, False), (2.0, True)])
def test_updates_are_hidden_behind_the_backward_of_other_stages(bytes_per_s: float, is_worth_it: bool) -> None:
    """One worker has memory for the graphs of everything. Slow updates are worth a recomputation, fast ones are not."""
    costs, everything = even(8), Plan.parse("forward none; fused 0-7; backward none; round 8")
    rules = Rules(links=Links(1e3, 1e3), updates=UpdateModel(bytes_per_s))

    def step_s(plan: Plan) -> float:
        return pipeline.period_of_ends(pipeline.step_ends(plan, costs, 1, 8, rules, 4), 2)

    plan = search_partition(costs, 1, 8, Limits(1, 8, None, 8), search_seconds=1.0, judge=step_s)
    assert bool(plan.forward) == is_worth_it
    assert step_s(plan) < step_s(everything) * 0.95 if is_worth_it else step_s(plan) == step_s(everything)
