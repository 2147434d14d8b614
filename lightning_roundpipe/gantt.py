"""Gantt charts of simulated schedules: as a picture for a paper, and as a Chrome trace.

`timeline` shows a step that ran, with its copies. This module shows several schedules below each other, so it is
denser: a worker is one row, and a block is one stage for one microbatch, with the microbatch's number where there is
room. Every second stage of a worker is paler, to show where stages end. Charts of one group share the scale of their
time axes. Workers without a stage have no row.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
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
    from matplotlib.collections import Collection
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

# Okabe and Ito's colours, which colour-blind readers and greyscale prints can tell apart.
COLOURS = {
    "forward": "#56B4E9",
    "recompute": "#F0D442",
    "backward": "#009E73",
    "head forward": "#E6BBD3",
    "head backward": "#CC79A7",
}
"""Colour per kind of work. The legend lists those that occur, in this order."""

WAITS = {"waits for weights": "#B5A88F", "waits for the optimizer": "#E9A178"}
"""Colour per reason why a worker is idle."""

_LEGEND = {"head forward": "LM head forward", "head backward": "LM head backward"}
_IDLE, _QUIET = "#EFEFEF", "#555555"

# In inches, unless the name says otherwise.
_WIDTH, _LEFT, _RIGHT = 12.0, 0.85, 0.2
_TITLE, _AXIS, _FOOT = 0.34, 0.26, 0.62
_ROW_POINTS = (5.0, 16.0)  # thinnest and thickest row; between these, a chart is two inches high
_CHART = 2.0
_CROWDED_POINTS = (3.0, 1.0)
"""Rows of a full picture: the thinnest before the resolution decreases, and the thinnest of all."""
_TEXT_POINTS = (4.5, 8.5)
_LABEL_POINTS = 7.5
_SECONDS_FROM = 10.0
"""Simulated times below this are shown in milliseconds, as in the commands' tables."""


@dataclass(frozen=True)
class Block:
    """One stage for one microbatch on one worker.

    Args:
        worker: the row.
        microbatch: the number in the block.
        stage: its name, for the trace.
        turn: the number of the stage on its worker, from 0. Odd ones are paler.
        start_ms: when the block begins.
        parts: kinds (of `COLOURS`) and durations, in milliseconds, of its parts in order.
    """

    worker: int
    microbatch: int
    stage: str
    turn: int
    start_ms: float
    parts: tuple[tuple[str, float], ...]

    @property
    def end_ms(self) -> float:
        return self.start_ms + sum(length for _, length in self.parts)


@dataclass(frozen=True)
class IdleBlock:
    """A span in which a worker waits for one of `WAITS`."""

    worker: int
    why: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Chart:
    """One schedule.

    Args:
        title: printed in bold.
        step_ms: step time, shown beside the title in the picture's unit.
        facts: text after the step time.
        group: charts of one group share the scale of their time axes.
        workers: how many workers there are.
        span_ms: the end of the last block.
        blocks: what the workers compute.
        waits: why they are idle.
    """

    title: str
    step_ms: float
    facts: str
    group: str
    workers: int
    span_ms: float
    blocks: Sequence[Block]
    waits: Sequence[IdleBlock] = ()

    @cached_property
    def rows(self) -> dict[int, int]:
        """The row number of each worker that has a stage."""
        working = sorted({block.worker for block in self.blocks if block.parts})
        return {worker: row for row, worker in enumerate(working or range(self.workers))}

    def described(self, unit: TimeUnit) -> str:
        """Return the text beside the title."""
        return f"{unit.show(self.step_ms / 1e3)}{self.facts}{idle_note(self.workers - len(self.rows), self.workers)}"


def write_charts(charts: Sequence[Chart], picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of the charts, unless their paths are None."""
    if picture:
        draw_charts(charts, picture)
    if trace:
        write_charts_trace(charts, trace)


# -- the picture -----------------------------------------------------------------------------------------------------


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts below each other to ``path``, whose folder must exist. Its suffix is the format (png, pdf, svg).

    Raises:
        ValueError: the charts do not fit into one picture.
    """
    from matplotlib.figure import Figure

    heights = _row_heights(charts)
    rows = [height * len(chart.rows) for chart, height in zip(charts, heights, strict=True)]
    height = sum(rows) + _room_around(charts)
    figure = Figure(figsize=(_WIDTH, height), dpi=DPI)
    spans: dict[str, float] = defaultdict(float)
    for chart in charts:
        spans[chart.group] = max(spans[chart.group], chart.span_ms)
    unit = TimeUnit.of(max(spans.values()) / 1e3, _SECONDS_FROM)
    top = height
    for chart, row in zip(charts, rows, strict=True):
        top -= _TITLE + row
        box = (_LEFT / _WIDTH, top / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, row / height)
        _draw(figure, figure.add_axes(box), chart, spans[chart.group] or 1.0, unit, row / len(chart.rows))
        top -= _AXIS
    foot = f"time in {unit.in_words}; every second stage of a worker is paler"
    figure.text(_LEFT / _WIDTH, 0.2 * _FOOT / height, foot, fontsize=9, color=_QUIET)
    present = {kind for chart in charts for block in chart.blocks for kind, _ in block.parts}
    _add_legend(figure, present | {wait.why for chart in charts for wait in chart.waits})
    save(figure, path)


def _room_around(charts: Sequence[Chart]) -> float:
    """Return how many inches of a picture are not rows."""
    return len(charts) * (_TITLE + _AXIS) + _FOOT


def _row_heights(charts: Sequence[Chart]) -> list[float]:
    """Return the height of a row of each chart in inches, reduced where the charts would not fit into one picture.

    Raises:
        ValueError: they do not fit with the thinnest rows.
    """
    thinnest, thickest = (points / 72 for points in _ROW_POINTS)
    usual = [min(max(_CHART / len(chart.rows), thinnest), thickest) for chart in charts]
    total = sum(height * len(chart.rows) for chart, height in zip(charts, usual, strict=True))
    crowded, least = (points / 72 for points in _CROWDED_POINTS)
    full = (MOST_PIXELS / DPI - _room_around(charts)) / total
    heights = [height if full >= 1 else max(height * full, min(height, crowded)) for height in usual]
    needed = sum(height * len(chart.rows) for chart, height in zip(charts, heights, strict=True))
    largest = min((MOST_INCHES - _room_around(charts)) / needed, 1.0)
    if largest * min(heights) < least:
        workers = plural(max(chart.workers for chart in charts), "worker")
        raise ValueError(f"{plural(len(charts), 'case')} of up to {workers} do not fit into one picture: draw fewer.")
    return [largest * height for height in heights]


def _add_legend(figure: Figure, present: Set[str]) -> None:
    from matplotlib.patches import Patch

    colours = {kind: colour for kind, colour in (COLOURS | WAITS).items() if kind in present}
    kinds = {_LEGEND.get(kind, kind): colour for kind, colour in colours.items()} | {"idle": _IDLE}
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in kinds.items()],
        loc="lower right",
        bbox_to_anchor=(1 - _RIGHT / _WIDTH, 0.45 * _FOOT / figure.get_figheight()),
        borderaxespad=0,
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _draw(figure: Figure, axes: Axes, chart: Chart, span_ms: float, unit: TimeUnit, row: float) -> None:
    from matplotlib.collections import PolyCollection

    _set_axes(axes, chart, span_ms, unit, row)
    for why, shade in WAITS.items():
        waits = [wait for wait in chart.waits if wait.why == why and wait.worker in chart.rows]
        idle = [_corners(chart.rows[wait.worker], wait.start_ms, wait.end_ms) for wait in waits]
        _add(axes, PolyCollection(idle, facecolors=shade, linewidths=0, zorder=1.5))
    points_per_ms = 72 * (_WIDTH - _LEFT - _RIGHT) / span_ms
    groups: dict[tuple[str, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for block in chart.blocks:
        for kind, begin, end in _spread(block):
            groups[kind, block.turn % 2].append(_corners(chart.rows[block.worker], begin, end))
    for (kind, pale), boxes in groups.items():  # one collection per kind: a patch per box would be too slow
        colour = _tint(COLOURS[kind], 0.35 * pale)
        _add(axes, PolyCollection(boxes, facecolors=colour, linewidths=0, zorder=2))
    shown = [block for block in chart.blocks if block.parts]
    if not shown:
        return
    # Outlines take at most an eighth of a block; a narrow block would be all outline otherwise.
    outlined = [block for block in shown if points_per_ms * (block.end_ms - block.start_ms) > 1.5]
    thick = min(0.7, 72 * row / 8)
    widths = [min(thick, points_per_ms * (block.end_ms - block.start_ms) / 8) for block in outlined]
    outlines = [_corners(chart.rows[block.worker], block.start_ms, block.end_ms) for block in outlined]
    _add(axes, PolyCollection(outlines, facecolors="none", edgecolors="white", linewidths=widths, zorder=3))
    _write_numbers(figure, axes, chart, shown, points_per_ms, 72 * row)


def _set_axes(axes: Axes, chart: Chart, span_ms: float, unit: TimeUnit, row: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, span_ms)
    axes.set_ylim(len(chart.rows), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
    set_time_axis(axes, TimeUnit(unit.name, 1e3 * unit.seconds))  # the axis' values are milliseconds
    axes.tick_params(axis="x", labelsize=_LABEL_POINTS, color=_QUIET, labelcolor=_QUIET, length=2.5, pad=2)
    axes.tick_params(axis="y", length=0, labelsize=_LABEL_POINTS, pad=3)
    step = 2 ** max(0, math.ceil(math.log2(_LABEL_POINTS / (72 * row))))  # a label is as high as this many rows
    named = list(chart.rows.items())[::step]
    axes.set_yticks([place + 0.5 for _, place in named])
    axes.set_yticklabels([f"worker {worker}" for worker, _ in named])
    rows = [_corners(place, 0, chart.span_ms) for place in chart.rows.values()]
    _add(axes, PolyCollection(rows, facecolors=_IDLE, linewidths=0, zorder=1))
    heading = axes.annotate(
        chart.title, (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points", fontweight="bold"
    )
    heading.set_parse_math(False)  # "$" in a model's name does not begin a formula
    axes.annotate(f"   {chart.described(unit)}", (1, 0), xycoords=heading, va="bottom", fontsize=9, color=_QUIET)


def _add(axes: Axes, collection: Collection) -> None:
    axes.add_collection(collection, autolim=False)  # the limits are set; computing them takes as long as drawing


def _spread(block: Block) -> Iterator[tuple[str, float, float]]:
    """Yield each part of the block with its begin and end."""
    ends = accumulate((length for _, length in block.parts), initial=block.start_ms)
    for (kind, _), (begin, end) in zip(block.parts, pairwise(ends), strict=True):
        yield kind, begin, end


def _corners(row: int, begin: float, end: float) -> list[tuple[float, float]]:
    top, bottom = row + 0.06, row + 0.94
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _tint(colour: str, share_of_white: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (value + share_of_white * (1 - value) for value in to_rgb(colour))
    return red, green, blue


def _write_numbers(
    figure: Figure, axes: Axes, chart: Chart, blocks: Sequence[Block], points_per_ms: float, row_points: float
) -> None:
    """Write its microbatch's number into each block that has room. Numbers are outlines: texts would take minutes."""
    from matplotlib.collections import PathCollection
    from matplotlib.transforms import Affine2D

    smallest, largest = _TEXT_POINTS
    digits = len(str(max(block.microbatch for block in blocks)))
    paths, places = [], []
    for block in blocks:
        room = points_per_ms * (block.end_ms - block.start_ms) - 1.5
        size = round(min(largest, 0.72 * row_points, room / (0.64 * digits)), 1)
        if size < smallest:
            continue
        paths.append(_centred(str(block.microbatch), size))
        places.append(((block.start_ms + block.end_ms) / 2, chart.rows[block.worker] + 0.5))
    if not paths:  # matplotlib before 3.11 cannot draw an empty collection
        return
    numbers = PathCollection(paths, offsets=places, offset_transform=axes.transData, facecolors="black", linewidths=0)
    numbers.set_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)  # from points
    numbers.set_zorder(4)
    _add(axes, numbers)


@cache
def _centred(text: str, size: float) -> Outline:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    outline = TextPath((0, 0), text, size=size, prop=FontProperties())
    box = outline.get_extents()
    return Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).transform_path(outline)


# -- the trace -------------------------------------------------------------------------------------------------------


def write_charts_trace(charts: Sequence[Chart], path: Path) -> None:
    """Write a Chrome trace for https://ui.perfetto.dev, with a process per chart and a thread per worker."""
    records: list[dict[str, Any]] = []
    for number, chart in enumerate(charts):
        # Perfetto reads process 0 as the idle process of the kernel.
        process = number + 1
        name = f"{chart.title}: {chart.described(TimeUnit('ms', 1e-3))}"
        records += trace_names("process", process, 0, name, number)
        for worker in range(chart.workers):
            records += trace_names("thread", process, worker + 1, f"worker {worker}", worker)
        for block in chart.blocks:
            records.extend(_records(process, block))
        for wait in chart.waits:
            records.append(_span(wait.why, process, wait.worker, wait.start_ms, wait.end_ms))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": records}))


def _records(process: int, block: Block) -> Iterator[dict[str, Any]]:
    """Yield the record of the block and, if it has several parts, theirs within it."""
    if not block.parts:
        return
    spans = [(f"{block.stage} m{block.microbatch}", block.start_ms, block.end_ms)]
    if len(block.parts) > 1:
        spans.extend(_spread(block))
    for name, begin_ms, end_ms in spans:
        args = {"stage": block.stage, "microbatch": block.microbatch}
        yield _span(name, process, block.worker, begin_ms, end_ms) | {"args": args}


def _span(name: str, process: int, worker: int, begin_ms: float, end_ms: float) -> dict[str, Any]:
    # Whole nanoseconds: rounding errors would make parts exceed their block.
    begin, end = round(begin_ms * 1e6), round(end_ms * 1e6)
    return {"name": name, "ph": "X", "pid": process, "tid": worker + 1, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
