"""Why steps take longer than planned, from their reports: what `RoundPipeMonitor` logs and warns of.

The reference is the plan: how long its stages take by the costs that it was made from, if nothing but computing takes
time. What a step takes beyond that is found along its critical path, from the last computation back to the start:

    a computation can begin when its worker is free and its microbatch has left the call before ── [1]
    what lies between that and its begin ── [2]
        a copy that it needs is on its way: link          its weights are not updated yet: host
        all cores compute for other emulated devices: computing     else: user code
    computations on the path take longer than planned: all layers do: host; some layers do: imbalance ── [3]
    nothing runs between two steps: data loader; a blocking optimizer: host; hooks and loggers: user code ── [4]

Sums of waiting time over all workers would not tell causes apart: one late copy makes every worker behind it wait.
Everything here works on plain reports, so it needs no engine, and a saved ``step.json`` will do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from lightning_roundpipe.engine.events import COMPUTE, DOWNLOADS, UPLOADS
from lightning_roundpipe.messages import seconds
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import paper_plan

SLOW = 1.2
"""Steps that take more than this many times what is planned are slow."""

Cause = Literal["link", "host", "data loader", "user code", "imbalance"]

Interval = tuple[float, float]

_AT_ONCE = 1e-5
"""Seconds within which one thing follows another."""


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedStep:
    """What a step takes by the costs of its plan.

    Args:
        seconds: duration, of the plan that the step had.
        best_s: duration of the reference; the same unless a user wrote the plan. Then it is the faster of that plan and
            the planner's plan of the same costs within the device memory that the user's plan takes.
        busy_s: computing, of all workers together.
    """

    seconds: float
    best_s: float
    busy_s: float


def planned_step(report: Mapping[str, Any], cores: int | None = None) -> PlannedStep | None:
    """Return what the step of ``report`` was planned to take; None if it had no plan of its own.

    Costs from shapes (``plan="static"``) are nominal, so the shortest times of the step itself replace them.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        cores: how many emulated devices compute at once; None for devices that share none.
    """
    if (followed := plan_and_costs(report)) is None:
        return None
    plan, costs = followed
    if report["plan_policy"] == "static":
        costs = with_shortest_times(costs, report["events"], nominal=True)
    workers, microbatches = report["workers"], report["microbatches"]
    run = run_steps(plan, costs, workers, microbatches)
    shared_s = run.busy_s / cores if cores else 0.0
    best_s = run.makespan_s
    if report["plan_policy"] == "text" and microbatches > 1:
        limits = Limits.usual(costs, workers, microbatches, report["planned_device_bytes"])
        try:
            best = paper_plan(costs, workers, microbatches, limits)
        except ValueError:  # no plan of the planner's needs as little memory
            best = plan
        best_s = min(best_s, run_steps(best, costs, workers, microbatches).makespan_s)
    return PlannedStep(max(run.makespan_s, shared_s), max(best_s, shared_s), run.busy_s)


def plan_and_costs(report: Mapping[str, Any]) -> tuple[Plan, Costs] | None:
    """Return the plan of the step and the costs that it was made from; None if the step did not follow its stages."""
    if not report or report["profiled"] or not report["costs"]:
        return None
    plan = Plan.parse(report["plan"])
    if [slot["phase"] for slot in report["slots"] if slot["round"] <= 0] != [stage.phase for stage in plan.stages()]:
        return None  # microbatches have left the plan
    return plan, Costs.from_dict(report["costs"])


def with_shortest_times(costs: Costs, events: Sequence[Mapping[str, Any]], *, nominal: bool = False) -> Costs:
    """Return the costs with the shortest times of each call in ``events``, if these are shorter.

    ``nominal``: whether the times of ``costs`` are nominal, and do not count.
    """
    took: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    for event in events:
        kind = "forward" if event["kind"] == "recompute" else event["kind"]
        took[kind, event["call"]] = min(took[kind, event["call"]], event["end_s"] - event["start_s"])

    def shortest(kind: str, number: int, known_s: float) -> float:
        if nominal:
            return took[kind, number] if took[kind, number] < math.inf else 0.0
        return min(known_s, took[kind, number])

    return Costs(
        tuple(
            replace(
                call,
                forward_s=shortest("forward", number, call.forward_s),
                backward_s=shortest("backward", number, call.backward_s),
                unpack_s=0.0,  # the shortest of a stage that unpacks once has found its weights unpacked
                backward_unpack_s=0.0,
            )
            for number, call in enumerate(costs)
        )
    )


# -- shares of a step --------------------------------------------------------------------------------------------------


def stall_seconds(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that workers waited for copies, all workers together, by what was copied.

    A stall ends with the copy that it waited for: ``"weights"``, ``"activations"`` or ``"gradients"``.
    """
    copies: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for event in report["events"]:
        if event["kind"] in UPLOADS + DOWNLOADS:
            copies[event["worker"]].append((event["end_s"], event["kind"].rpartition("_")[2]))
    found = dict.fromkeys(("weights", "activations", "gradients"), 0.0)
    for ends in copies.values():
        ends.sort()
    for stall in report["stalls"]:
        ends = copies[stall["worker"]]
        at = bisect_right(ends, (stall["end_s"] + _AT_ONCE, "~"))
        came = at and ends[at - 1][0] > stall["start_s"]
        found[ends[at - 1][1] if came else "weights"] += stall["end_s"] - stall["start_s"]
    return found


def link_use(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of the step, 0 to 1, in which the links ``"up"`` to the devices and ``"down"`` carry copies."""
    step = report["step_time_s"]
    spans: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for event in report["events"]:
        if event["kind"] not in COMPUTE:
            spans["up" if event["kind"] in UPLOADS else "down", event["worker"]].append(
                (event["start_s"], event["end_s"])
            )
    shares = dict.fromkeys(("up", "down"), 0.0)
    for (way, _), copies in spans.items():
        if step > 0:
            shares[way] += covered((0.0, step), merged(copies)) / (step * report["workers"])
    return shares


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """Return the union of ``spans`` as sorted intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def covered(span: Interval, spans: Sequence[Interval]) -> float:
    """Return how much of ``span`` the sorted, disjoint ``spans`` cover."""
    return sum(min(end, span[1]) - max(start, span[0]) for start, end in _within(span, spans))


def _within(span: Interval, spans: Sequence[Interval]) -> Sequence[Interval]:
    """Return those of the sorted, disjoint ``spans`` that overlap ``span``."""
    first = max(0, bisect_right(spans, (span[0], math.inf)) - 1)
    last = bisect_right(spans, (span[1], -math.inf))
    found = spans[first:last]
    return found[1:] if found and found[0][1] <= span[0] else found


# -- the critical path -------------------------------------------------------------------------------------------------


@dataclass
class CriticalPath:
    """The seconds of a step by what it waited for. Their sum is the step's duration.

    Attributes:
        compute: layers.
        link: copies, by what was copied.
        update: weights that the optimizer had not updated yet.
        code: code between layers.
        gaps: what lies between any two computations that follow each other.
    """

    compute: float = 0.0
    link: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    update: float = 0.0
    code: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Seconds of ``code`` that every call takes, by the median of the gaps between calls: the engine's own work."""
        return min(median(self.gaps) * len(self.gaps), self.code) if self.gaps else 0.0


def _end_s(event: Mapping[str, Any]) -> float:
    return float(event["end_s"])


def _before(event: Mapping[str, Any], chain: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last computation of ``chain``, which is sorted by ends, that ended before ``event`` began."""
    at = bisect_right(chain, event["start_s"] + _AT_ONCE, key=_end_s)
    while at and chain[at - 1] is event:
        at -= 1
    return chain[at - 1] if at else None


def critical_path(report: Mapping[str, Any], cores: int | None = None) -> CriticalPath:
    """Return what the step of ``report`` spent its time on, along its critical path.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        cores: as in `planned_step`. Waiting for a core counts as computing.
    """
    path = CriticalPath()
    computed = [event for event in report["events"] if event["kind"] in COMPUTE]
    if not computed:
        return path
    workers: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    microbatches: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(computed, key=_end_s):
        workers[event["worker"]].append(event)
        microbatches[event["microbatch"]].append(event)
    gaps = _Gaps(report, computed, cores)
    end = max(computed, key=_end_s)
    path.code += max(0.0, report["step_time_s"] - end["end_s"])
    now: Mapping[str, Any] | None = end
    while now is not None and now["end_s"] > 0:
        path.compute += now["end_s"] - max(0.0, now["start_s"])
        before = [_before(now, chain) for chain in (workers[now["worker"]], microbatches[now["microbatch"]])]
        last = max((one for one in before if one is not None), key=_end_s, default=None)  # [1]
        gaps.explain(path, last, now)
        now = last
    return path


class _Gaps:
    """Explains what lies between two computations on the critical path [2]."""

    def __init__(self, report: Mapping[str, Any], computed: Sequence[Mapping[str, Any]], cores: int | None) -> None:
        self._arrivals: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        carried: dict[int, list[Interval]] = defaultdict(list)
        leaving: dict[tuple[int, int], list[Interval]] = defaultdict(list)
        for event in report["events"]:
            span = event["start_s"], event["end_s"]
            if event["kind"] in UPLOADS:
                self._arrivals[event["worker"]].append(event)
                carried[event["worker"]].append(span)
            elif event["kind"] in DOWNLOADS:
                leaving[event["worker"], event["microbatch"]].append(span)
        for arrivals in self._arrivals.values():
            arrivals.sort(key=_end_s)
        self._up = {worker: merged(spans) for worker, spans in carried.items()}
        self._down = {key: merged(spans) for key, spans in leaving.items()}
        self._full = _crowded(computed, cores) if cores else []

    def explain(self, path: CriticalPath, last: Mapping[str, Any] | None, event: Mapping[str, Any]) -> None:
        """Add the time from ``last`` (None: the start of the step) to ``event`` to the path."""
        start = max(0.0, last["end_s"]) if last is not None else 0.0
        end = event["start_s"]
        path.gaps.append(max(0.0, end - start))
        if end - start <= _AT_ONCE:
            path.compute += max(0.0, end - start)
            return
        if (copy := self._late(event, start, end)) is not None:
            kind, until = copy["kind"].rpartition("_")[2], min(end, copy["end_s"])
            down = self._down.get((last["worker"], event["microbatch"]), []) if last is not None else []
            spans = merged([*_within((start, until), self._up[event["worker"]]), *_within((start, until), down)])
            on_its_way = covered((start, until), spans)
            path.link[kind] += on_its_way
            if kind == "weights":
                path.update += until - start - on_its_way
            else:
                path.code += until - start - on_its_way
            start = until
        crowded = covered((start, end), self._full)
        path.compute += crowded
        path.code += end - start - crowded

    def _late(self, event: Mapping[str, Any], start: float, end: float) -> Mapping[str, Any] | None:
        """Return the last copy that ``event`` needs and that arrived within the gap; None without one."""
        copies: Sequence[Mapping[str, Any]] = self._arrivals.get(event["worker"], [])
        first, last = bisect_right(copies, start, key=_end_s), bisect_right(copies, end + _AT_ONCE, key=_end_s)
        for copy in copies[first:last][::-1]:
            is_its_layers = all(copy[name] == event[name] for name in ("slot", "layer"))
            if copy["microbatch"] == event["microbatch"] or (copy["kind"] == "upload_weights" and is_its_layers):
                return copy
        return None


def _crowded(computed: Sequence[Mapping[str, Any]], cores: int) -> list[Interval]:
    """Return when at least ``cores`` devices compute."""
    changes = sorted(
        [(event["start_s"], 1) for event in computed] + [(event["end_s"], -1) for event in computed],
        key=lambda change: (change[0], -change[1]),  # at the same moment, the next one has the core at once
    )
    found: list[Interval] = []
    running, since = 0, 0.0
    for moment, change in changes:
        before, running = running, running + change
        if before < cores <= running:
            since = moment
        elif running < cores <= before:
            found.append((since, moment))
    return merged(found)


# -- the diagnosis -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One cause in words: what takes the time, as the beginning of a sentence, and what to change."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What steps lose to each cause, and what to change.

    Attributes:
        step_s: duration of a step, end to end.
        planned_s: what the reference takes; see `PlannedStep.best_s`.
        lost_s: seconds of a step by cause.
        said: the same in words, by cause.
    """

    step_s: float
    planned_s: float
    lost_s: Mapping[Cause, float]
    said: Mapping[Cause, Finding]

    @property
    def slow(self) -> bool:
        """Whether steps take more than `SLOW` times as long as planned."""
        return self.step_s > SLOW * self.planned_s

    @property
    def cause(self) -> Cause:
        """The cause that a step loses most to."""
        return max(self.lost_s, key=lambda cause: self.lost_s[cause])

    @property
    def remedy(self) -> str:
        """What to change against the main cause; empty if no setting helps."""
        return self.said[self.cause].remedy

    def __str__(self) -> str:
        longer = 100 * (self.step_s / self.planned_s - 1)
        found = self.said[self.cause]
        return (
            f"steps take {seconds(self.step_s)}, {longer:.0f} % longer than the {seconds(self.planned_s)} planned. "
            f"Cause: {self.cause}. {found.what} takes {seconds(self.lost_s[self.cause])} of a step. {found.remedy}"
        ).rstrip()


@dataclass(frozen=True)
class StepTimes:
    """What a step takes on the main thread, end to end; seconds.

    Args:
        step_s: from the end of a step to the end of the next one, without validation.
        fetch_s: waiting for the data loader.
        update_s: from the gradients to the end of the step, which includes the optimizer's step if training waits for
            it.
    """

    step_s: float
    fetch_s: float
    update_s: float


def diagnose(
    reports: Sequence[Mapping[str, Any]], times: Sequence[StepTimes], cores: int | None = None
) -> Diagnosis | None:
    """Return what the steps of ``reports`` lose to each cause; None if they have no plan to compare with.

    Args:
        reports: of one or more steps under one plan.
        times: of the same or other steps around them.
        cores: as in `planned_step`.
    """
    planned = [planned_step(report, cores) for report in reports]
    losses = [_losses(report, plan, cores) for report, plan in zip(reports, planned, strict=True) if plan is not None]
    if not losses or not times:
        return None
    expected = median(plan.best_s for plan in planned if plan is not None)
    step_s = median(one.step_s for one in times)
    between_s = max(0.0, step_s - median(report["step_time_s"] for report in reports))  # [4]
    loader = min(between_s, median(one.fetch_s for one in times))
    apart = any(report.get("optimizer_lag_s") is not None for report in reports)
    update = 0.0 if apart else min(between_s - loader, median(one.update_s for one in times))
    found = {name: median(loss.seconds[name] for loss in losses) for name in losses[0].seconds}
    hooks = between_s - loader - update
    last = max(losses, key=lambda loss: loss.seconds["code"])
    host = {
        _of_the_optimizer(blocking=update > found["update"]): found["update"] + update,
        _of_the_layers(last.slowdown, cores): found["slower"],
        _OVERHEAD: found["overhead"],
    }
    said: dict[Cause, Finding] = {
        "link": _of_the_link(last.copied),
        "host": max(host, key=lambda one: host[one]),
        "data loader": _LOADER,
        "user code": _HOOKS if hooks > found["code"] else _of_code(*last.place),
        "imbalance": _of_imbalance(reports[-1]),
    }
    return Diagnosis(
        step_s,
        expected,
        {
            "link": found["link"],
            "host": max(host.values()),
            "data loader": loader,
            "user code": max(found["code"], hooks),
            "imbalance": found["imbalance"],
        },
        said,
    )


@dataclass(frozen=True)
class _Losses:
    seconds: Mapping[str, float]
    copied: str
    place: tuple[str, str]
    slowdown: float


def _losses(report: Mapping[str, Any], planned: PlannedStep, cores: int | None) -> _Losses:
    path = critical_path(report, cores)
    busy = sum(event["end_s"] - event["start_s"] for event in report["events"] if event["kind"] in COMPUTE)
    slowdown = busy / planned.busy_s if planned.busy_s > 0 else 1.0
    beyond = max(0.0, path.compute - planned.seconds)
    slower = min(beyond, max(0.0, planned.seconds * (slowdown - 1)))  # [3]
    code = path.code - path.overhead
    # Where devices wait for the machine's cores, the code between layers does, too, and takes longer by as much.
    waits = code * (1 - 1 / slowdown) if cores is not None and slowdown > 1 else 0.0
    return _Losses(
        {
            "link": sum(path.link.values()),
            "update": path.update,
            "overhead": path.overhead,
            "code": code - waits,
            "slower": slower + waits,
            "imbalance": beyond - slower + planned.seconds - planned.best_s,
        },
        max(path.link, key=lambda kind: path.link[kind], default="weights"),
        _place_of_code(report),
        slowdown,
    )


def _place_of_code(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the layers between which user code takes longest; an empty name is the start of the step.

    User code runs for one microbatch at a time, so a microbatch may wait at one place for what another one does at
    another. The code's own duration is the shortest time that any microbatch takes from the one layer to the other.
    """
    shortest: dict[tuple[str, str, str, str], float] = defaultdict(lambda: math.inf)
    last: dict[int, Mapping[str, Any]] = {}
    start: Mapping[str, Any] = {"layer": "", "kind": "", "end_s": 0.0}
    for event in report["events"]:  # in the order of their starts
        if event["kind"] in COMPUTE:
            before = last.get(event["microbatch"], start)
            place = before["layer"], event["layer"], before["kind"], event["kind"]
            shortest[place] = min(shortest[place], event["start_s"] - before["end_s"])
            last[event["microbatch"]] = event
    longest = max(shortest, key=lambda place: shortest[place])
    return longest[0], longest[1]


# -- words -------------------------------------------------------------------------------------------------------------

_LOADER = Finding(
    "Waiting for the next batch",
    "Set num_workers= of the DataLoader, or more of them, with persistent_workers=True.",
)
_HOOKS = Finding(
    "Code between two steps (hooks, callbacks, loggers)",
    "profiler='simple' of the Trainer shows which hook it is; log_every_n_steps= calls loggers less often.",
)
_OVERHEAD = Finding(
    "What every call of a layer takes beside its computation",
    "Larger microbatches (batch_size= of the DataLoader) make fewer calls, and so do larger layers (layers=).",
)


def _of_the_link(copied: str) -> Finding:
    remedy = {
        "weights": "A larger batch (batch_size= of the DataLoader) uses each upload for more samples; "
        "precision='bf16-mixed' or a base in four bits makes uploads smaller.",
        "activations": "precision='bf16-mixed' makes them smaller, and a larger stage_seconds= sends them less often.",
        "gradients": "reduce_dtype='bfloat16' halves them, and adapters (LoRA) have few.",
    }[copied]
    return Finding(f"Waiting for copies, most of them {copied},", remedy)


def _of_the_optimizer(*, blocking: bool) -> Finding:
    if blocking:
        return Finding(
            "The optimizer's step, which training waits for,",
            "A message at the start of training says why it waits. Without that reason, the optimizer has a thread of "
            "its own.",
        )
    return Finding(
        "Waiting for weights that the optimizer has not updated yet",
        "staleness=1 lets the next step run meanwhile, an optimizer with fused=True is faster, and adapters (LoRA) "
        "have less to update.",
    )


def _of_the_layers(slowdown: float, cores: int | None) -> Finding:
    if cores is not None:
        what = f"Computing, {slowdown:.1f} times as long as planned, as emulated devices share the machine's cores,"
        return Finding(what, "")
    return Finding(
        f"Computing, {slowdown:.1f} times as long as in the batch that the plan was made from,",
        "If that batch was smaller than later ones, let the data loader begin with one of the usual size; otherwise "
        "another program uses the devices.",
    )


def _of_code(before: str, after: str) -> Finding:
    if before and before != after:
        place = f"between layers {before!r} and {after!r}"
    else:
        place = f"after layer {after!r}" if before else f"before layer {after!r}"
    return Finding(
        f"Code of the step that is in no layer, most of it {place},",
        "Move it out of training_step, into the data loader or a layer; with fewer microbatches "
        "(accumulate_grad_batches=) it runs less often.",
    )


def _of_imbalance(report: Mapping[str, Any]) -> Finding:
    longest = _longest(report)
    what = "Waiting for stages that are longer than others" + (f" (the longest: {longest})" if longest else "")
    remedy = {
        "text": "Leave plan= out: the strategy makes an even plan from the measured times.",
        "static": "Set plan='measured': the plan is then made from times instead of shapes.",
        "measured": "Layers' times differ from those in the first batch: let the data loader begin with a usual one. "
        "Larger microbatches (batch_size= of the DataLoader) vary less.",
    }
    return Finding(what, remedy[report["plan_policy"]])


def _longest(report: Mapping[str, Any]) -> str:
    """Return the phase and the layers of the stage that took longest."""
    took: dict[int, float] = defaultdict(float)
    for event in report["events"]:
        if event["kind"] in COMPUTE:
            took[event["slot"]] += event["end_s"] - event["start_s"]
    slots = {slot["slot"]: slot for slot in report["slots"] if slot["layers"]}
    if not (known := took.keys() & slots.keys()):
        return ""
    slot = slots[max(known, key=lambda number: took[number])]
    return f"{slot['phase']}, {' … '.join(dict.fromkeys((slot['layers'][0], slot['layers'][-1])))}"
