import itertools
import math
import time
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from paper_cases import read_cases
from planning.making import call, keeps

from lightning_roundpipe.planning import CallCost, Costs, Plan, pipeline, search
from lightning_roundpipe.planning.batch import MemoryTable, PlanShape, plan_of
from lightning_roundpipe.planning.links import HostTime, Links
from lightning_roundpipe.planning.memory import device_bytes
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.search import baseline_within, search_partition
from lightning_roundpipe.planning.seeds import deal
from lightning_roundpipe.planning.updates import UpdateModel

CASES = read_cases()


@pytest.fixture(autouse=True)
def short(request, monkeypatch):
    """A tenth of the work, but for slow tests."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(search, "WORK_PER_SECOND", search.WORK_PER_SECOND / 10)


def ratio(case, staleness, seconds):
    """Our time over the paper's: a plan's step alone (staleness 0), or the mean of 16 of many (1)."""
    host = HostTime(hop_s=case.hop_ms / 1e3)
    rules = Rules(1 if staleness else 0, host=host)
    problem = Problem.usual(case.costs(), case.workers, case.microbatches, rules=rules)
    plan = search_partition(problem, seconds)
    assert plan.round_microbatches >= case.workers
    assert len(plan.fused) <= math.ceil(case.layers / 8) + 1
    assert Plan.parse(str(plan)) == plan
    plan.validate(case.costs().layers)
    run = run_steps(plan, case.costs(), case.workers, case.microbatches, rules, 33 if staleness else 1)
    return (run.period_s(16) if staleness else run.makespan_s) / case.papers_seconds(staleness)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("staleness", "each", "mean"), [(0, 1.0005, 0.970), (1, 0.975, 0.960)])
def test_all_of_the_papers_models_are_beaten_by_default(staleness, each, mean):
    ratios = [ratio(case, staleness, 10.0) for case in CASES.values()]
    assert len(ratios) == 5
    assert max(ratios) <= each
    assert math.exp(sum(map(math.log, ratios)) / 5) <= mean


def judged(plan, costs, workers, microbatches, staleness, hop_s):
    rules = Rules(1 if staleness else 0, host=HostTime(hop_s=hop_s))
    run = run_steps(replace(plan, recompute_ahead=True), costs, workers, microbatches, rules, 32 if staleness else 1)
    return run.period_s(16) if staleness else run.makespan_s


@pytest.mark.parametrize(("workers", "staleness"), [(1, 0), (3, 1), (8, 0)])
def test_never_worse_than_the_papers_algorithm(workers, staleness):
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
            rules = Rules(1 if staleness else 0, HostTime(hop_s=0.05))
            problem = Problem.usual(costs, workers, microbatches, memory, rules)
            plan, baseline = search_partition(problem, search_seconds=1.0), baseline_within(problem)
            assert keeps(problem, plan)
            assert keeps(problem, baseline)
            ours, papers = (judged(p, costs, workers, microbatches, staleness, 0.05) for p in (plan, baseline))
            assert ours <= papers * (1 + 1e-9)


def test_a_busy_machine_has_the_same_answer(monkeypatch):
    """An hour passes between two looks at any clock, while plans are searched for and judged within memory."""
    costs = Costs(tuple(call(f"{i}", weights=100, gradients=100, activations=50) for i in range(9)))
    rules = Rules(0, links=Links(200.0, 200.0))

    def best():
        return search_partition(
            Problem(costs, 2, 4, 2, 4, 1200), search_seconds=2.0,
            judge=lambda plan: pipeline.step_ends(plan, costs, 2, 4, rules)[0],
        )  # fmt: skip

    idle, hours = best(), itertools.count(0, 3600)
    for clock in ("monotonic", "perf_counter", "process_time", "time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    assert best() == idle


def whole_model():
    """Six calls, of which a worker with 4,000 bytes holds all, in the smallest arena at least."""
    calls = [
        CallCost(f"layers.{n}", 1.0, 2.0, 100, 100, 10, 50, needs_backward=True, waiting_bytes=10) for n in range(6)
    ]
    return Costs(tuple(calls))


def test_rounds_side_by_side_are_data_parallelism_where_a_worker_holds_the_model():
    costs, seconds = whole_model(), 0.5

    def step_s(plan):
        return run_steps(plan, costs, 4, 8).makespan_s

    for memory, fits in ((4000, True), (1000, False)):
        problem = Problem.usual(costs, 4, 8, memory)
        plan = search_partition(problem, seconds, step_s)
        assert keeps(problem, plan)
        assert plan.side_by_side(4, 8) == (plan == Plan.single(6, 1)) == fits
        if fits:  # workers begin a call behind each other, and then nothing waits
            assert step_s(plan) == 2 * 18 + 3 * 2
    for problem in (Problem(costs, 4, 8, 4, 5, 4000), Problem.usual(costs, 4, 8)):
        assert not search_partition(problem, seconds, step_s).side_by_side(4, 8)


def test_plans_near_the_best_one_hide_what_only_the_judge_knows(monkeypatch):
    """Updates limit the steps here, which the search does not know."""
    calls = [CallCost(f"layers.{n}", 1.0, 2.0, 100, 100, 10, 50, needs_backward=True) for n in range(24)]
    costs, rules = Costs(tuple(calls)), Rules(updates=UpdateModel(bytes_per_s=2.5))
    problem = Problem.usual(costs, 4, 16, 900)

    def step_s(plan):
        return pipeline.step_ends(plan, costs, 4, 16, rules, 4)[-1]

    plan = search_partition(problem, 2.0, step_s)
    assert keeps(problem, plan)
    monkeypatch.setattr(search, "descent", lambda plan, *_: plan)
    assert step_s(plan) < step_s(search_partition(problem, 2.0, step_s))


def tokens_a_second(costs, workers, staleness, hop_s):
    """In microbatches; the plan is searched for, and judged by the full simulation."""
    microbatches, rules = 64, Rules(staleness, HostTime(hop_s=hop_s))
    plan = search_partition(Problem.usual(costs, workers, microbatches, rules=rules))
    run = run_steps(plan, costs, workers, microbatches, rules, 32 if staleness else 1)
    return microbatches / (run.period_s(16) if staleness else run.makespan_s)


@pytest.mark.parametrize(
    ("model", "speeds", "staleness"),
    [
        ("llama3.1-8b", [1, 0.5], 0),
        ("qwen3-1.7b", [1, 1, 0.4, 0.4], 1),
        pytest.param("qwen3-1.7b", [1] * 4 + [0.5] * 4, 0, marks=pytest.mark.slow),
    ],
)
def test_unequal_workers_reach_most_of_what_each_reaches_alone(model, speeds, staleness):
    case = CASES[model]
    together = tokens_a_second(case.costs().at_speeds(speeds), len(speeds), staleness, case.hop_ms / 1e3)
    alone = tokens_a_second(case.costs(), 1, staleness, 0.0) * sum(speeds)
    assert 0.9 * alone <= together <= 1.001 * alone


def test_memory_of_many_plans_on_unequal_workers_is_that_of_each():
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
