"""Pictures of one step: what every worker computed and copied, and when.

A schedule is easiest to judge by eye: a bubble is white, a worker that waits for a copy shows the copy under the gap.
The input is the report of a finished step, so what is drawn is what ran, not what was planned.

Each worker has a row of three lanes: compute, and beneath it the copies to the device (up) and back to the host (down).
A block of the compute lane is one microbatch in one slot and carries the microbatch's number; above stands the stage. A
report comes from ``RoundPipeStrategy.report()``; its times are seconds from the start of the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter

_COMPUTE, _UP, _DOWN = "compute", "up", "down"
_LANES = {
    "forward": _COMPUTE,
    "recompute": _COMPUTE,
    "backward": _COMPUTE,
    "upload_weights": _UP,
    "upload_activations": _UP,
    "upload_gradients": _UP,
    "download_activations": _DOWN,
    "download_gradients": _DOWN,
}
"""The lane of each kind of event. Kinds that stand later are drawn over earlier ones of their lane."""

_TRACKS = (_COMPUTE, *(kind for kind, lane in _LANES.items() if lane != _COMPUTE))
"""The tracks of a worker in a trace."""

_PLACE = {_COMPUTE: (0.0, 0.48), _UP: (0.51, 0.11), _DOWN: (0.64, 0.11)}
"""Top and height of each lane within a worker's row, in rows; above them is room for the stages' names."""

# Okabe and Ito's colours, which stay apart for colour-blind readers and in greyscale print.
_FORWARD, _FUSED, _RECOMPUTE, _BACKWARD = "#56B4E9", "#0072B2", "#F0D442", "#009E73"
_WEIGHTS, _GRADIENTS, _ACTIVATIONS = "#8C6BB1", "#D55E00", "#8A8A8A"
_LEGEND = {
    "forward": _FORWARD,
    "fused forward": _FUSED,
    "recompute": _RECOMPUTE,
    "backward": _BACKWARD,
    "weight upload": _WEIGHTS,
    "activation copy": _ACTIVATIONS,
    "gradient copy": _GRADIENTS,
}
_QUIET = "#555555"
_EVENT_KEYS = ("worker", "kind", "phase", "slot", "layer", "microbatch", "start_s", "end_s")


@dataclass(frozen=True)
class Event:
    """Something that one worker did; times in seconds from the start of the step."""

    worker: int
    kind: str
    phase: str
    slot: int
    layer: str
    microbatch: int
    start_s: float
    end_s: float

    @property
    def lane(self) -> str:
        return _LANES[self.kind]

    @property
    def label(self) -> str:
        """What the legend calls it."""
        if self.kind == "forward":
            return "fused forward" if self.phase == "fused" else "forward"
        if self.lane == _COMPUTE:
            return self.kind
        if self.kind == "upload_weights":
            return "weight upload"
        return "activation copy" if self.kind.endswith("activations") else "gradient copy"


def draw_timeline(report: Mapping[str, Any], path: Path, title: str | None = None) -> None:
    """Draws the step into a PNG at ``path``; the bubble and the step's time stand in the title.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        path: the file to write; its folder must exist.
        title: a first line above the one that the picture writes itself.

    Raises:
        ValueError: the report lacks something, has no events, or has one that cannot be placed; the message names it.
    """
    events = read_events(report)
    workers = int(_value(report, "workers"))
    span_s = max(float(_value(report, "step_time_s")), *(event.end_s for event in events))
    unit, scale = ("s", 1.0) if span_s >= 10 else ("ms", 1e3)

    figure = Figure(figsize=(13, 1.5 + 0.85 * workers), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    _set_axes(axes, workers, span_s, unit, scale)
    _draw_boxes(axes, events)
    axes.set_title(_title(report, title, unit, scale), fontsize=11, loc="left")
    present = {event.label for event in events}
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in _LEGEND.items() if label in present],
        loc="outside lower center",
        ncols=len(_LEGEND),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
    )
    figure.draw_without_rendering()  # the layout decides how wide a second is, and so which texts have room
    points_per_s = 72 * figure.get_figwidth() * axes.get_position().width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    _write_numbers(axes, events, points_per_s)
    _write_stages(axes, events, stage_names(report), points_per_s)
    figure.savefig(path, format="png")  # by way of Agg, whatever backend the user's program has chosen


def write_trace(report: Mapping[str, Any], path: Path) -> None:
    """Writes the step as a Chrome trace, which https://ui.perfetto.dev opens, each worker as a process.

    Copies of different kinds overlap in time, which one track cannot show; so every kind has its own.
    """
    events, stages, records = read_events(report), stage_names(report), []
    for worker in range(int(_value(report, "workers"))):
        records.append(_metadata("process_name", worker, 0, name=f"worker {worker}"))
        records.append(_metadata("process_sort_index", worker, 0, sort_index=worker))
        for number, track in enumerate(_TRACKS):
            records.append(_metadata("thread_name", worker, number, name=track.replace("_", " ")))
            records.append(_metadata("thread_sort_index", worker, number, sort_index=number))
    records.extend(_trace_record(event, stages.get(event.slot, "")) for event in events)
    summary = {key: report[key] for key in ("plan", "microbatches", "bubble_pct", "step_time_s") if key in report}
    path.write_text(json.dumps({"displayTimeUnit": "ms", "otherData": summary, "traceEvents": records}))


def _metadata(what: str, worker: int, track: int, **details: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": worker, "tid": track, "args": details}


def _trace_record(event: Event, stage: str) -> dict[str, Any]:
    """A complete event ("X"), in microseconds, as the Trace Event Format wants it."""
    return {
        "name": f"{event.kind} {event.layer}".strip(),
        "cat": event.label,
        "ph": "X",
        "pid": event.worker,
        "tid": _TRACKS.index(_COMPUTE if event.lane == _COMPUTE else event.kind),
        "ts": 1e6 * event.start_s,
        "dur": 1e6 * (event.end_s - event.start_s),
        "args": {"stage": stage, "phase": event.phase, "slot": event.slot, "microbatch": event.microbatch},
    }


# -- reading the report ----------------------------------------------------------------------------------------------


def read_events(report: Mapping[str, Any]) -> list[Event]:
    """The report's events, checked; ``ValueError`` names the first one that is wrong."""
    workers = int(_value(report, "workers"))
    given = _value(report, "events")
    if not given:
        raise ValueError("The report has no events, so there is nothing to draw: has a training step finished?")
    return [_read_event(number, event, workers) for number, event in enumerate(given)]


def _read_event(number: int, given: Mapping[str, Any], workers: int) -> Event:
    if missing := [key for key in _EVENT_KEYS if key not in given]:
        raise ValueError(f"Event {number} of the report lacks {missing[0]!r}; it needs {', '.join(_EVENT_KEYS)}.")
    event = Event(**{key: given[key] for key in _EVENT_KEYS})
    if event.kind not in _LANES:
        raise ValueError(f"Event {number} of the report is of kind {event.kind!r}; known are {', '.join(_LANES)}.")
    if not 0 <= event.worker < workers:
        raise ValueError(f"Event {number} of the report ran on worker {event.worker}, but there are {workers} workers.")
    if not event.start_s <= event.end_s:
        raise ValueError(
            f"Event {number} of the report ends at {event.end_s} s, before its start at {event.start_s} s."
        )
    return event


def _value(report: Mapping[str, Any], key: str) -> Any:
    if key not in report:
        raise ValueError(f"The report lacks {key!r}: pass what RoundPipeStrategy.report() returns after a step.")
    return report[key]


def stage_names(report: Mapping[str, Any]) -> dict[int, str]:
    """Per slot, its stage as the plan counts it: ``F1``, ``F2``, …, ``fused``, ``B1``, …; empty without slots."""
    letters = {"forward": "F", "backward": "B"}
    counts: dict[tuple[int, str], int] = defaultdict(int)
    names = {}
    for slot in sorted(report.get("slots", ()), key=lambda slot: int(slot["slot"])):
        phase = slot["phase"]
        counts[slot["round"], phase] += 1
        if phase == "fused":
            names[int(slot["slot"])] = "fused"
        elif phase in letters:
            names[int(slot["slot"])] = f"{letters[phase]}{counts[slot['round'], phase]}"
    return names


# -- drawing ---------------------------------------------------------------------------------------------------------


def _set_axes(axes: Axes, workers: int, span_s: float, unit: str, scale: float) -> None:
    axes.set_xlim(0, span_s or 1.0)  # what was uploaded before the step began is cut off
    axes.set_ylim(workers - 0.2, -0.24)
    axes.set_xlabel(f"time in the step ({unit})")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{scale * value:,.10g}"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", which="both", length=0)
    ticks = {worker + _PLACE[lane][0] + _PLACE[lane][1] / 2: lane for worker in range(workers) for lane in (_UP, _DOWN)}
    axes.set_yticks([worker + _PLACE[_COMPUTE][1] / 2 for worker in range(workers)])
    axes.set_yticklabels([f"worker {worker}" for worker in range(workers)])
    axes.set_yticks(list(ticks), list(ticks.values()), minor=True, fontsize=6.5, color=_QUIET)
    for centre, lane in ticks.items():
        half = _PLACE[lane][1] / 2
        axes.axhspan(centre - half, centre + half, color="#F1F1F1", linewidth=0, zorder=0)


def _title(report: Mapping[str, Any], title: str | None, unit: str, scale: float) -> str:
    step, bubble = float(_value(report, "step_time_s")), float(_value(report, "bubble_pct"))
    facts = (
        f"{_count(_value(report, 'workers'), 'worker')}, {_count(_value(report, 'microbatches'), 'microbatch')}, "
        f"step {scale * step:,.4g} {unit}, bubble {bubble:.1f} %"
    )
    return f"{title}\n{facts}" if title else f"RoundPipe: {facts}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


@dataclass(frozen=True)
class _Block:
    """One microbatch in one direction of one slot, which gets one number and one outline."""

    worker: int
    slot: int
    microbatch: int
    fill: str
    start_s: float
    end_s: float


def _blocks(events: Sequence[Event]) -> list[_Block]:
    groups: dict[tuple[int, int, int, bool], list[Event]] = defaultdict(list)
    for event in events:
        if event.lane == _COMPUTE:
            groups[event.worker, event.slot, event.microbatch, event.kind == "forward"].append(event)
    return [
        _Block(worker, slot, microbatch, _LEGEND[members[-1].label], *_extent(members))
        for (worker, slot, microbatch, _), members in groups.items()
    ]


def _extent(events: Sequence[Event]) -> tuple[float, float]:
    return min(event.start_s for event in events), max(event.end_s for event in events)


def _draw_boxes(axes: Axes, events: Sequence[Event]) -> None:
    """One collection a kind: a step has thousands of events, too many for a patch each."""
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        groups[event.kind, event.label].append(event)
    for (kind, label), members in groups.items():
        order = 2 + list(_LANES).index(kind) / 10
        boxes = [_corners(event.worker, event.lane, event.start_s, event.end_s) for event in members]
        axes.add_collection(PolyCollection(boxes, facecolors=_LEGEND[label], linewidths=0, zorder=order))
    outlines = [_corners(block.worker, _COMPUTE, block.start_s, block.end_s) for block in _blocks(events)]
    axes.add_collection(PolyCollection(outlines, facecolors="none", edgecolors="white", linewidths=0.6, zorder=4))


def _corners(worker: int, lane: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
    top, height = worker + _PLACE[lane][0], _PLACE[lane][1]
    return [(start_s, top), (end_s, top), (end_s, top + height), (start_s, top + height)]


def _write_numbers(axes: Axes, events: Sequence[Event], points_per_s: float) -> None:
    """The microbatch's number into each block that is wide enough for it, smaller where room is scarce."""
    digits = len(str(max(event.microbatch for event in events)))  # of the widest: half a row with numbers looks broken
    for block in _blocks(events):
        size = min(8.5, (points_per_s * (block.end_s - block.start_s) - 2.0) / (0.65 * digits))
        if block.microbatch < 0 or size < 5.5:
            continue
        dark = block.fill in (_FUSED, _BACKWARD)
        axes.text(
            (block.start_s + block.end_s) / 2,
            block.worker + _PLACE[_COMPUTE][1] / 2,
            str(block.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white" if dark else "black",
            # The stroke keeps the number readable where recomputation stripes a backward block.
            path_effects=[withStroke(linewidth=1.8, foreground=block.fill)],
            zorder=5,
        )


def _write_stages(axes: Axes, events: Sequence[Event], names: Mapping[int, str], points_per_s: float) -> None:
    """A line above each slot from its first to its last block, and the stage's name where there is room."""
    slots: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.lane == _COMPUTE and event.slot in names:
            slots[event.worker, event.slot].append(event)
    inset = 1.0 / points_per_s  # a point at each end, so that lines of neighbouring slots do not touch
    for (worker, slot), members in slots.items():
        start, end = _extent(members)
        axes.plot([start + inset, max(end - inset, start + inset)], [worker - 0.035] * 2, color=_QUIET, linewidth=0.7)
        if points_per_s * (end - start) > 4.5 * len(names[slot]):
            axes.text(
                (start + end) / 2, worker - 0.06, names[slot], ha="center", va="bottom", fontsize=7.5, color=_QUIET
            )
