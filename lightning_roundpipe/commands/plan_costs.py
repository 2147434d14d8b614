"""``roundpipe-plan costs=FILE.json``: the best plan found for measured times, and the time of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from lightning_roundpipe.commands.options import Reply, as_json, pasted
from lightning_roundpipe.planning.batch import Pace
from lightning_roundpipe.planning.cost_files import SIZES, costs_of, read_cost_file, whole
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import device_bytes, least, smallest_within
from lightning_roundpipe.planning.pipeline import Rules, SimulatedRun, Staleness, period_of_ends, run_steps, step_ends
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, paper_plan, search_partition
from lightning_roundpipe.planning.timing import PERIOD_STEPS, Timing

_FROM_FILE = {
    "workers": None, "microbatches": None, "staleness": 0, "min_round": None, "max_round": None, "max_fused": None,
}  # fmt: skip
"""Options that the file may have, too, with their defaults."""
_MOST = {"workers": 1024, "microbatches": 4096}
_ROUNDS = ("min_round", "max_round")
_MOST_TURNS = 200_000
"""Most turns of a full simulation. Above, the simplified rules of `planning.batch` time the steps."""
Partitioner = Literal["search", "paper"]


@dataclass(frozen=True)
class Question:
    """Request for a plan, from the command line and the file.

    Attributes:
        costs: costs of the calls.
        hop_s: seconds from one worker to another.
        workers: number of workers.
        microbatches: number of microbatches of a step.
        staleness: staleness of updates.
        limits: limits of the plan.
        name: name of the model, for pictures.
    """

    costs: Costs
    hop_s: float
    workers: int
    microbatches: int
    staleness: Staleness
    limits: Limits
    name: str


@dataclass(frozen=True)
class Answer:
    """A plan and its figures.

    Attributes:
        plan: the plan.
        makespan_s: seconds of one step alone.
        period_s: seconds of each of many steps.
        bubble_pct: idle time of the workers in percent, for many steps.
        side_by_side: whether rounds run side by side.
    """

    plan: Plan
    makespan_s: float
    period_s: float
    bubble_pct: float
    side_by_side: bool = False


def read_question(path: Path, case: str | None, memory: int | None, given: dict[str, int | None]) -> Question:
    """Return the request of a file and the command line, whose options take precedence.

    Args:
        path: the file.
        case: model to take from a file of several; None: the file has one.
        memory: bytes of each worker; None: no limit.
        given: options of the command line; None: the file's.

    Raises:
        ValueError: a number is missing or out of range, or the file is wrong.
    """
    data = read_cost_file(path, case)
    found: dict[str, int | None] = {}
    for name, default in _FROM_FILE.items():
        value = given.get(name)
        if value is None and name in data:
            value = whole(data, name, path, least=1 if name in _MOST or name in _ROUNDS else 0)
        found[name] = default if value is None else value
    for name, most in _MOST.items():
        value = found[name]
        if value is None:
            raise ValueError(f"{name}= is missing: give it, or write it into {path}.")
        if value > most:
            raise ValueError(f"{name}={value} is more than the {most} that can be planned for.")
    if found["staleness"] not in (0, 1):
        raise ValueError(f"staleness={found['staleness']} must be 0 or 1.")
    workers, microbatches = found["workers"] or 1, found["microbatches"] or 1
    if (found["min_round"] or 1) > microbatches:
        raise ValueError(f"min_round={found['min_round']} must be at most microbatches={microbatches}.")
    costs, hop_s = costs_of(data, path)
    try:
        costs.check_workers(workers)
    except ValueError as error:
        raise ValueError(f"costs={path}: {error}") from None
    if memory is not None and not any(call.weight_bytes for call in costs):
        raise ValueError(f"memory= needs sizes: {path} holds none of {', '.join(SIZES)}.")
    usual = Limits.usual(costs, workers, microbatches, memory)
    fused = found["max_fused"]
    lowest, most_round = found["min_round"] or usual.min_round, found["max_round"]
    if most_round is not None and found["min_round"] is None:
        lowest = min(lowest, most_round)
    beside = usual.side_by_side and fused is None and found["min_round"] is None
    limits = Limits(lowest, usual.max_fused if fused is None else fused, memory, most_round, beside)
    return Question(
        costs, hop_s, workers, microbatches, 1 if found["staleness"] else 0, limits, str(data.get("model", path.stem))
    )


def answer(
    question: Question,
    search_seconds: float = SEARCH_SECONDS,
    partitioner: Partitioner = "search",
    stage_s: float | None = None,
    text: str | None = None,
) -> Answer:
    """Make a plan, and simulate its steps.

    Args:
        question: the request.
        search_seconds: longest search.
        partitioner: ``"search"``, or ``"paper"`` for the paper's algorithm.
        stage_s: seconds of the longest stage, for a plan without a search.
        text: the plan itself, without a search.

    Raises:
        ValueError: no plan is within the limits, or ``text`` is no plan for these costs.
    """
    costs, workers, microbatches = question.costs, question.workers, question.microbatches
    if text is not None:
        return figures(question, _parsed(question, text))
    if partitioner == "paper" or stage_s is not None:
        return figures(question, paper_plan(costs, workers, microbatches, question.limits, stage_s))
    known: dict[Plan, Answer] = {}

    def judge(plan: Plan) -> float:
        if plan not in known:
            known[plan] = figures(question, plan)
        return known[plan].period_s

    plan = search_partition(
        costs, workers, microbatches, question.limits, question.staleness, HostTime(hop_s=question.hop_s),
        search_seconds, judge=judge, judged=_judged(question),
    )  # fmt: skip
    return known[plan]


def _judged(question: Question) -> int:
    """Return the number of plans to judge, which limits this to a second or two."""
    steps = 2 * PERIOD_STEPS if question.staleness else 1
    turns = steps * question.microbatches * (2 * len(question.costs) - 1)
    return max(1, min(16, _MOST_TURNS // turns))


def _parsed(question: Question, text: str) -> Plan:
    plan = Plan.parse(text)
    plan.validate(question.costs.layers)
    return plan


def does_not_fit(question: Question, text: str | None, form: Literal["table", "json"]) -> Reply | None:
    """Return the answer if memory is too small for every plan, or for the plan ``text``; None if it is large enough.

    The answer has the bytes that a worker needs, and settings with which a plan would fit.

    Raises:
        ValueError: ``text`` is no plan for these costs.
    """
    costs, limits, memory = question.costs, question.limits, least(question.limits.memory)
    own = None if text is None else _parsed(question, text)

    def smallest(lowest: int) -> Plan:
        return smallest_within(costs, question.workers, question.microbatches, lowest, memory)

    def need(plan: Plan) -> int:
        return device_bytes(plan, costs, question.workers)

    needed = need(own or smallest(limits.min_round))
    beside = [] if own else limits.beside(costs, question.workers, question.microbatches)
    if memory is None or needed <= memory or beside:
        return None
    tries = {"without plan=": limits.min_round} if own else {}
    tries |= {f"min_round={lowest}": lowest for lowest in (limits.min_round // 2, 1) if lowest}
    found = {}
    for settings, lowest in tries.items():
        if need(smallest(lowest)) <= memory:
            other = replace(question, limits=replace(limits, min_round=lowest))
            found[settings] = answer(other, partitioner="paper")
            break
    if form == "json":
        would = [{"settings": settings, "period_ms": 1e3 * one.period_s} for settings, one in found.items()]
        return Reply(as_json({"fits": False, "needed_bytes": needed, "limit_bytes": memory, "would_fit": would}), 1)
    what = "this plan" if own else "a cut at every layer"
    lines = [f"Does not fit: {what} needs {needed:,} bytes of each worker, and memory={memory:,}."]
    lines += [f"What would fit: {settings}, {1e3 * one.period_s:,.3f} ms a step." for settings, one in found.items()]
    return Reply("\n".join(lines), 1)


def figures(question: Question, plan: Plan) -> Answer:
    """Return the figures of a plan: how long a step takes alone, and each of many."""
    steps = 2 * PERIOD_STEPS if question.staleness else 1
    settles = steps * question.microbatches * len(plan.stages()) > _MOST_TURNS
    ends = step_ends(
        plan, question.costs, question.workers, question.microbatches, _rules(question), 1 if settles else steps
    )
    makespan = period = ends[0]
    if question.staleness:  # with 0 the first call of a step waits for the last gradient of the one before
        period = float(_timing(question).settled(plan)[-1]) if settles else period_of_ends(ends, PERIOD_STEPS)
    bound = _bound_s(question, plan)
    bubble = max(100 * (1 - bound / period), 0.0) if period else 0.0  # rounding may give -1e-13
    return Answer(plan, makespan, period, bubble, plan.side_by_side(question.workers, question.microbatches))


def _timing(question: Question) -> Timing:
    pace = Pace.of(question.costs, HostTime(hop_s=question.hop_s))
    return Timing(pace, question.workers, question.microbatches, question.staleness, 0)


def _rules(question: Question) -> Rules:
    return Rules(question.staleness, host=HostTime(hop_s=question.hop_s))


def run_answer(question: Question, plan: Plan, steps: int) -> SimulatedRun:
    """Simulate steps under a plan, by the rules of the request."""
    return run_steps(plan, question.costs, question.workers, question.microbatches, _rules(question), steps)


def as_dict(found: Answer) -> dict[str, Any]:
    """Return what ``format=json`` prints."""
    return {
        "fits": True,
        **found.plan.to_dict(),
        "side_by_side": found.side_by_side,
        "makespan_ms": 1e3 * found.makespan_s,
        "period_ms": 1e3 * found.period_s,
        "bubble_pct": found.bubble_pct,
    }


def as_table(question: Question, found: Answer) -> RenderableType:
    """Return the answer for the terminal: the figures, the stages, and the plan as text."""
    bound = _bound_s(question, found.plan)
    fits = "" if question.limits.memory is None else "Fits: "
    alone = f"; one alone {1e3 * found.makespan_s:,.3f} ms" if question.staleness else ""
    first = f"{1e3 * found.period_s:,.3f} ms a step, bubble {found.bubble_pct:.2f} %{alone}."
    lines = [
        f"{fits}{first}",
        f"{100 * (found.period_s / bound - 1) if bound else 0:.2f} % above the work over {question.workers} workers, "
        f"{1e3 * bound:,.3f} ms.",
    ]
    if found.side_by_side:
        lines.append(side_by_side_line(found.plan, question.microbatches))
    return Group(*lines, _stages(question.costs, found.plan), pasted(f"plan='{found.plan}'"))


def side_by_side_line(plan: Plan, microbatches: int) -> str:
    """Return a sentence about a plan whose rounds run side by side; see `Plan.side_by_side`."""
    whole = " Each is a whole microbatch on one worker, as in data parallelism." if len(plan.stages()) == 1 else ""
    return f"The {microbatches} rounds of a step run side by side.{whole}"


def _stages(costs: Costs, plan: Plan) -> Table:
    """Return a table of the stages. A narrow terminal breaks only names, not numbers."""
    rows = [(stage, costs.stage_bytes(stage.first, stage.last, stage.phase).weights) for stage in plan.stages()]
    sized = any(weights for _, weights in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("Stage", ""):
        table.add_column(name, no_wrap=True)
    table.add_column("layers", overflow="fold")
    for name in ("ms", *(["weights MiB"] if sized else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, weights in rows:
        names = dict.fromkeys((costs.layers[stage.first], costs.layers[stage.last]))
        cells = [str(stage.position), stage.phase, " to ".join(names)]
        cells.append(f"{1e3 * costs.stage_time_s(stage.first, stage.last, stage.phase):,.1f}")
        table.add_row(*cells, *([f"{weights / 2**20:,.1f}"] if sized else []))
    return table


def _bound_s(question: Question, plan: Plan) -> float:
    times = [question.costs.stage_time_s(stage.first, stage.last, stage.phase) for stage in plan.stages()]
    return question.microbatches * sum(times) / question.workers
