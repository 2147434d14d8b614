"""``roundpipe-plan costs=FILE.json``: the best plan that is found for given times, and how long its steps take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.options import as_json
from lightning_roundpipe.planning.batch import Pace
from lightning_roundpipe.planning.cost_files import SIZES, costs_of, read_cost_file, whole
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import ahead_within, device_bytes
from lightning_roundpipe.planning.pipeline import Rules, Run, Staleness, run_steps
from lightning_roundpipe.planning.schedule import TABLE_COLUMNS, Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, baseline_within, search_partition
from lightning_roundpipe.planning.simulate import HostTime
from lightning_roundpipe.planning.timing import PERIOD_STEPS, Timing

_FROM_FILE = {"workers": None, "microbatches": None, "staleness": 0, "min_round": None, "max_fused": None}
"""Options that the file may hold too, and what they are where nobody says."""
_MOST = {"workers": 1024, "microbatches": 4096}
_MOST_TURNS = 200_000
"""Above this, turns are counted in batches: a little less exactly, see `planning.batch`."""
Partitioner = Literal["search", "paper"]


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for, from the command line and the file."""

    costs: Costs
    hop_s: float
    workers: int
    microbatches: int
    staleness: Staleness
    limits: Limits
    name: str


@dataclass(frozen=True)
class Answer:
    """A plan and its figures, in seconds."""

    plan: Plan
    makespan_s: float
    period_s: float
    bubble_pct: float


def read_question(path: Path, case: str | None, memory: int | None, given: dict[str, int | None]) -> Question:
    """The file's numbers with those of the command line, which win.

    Raises:
        ValueError: something is missing or makes no sense.
    """
    data = read_cost_file(path, case)
    found: dict[str, int | None] = {}
    for name, default in _FROM_FILE.items():
        value = given.get(name)
        if value is None and name in data:
            value = whole(data, name, path, least=1 if name in _MOST or name == "min_round" else 0)
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
    if memory is not None and not any(call.weight_bytes for call in costs):
        raise ValueError(f"memory= needs sizes: {path} holds none of {', '.join(SIZES)}.")
    usual = Limits.usual(costs, workers, microbatches, memory)
    fused = found["max_fused"]
    limits = Limits(found["min_round"] or usual.min_round, usual.max_fused if fused is None else fused, memory)
    return Question(
        costs, hop_s, workers, microbatches, 1 if found["staleness"] else 0, limits, str(data.get("model", path.stem))
    )


def answer(
    question: Question,
    search_seconds: float = SEARCH_SECONDS,
    partitioner: Partitioner = "search",
    stage_s: float | None = None,
) -> Answer:
    """Makes a plan and simulates it. ``stage_s``: how long its stages may be, instead of searching.

    Raises:
        ValueError: no plan keeps to the limits.
    """
    costs, workers, microbatches = question.costs, question.workers, question.microbatches
    host = HostTime(hop_s=question.hop_s)
    if partitioner == "paper" or stage_s is not None:
        plan = baseline_within(costs, workers, microbatches, question.limits, stage_s)
        plan = ahead_within(plan, costs, question.workers, question.limits.memory)
    else:
        plan = search_partition(costs, workers, microbatches, question.limits, question.staleness, host, search_seconds)
    return figures(question, plan)


def judge(question: Question, text: str) -> Answer:
    """Simulates somebody's own plan.

    Raises:
        ValueError: it is no plan for these costs, or takes more memory than there is.
    """
    plan, memory = Plan.parse(text), question.limits.memory
    plan.validate(question.costs.layers)
    need = device_bytes(plan, question.costs, question.workers)
    if memory is not None and need > memory:
        raise ValueError(f"plan= needs {need:,} bytes of each worker, and memory={memory:,}: make its stages smaller.")
    return figures(question, plan)


def figures(question: Question, plan: Plan) -> Answer:
    """How long steps take under ``plan``: one alone, and each of many."""
    makespan = run_answer(question, plan, 1).makespan_s
    period = makespan  # with staleness 0 the first call of a step waits for the last gradient of the one before
    if question.staleness:
        turns = 2 * PERIOD_STEPS * question.microbatches * len(plan.stages())
        if turns <= _MOST_TURNS:
            period = run_answer(question, plan, 2 * PERIOD_STEPS).period_s(PERIOD_STEPS)
        else:
            period = float(_timing(question).settled(plan)[-1])
    bound = _bound_s(question, plan)
    bubble = max(100 * (1 - bound / period), 0.0) if period else 0.0  # not -1e-13
    return Answer(plan, makespan, period, bubble)


def _timing(question: Question) -> Timing:
    pace = Pace.of(question.costs, HostTime(hop_s=question.hop_s))
    return Timing(pace, question.workers, question.microbatches, question.staleness, 0, 0)


def run_answer(question: Question, plan: Plan, steps: int) -> Run:
    """Steps by the rules that the question implies."""
    rules = Rules(question.staleness, host=HostTime(hop_s=question.hop_s))
    return run_steps(plan, question.costs, question.workers, question.microbatches, rules, steps)


def as_dict(found: Answer) -> dict[str, Any]:
    """What ``format=json`` prints."""
    plan = found.plan
    return {
        "forward": [len(span) for span in plan.forward],
        "fused": len(plan.fused) - 1,
        "backward": [len(span) for span in plan.backward],
        "round_microbatches": plan.round_microbatches,
        "makespan_ms": 1e3 * found.makespan_s,
        "period_ms": 1e3 * found.period_s,
        "bubble_pct": found.bubble_pct,
    }


def as_table(question: Question, found: Answer) -> RenderableType:
    """What people read: the figures, the plan as text, and its stages."""
    table = Table(*TABLE_COLUMNS)
    for row in found.plan.table(question.costs):
        table.add_row(*row)
    bound = _bound_s(question, found.plan)
    of = found.period_s if question.staleness else found.makespan_s
    lines = [
        f"one step {1e3 * found.makespan_s:,.3f} ms, each of many {1e3 * found.period_s:,.3f} ms, "
        f"bubble {found.bubble_pct:.2f} %",
        f"{100 * (of / bound - 1) if bound else 0:.2f} % above the work over {question.workers} workers, "
        f"{1e3 * bound:,.3f} ms",
    ]
    return Group(table, *lines, Text(f"plan={found.plan}", overflow="fold"))


def _bound_s(question: Question, plan: Plan) -> float:
    times = [question.costs.stage_time_s(stage.first, stage.last, stage.phase) for stage in plan.stages()]
    return question.microbatches * sum(times) / question.workers


def show(question: Question, found: Answer, form: Literal["table", "json"]) -> RenderableType:
    """The answer in the form that was asked for."""
    return as_json(as_dict(found)) if form == "json" else as_table(question, found)
