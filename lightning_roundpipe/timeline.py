"""Pictures of one step: what every worker computed and copied, and when.

A schedule is easiest to judge by eye: a bubble is white, and below a gap in computing is the copy that the worker waits
for. The input is the report of a finished step, so the picture shows what ran, not what was planned.

Each worker has a row of three lanes: compute, and beneath it the copies to the device (up) and back to the host (down).
A block of the compute lane is one microbatch in one slot, with the microbatch's number. The stage's name is above it. A
report comes from ``RoundPipeStrategy.report()``; its times are seconds from the start of the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.messages import plural
from lightning_roundpipe.pictures import (
    DPI,
    MOST_INCHES,
    MOST_PIXELS,
    TimeUnit,
    idle_note,
    save,
    set_time_axis,
    trace_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
"""The lane of each kind of event. Later kinds are drawn over earlier ones of their lane."""

_TRACKS = (_COMPUTE, *(kind for kind, lane in _LANES.items() if lane != _COMPUTE))
"""A worker's tracks in a trace."""

# In inches, as is the vertical axis where there is room for rows of the usual height.
_WIDTH, _FRAME = 13.0, 1.5
_NAMES = 0.2
"""Space above each row for the stages' names."""
_PLACE = {_COMPUTE: (0.0, 0.41), _UP: (0.435, 0.095), _DOWN: (0.545, 0.095)}
"""Top and height of each lane within a worker's row."""
_LOWEST = 0.45
"""Least height of a row, with its names, at which numbers are legible."""
_LEAST_COPY = 0.5
"""Points. Width of a copy's edge, which keeps very short copies visible."""
_LEAST_TEXT = 5.0
"""Points. Smaller text is left out."""

# Okabe and Ito's colours, which colour-blind readers and greyscale prints can tell apart.
_FORWARD, _FUSED, _RECOMPUTE, _BACKWARD = "#56B4E9", "#0072B2", "#F0D442", "#009E73"
_WEIGHTS, _GRADIENTS, _ACTIVATIONS = "#8C6BB1", "#D55E00", "#8A8A8A"
LEGEND = {
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
class TimelineEvent:
    """An event on one worker. Times are seconds from the start of the step."""

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
        """The event's label in the legend."""
        if self.kind == "forward":
            return "fused forward" if self.phase == "fused" else "forward"
        if self.lane == _COMPUTE:
            return self.kind
        if self.kind == "upload_weights":
            return "weight upload"
        return "activation copy" if self.kind.endswith("activations") else "gradient copy"


def draw_timeline(report: Mapping[str, Any], path: Path, title: str | None = None) -> None:
    """Draw the step to a PNG at ``path``. The title shows the bubble and the step time.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        path: the file to write; its folder must exist.
        title: a line above the title.

    Raises:
        ValueError: the report lacks a key, has no events, or has an invalid one. The message names it.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = read_events(report)
    # Cut off what was uploaded ahead of the step, but show what it computed before the end of the previous step.
    start_s = min([0.0, *(event.start_s for event in events if event.lane == _COMPUTE)])
    end_s = max(float(_value(report, "step_time_s")), *(event.end_s for event in events))
    unit = TimeUnit.of(end_s - start_s)

    rows = _rows(events)
    figure = Figure(figsize=(_WIDTH, _FRAME + rows.scale * rows.pitch * len(rows.of)), layout="constrained")
    axes = figure.add_subplot()
    _set_axes(axes, rows, (start_s, end_s), unit)
    _draw_boxes(axes, events, rows)
    axes.set_title(_title(report, title, unit, len(rows.of)), fontsize=11, loc="left")
    present = {event.label for event in events}
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in LEGEND.items() if label in present],
        loc="outside lower center",
        ncols=len(LEGEND),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
    )
    figure.draw_without_rendering()  # the layout decides how wide a second is, and so which texts fit
    points_per_s = 72 * figure.get_figwidth() * axes.get_position().width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    _write_numbers(axes, events, points_per_s, rows)
    _write_stages(axes, events, stage_names(report), points_per_s, rows)
    save(figure, path)


def write_trace(report: Mapping[str, Any], path: Path) -> None:
    """Write the step as a Chrome trace for https://ui.perfetto.dev, with each worker as a process.

    Copies of different kinds overlap in time, which one track cannot show, so every kind has its own.
    """
    events, stages, records = read_events(report), stage_names(report), []
    earliest_s = min(event.start_s for event in events)  # a trace has no negative times
    for worker in range(int(_value(report, "workers"))):
        records += trace_names("process", worker, 0, f"worker {worker}", worker)
        for number, track in enumerate(_TRACKS):
            records += trace_names("thread", worker, number, track.replace("_", " "), number)
    records.extend(_trace_record(event, stages.get(event.slot, ""), earliest_s) for event in events)
    summary = {key: report[key] for key in ("plan", "microbatches", "bubble_pct", "step_time_s") if key in report}
    path.write_text(json.dumps({"displayTimeUnit": "ms", "otherData": summary, "traceEvents": records}))


def _trace_record(event: TimelineEvent, stage: str, origin_s: float) -> dict[str, Any]:
    """Return a complete event ("X") of the Trace Event Format, in microseconds from the origin."""
    return {
        "name": f"{event.kind} {event.layer}".strip(),
        "cat": event.label,
        "ph": "X",
        "pid": event.worker,
        "tid": _TRACKS.index(_COMPUTE if event.lane == _COMPUTE else event.kind),
        "ts": 1e6 * (event.start_s - origin_s),
        "dur": 1e6 * (event.end_s - event.start_s),
        "args": {"stage": stage, "phase": event.phase, "slot": event.slot, "microbatch": event.microbatch},
    }


# -- reading the report ----------------------------------------------------------------------------------------------


def read_events(report: Mapping[str, Any]) -> list[TimelineEvent]:
    """Return the report's events, checked. ``ValueError`` names the first invalid one."""
    workers = int(_value(report, "workers"))
    given = _value(report, "events")
    if not given:
        raise ValueError("The report has no events, so there is nothing to draw: has a training step finished?")
    return [_read_event(number, event, workers) for number, event in enumerate(given)]


def _read_event(number: int, given: Mapping[str, Any], workers: int) -> TimelineEvent:
    if missing := [key for key in _EVENT_KEYS if key not in given]:
        raise ValueError(f"Event {number} of the report lacks {missing[0]!r}; it needs {', '.join(_EVENT_KEYS)}.")
    event = TimelineEvent(**{key: given[key] for key in _EVENT_KEYS})
    if event.kind not in _LANES:
        raise ValueError(f"Event {number} of the report is of kind {event.kind!r}; known are {', '.join(_LANES)}.")
    if not 0 <= event.worker < workers:
        raise ValueError(f"Event {number} of the report ran on worker {event.worker}, of workers={workers}.")
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
    """Return the name of each slot's stage: ``F1``, ``F2``, …, ``fused``, ``B1``, …; empty without slots."""
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


@dataclass(frozen=True)
class _TimelineRows:
    """The places of the workers' rows, ``pitch`` apart, drawn ``scale`` times as high as usual."""

    of: Mapping[int, int]
    """The row number of each worker."""
    lanes: tuple[str, ...]
    pitch: float
    scale: float

    def top(self, worker: int) -> float:
        return self.of[worker] * self.pitch

    def middle(self, worker: int, lane: str) -> float:
        top, height = _PLACE[lane]
        return self.top(worker) + top + height / 2

    def corners(self, event: TimelineEvent | _TimelineBlock, lane: str) -> list[tuple[float, float]]:
        """Return the box from the event's start to its end."""
        top, height = self.top(event.worker) + _PLACE[lane][0], _PLACE[lane][1]
        start, end = event.start_s, event.end_s
        return [(start, top), (end, top), (end, top + height), (start, top + height)]

    def points(self, inches: float) -> float:
        """Return the height as drawn, in points."""
        return 72 * self.scale * inches


def _rows(events: Sequence[TimelineEvent]) -> _TimelineRows:
    """Return rows of the usual height if the picture fits at full resolution; else lower ones, even without text.

    Idle workers have no row, and a picture without copies has no lanes for them.
    """
    lanes, working = {event.lane for event in events}, sorted({event.worker for event in events})
    shown = tuple(lane for lane in _PLACE if lane == _COMPUTE or {_UP, _DOWN} & lanes)
    pitch = _NAMES + sum(_PLACE[shown[-1]]) + 0.01
    full, largest = MOST_PIXELS / DPI - _FRAME, MOST_INCHES - _FRAME
    height = min(max(min(pitch, full / len(working)), _LOWEST), largest / len(working))
    return _TimelineRows({worker: row for row, worker in enumerate(working)}, shown, pitch, height / pitch)


def _set_axes(axes: Axes, rows: _TimelineRows, span_s: tuple[float, float], unit: TimeUnit) -> None:
    axes.set_xlim(*span_s if span_s[0] < span_s[1] else (0.0, 1.0))
    axes.set_ylim(len(rows.of) * rows.pitch - _NAMES + 0.03, -_NAMES)
    axes.set_xlabel(f"time in the step ({unit.name})")
    set_time_axis(axes, unit)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", which="both", length=0)
    named = list(rows.of)[:: 1 if rows.points(rows.pitch) >= 12 else 4]
    axes.set_yticks([rows.middle(worker, _COMPUTE) for worker in named])
    axes.set_yticklabels([f"worker {worker}" for worker in named])
    ticks = {rows.middle(worker, lane): lane for worker in rows.of for lane in rows.lanes[1:]}
    size = min(6.5, rows.points(_PLACE[_UP][1]))
    if size >= _LEAST_TEXT:
        axes.set_yticks(list(ticks), list(ticks.values()), minor=True, fontsize=size, color=_QUIET)
    for centre, lane in ticks.items():
        half = _PLACE[lane][1] / 2
        axes.axhspan(centre - half, centre + half, color="#F1F1F1", linewidth=0, zorder=0)


def _title(report: Mapping[str, Any], title: str | None, unit: TimeUnit, rows: int) -> str:
    workers = int(_value(report, "workers"))
    step, bubble = float(_value(report, "step_time_s")), float(_value(report, "bubble_pct"))
    facts = (
        f"{plural(workers, 'worker')}, {plural(_value(report, 'microbatches'), 'microbatch')}, "
        f"step {unit.show(step)}, bubble {bubble:.1f} %"
        f"{idle_note(workers - rows, workers)}"
    )
    return f"{title}\n{facts}" if title else f"RoundPipe: {facts}"


@dataclass(frozen=True)
class _TimelineBlock:
    """One microbatch in one direction of one slot, with one number and one outline."""

    worker: int
    microbatch: int
    fill: str
    start_s: float
    end_s: float
    number_s: float
    """Where its number is: halfway through its computing, never in a pause or in what was recomputed ahead."""


def _blocks(events: Sequence[TimelineEvent]) -> list[_TimelineBlock]:
    groups: dict[tuple[int, int, int, bool], list[TimelineEvent]] = defaultdict(list)
    for event in events:
        if event.lane == _COMPUTE:
            groups[event.worker, event.slot, event.microbatch, event.kind == "forward"].append(event)
    return [
        _TimelineBlock(
            worker,
            microbatch,
            LEGEND[members[-1].label],
            *_extent(members),
            _halfway([event for event in members if event.label == members[-1].label]),
        )
        for (worker, _, microbatch, _), members in groups.items()
    ]


def _halfway(events: Sequence[TimelineEvent]) -> float:
    left = sum(event.end_s - event.start_s for event in events) / 2
    for event in sorted(events, key=lambda event: event.start_s):
        if left <= event.end_s - event.start_s:
            return event.start_s + left
        left -= event.end_s - event.start_s
    return events[-1].end_s


def _extent(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    return min(event.start_s for event in events), max(event.end_s for event in events)


def _draw_boxes(axes: Axes, events: Sequence[TimelineEvent], rows: _TimelineRows) -> None:
    """Draw one collection per kind: a step has thousands of events, too many for a patch each."""
    from matplotlib.collections import PolyCollection

    groups: dict[tuple[str, str], list[TimelineEvent]] = defaultdict(list)
    for event in events:
        groups[event.kind, event.label].append(event)
    for (kind, label), members in groups.items():
        order = 2 + list(_LANES).index(kind) / 10
        boxes = [rows.corners(event, event.lane) for event in members]
        edge = 0.0 if _LANES[kind] == _COMPUTE else _LEAST_COPY
        colour = LEGEND[label]
        axes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors=colour, linewidths=edge, zorder=order))
    outlines = [rows.corners(block, _COMPUTE) for block in _blocks(events)]
    axes.add_collection(PolyCollection(outlines, facecolors="none", edgecolors="white", linewidths=0.6, zorder=4))


def _write_numbers(axes: Axes, events: Sequence[TimelineEvent], points_per_s: float, rows: _TimelineRows) -> None:
    """Write the microbatch's number into each block that is wide enough, smaller where there is less room."""
    from matplotlib.patheffects import withStroke

    digits = len(str(max(event.microbatch for event in events)))  # of the widest: a half-numbered row looks broken
    highest = min(8.5, 0.8 * rows.points(_PLACE[_COMPUTE][1]))
    for block in _blocks(events):
        size = min(highest, (points_per_s * (block.end_s - block.start_s) - 2.0) / (0.65 * digits))
        if block.microbatch < 0 or size < _LEAST_TEXT:
            continue
        dark = block.fill in (_FUSED, _BACKWARD)
        axes.text(
            block.number_s,
            rows.middle(block.worker, _COMPUTE),
            str(block.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white" if dark else "black",
            # The stroke keeps the number legible where recomputation stripes a backward block.
            path_effects=[withStroke(linewidth=1.8, foreground=block.fill)],
            zorder=5,
        )


def _write_stages(
    axes: Axes, events: Sequence[TimelineEvent], names: Mapping[int, str], points_per_s: float, rows: _TimelineRows
) -> None:
    """Draw a line above each slot from its first to its last block, with the stage's name where there is room."""
    slots: dict[tuple[int, int], list[TimelineEvent]] = defaultdict(list)
    for event in events:
        if event.lane == _COMPUTE and event.slot in names:
            slots[event.worker, event.slot].append(event)
    size = min(7.5, 0.52 * rows.points(_NAMES))
    inset = 1.0 / points_per_s  # a point at each end, so that the lines of neighbouring slots do not touch
    for (worker, slot), members in slots.items():
        start, end = _extent(members)
        top = rows.top(worker)
        axes.plot([start + inset, max(end - inset, start + inset)], [top - 0.03] * 2, color=_QUIET, linewidth=0.7)
        if size < _LEAST_TEXT or points_per_s * (end - start) <= 0.6 * size * len(names[slot]):
            continue
        axes.text((start + end) / 2, top - 0.05, names[slot], ha="center", va="bottom", fontsize=size, color=_QUIET)
