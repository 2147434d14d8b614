"""Gantt charts of simulated schedules: as a picture for a paper, and as a trace to walk around in.

`timeline` shows a step that ran, with its copies; this shows schedules beside each other, so it is denser: a worker is
one row, a block is one stage for one microbatch and carries its number where there is room. Every second stage of a
worker is paler, so that one sees where a stage ends. Charts of one group share the scale of their time axes, or a long
schedule would look as short as a short one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import Collection, PathCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D

# Okabe and Ito's colours, which stay apart for colour-blind readers and in greyscale print.
COLOURS = {
    "forward": "#56B4E9",
    "recompute": "#F0D442",
    "backward": "#009E73",
    "head forward": "#E6BBD3",
    "head backward": "#CC79A7",
}
"""Per kind of work; the legend has those that occur, in this order."""

WAITS = {"waits for weights": "#D9D2C5", "waits for the optimizer": "#F2C6A8"}
"""Per reason why a worker is idle, where it is known; below the kinds of work, and paler than they are."""

_LEGEND = {"head forward": "LM head forward", "head backward": "LM head backward"}
_IDLE, _QUIET = "#EFEFEF", "#555555"

# Inches, unless something else is said.
_WIDTH, _LEFT, _RIGHT = 12.0, 0.85, 0.2
_TITLE, _AXIS, _FOOT = 0.34, 0.26, 0.62
_ROW_POINTS = (5.0, 16.0)  # thinnest and thickest row; between them a chart is two inches high
_CHART = 2.0
_TEXT_POINTS = (4.5, 8.5)
_DPI, _MOST_PIXELS = 160, 60_000
_LEAST_DPI = 80


@dataclass(frozen=True)
class Block:
    """One stage for one microbatch on one worker.

    Args:
        worker: the row.
        microbatch: the number in the block.
        stage: its name, for the trace.
        turn: which of its worker's stages it is, counted from 0; odd ones are paler.
        start_ms: its beginning.
        parts: kinds (of `COLOURS`) and milliseconds of what it consists of, in order.
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
class Idle:
    """A worker waits for one of `WAITS`."""

    worker: int
    why: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Chart:
    """One schedule: its title in bold, its facts beside it, and the charts that it is to be compared with."""

    title: str
    facts: str
    group: str
    workers: int
    span_ms: float
    blocks: Sequence[Block]
    waits: Sequence[Idle] = ()


# -- the picture -----------------------------------------------------------------------------------------------------


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """Draws the charts below each other; the ending of ``path`` says as what (png, pdf, svg). Its folder must exist.

    Raises:
        ValueError: there are more than a picture can hold.
    """
    rows = [_row_height(chart.workers) * chart.workers for chart in charts]
    height = sum(rows) + len(charts) * (_TITLE + _AXIS) + _FOOT
    dpi = min(_DPI, int(_MOST_PIXELS / height))
    if dpi < _LEAST_DPI:
        raise ValueError(f"{len(charts)} cases do not fit into one picture: draw fewer at a time.")
    figure = Figure(figsize=(_WIDTH, height), dpi=dpi)
    spans: dict[str, float] = defaultdict(float)
    for chart in charts:
        spans[chart.group] = max(spans[chart.group], chart.span_ms)
    in_seconds = max(spans.values()) >= 10_000
    top = height
    for chart, row in zip(charts, rows, strict=True):
        top -= _TITLE + row
        box = (_LEFT / _WIDTH, top / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, row / height)
        _draw(figure, figure.add_axes(box), chart, spans[chart.group] or 1.0, in_seconds)
        top -= _AXIS
    unit = "seconds" if in_seconds else "milliseconds"
    foot = f"time in {unit}; every second stage of a worker is paler"
    figure.text(_LEFT / _WIDTH, 0.2 * _FOOT / height, foot, fontsize=9, color=_QUIET)
    present = {kind for chart in charts for block in chart.blocks for kind, _ in block.parts}
    _add_legend(figure, present | {wait.why for chart in charts for wait in chart.waits})
    figure.savefig(path)  # no backend of the user's program is involved


def _add_legend(figure: Figure, present: Set[str]) -> None:
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


def _row_height(workers: int) -> float:
    thinnest, thickest = _ROW_POINTS
    return min(max(72 * _CHART / workers, thinnest), thickest) / 72


def _draw(figure: Figure, axes: Axes, chart: Chart, span_ms: float, in_seconds: bool) -> None:
    _set_axes(axes, chart, span_ms, in_seconds)
    for why, shade in WAITS.items():
        idle = [_corners(wait.worker, wait.start_ms, wait.end_ms) for wait in chart.waits if wait.why == why]
        _add(axes, PolyCollection(idle, facecolors=shade, linewidths=0, zorder=1.5))
    points_per_ms = 72 * (_WIDTH - _LEFT - _RIGHT) / span_ms
    groups: dict[tuple[str, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for block in chart.blocks:
        for kind, begin, end in _spread(block):
            groups[kind, block.turn % 2].append(_corners(block.worker, begin, end))
    for (kind, pale), boxes in groups.items():  # one collection a kind: there are too many boxes for a patch each
        colour = _tint(COLOURS[kind], 0.35 * pale)
        _add(axes, PolyCollection(boxes, facecolors=colour, linewidths=0, zorder=2))
    shown = [block for block in chart.blocks if block.parts]
    if not shown:
        return
    # Outlines take at most an eighth of a block, or narrow blocks would be all outline.
    outlined = [block for block in shown if points_per_ms * (block.end_ms - block.start_ms) > 1.5]
    widths = [min(0.7, points_per_ms * (block.end_ms - block.start_ms) / 8) for block in outlined]
    outlines = [_corners(block.worker, block.start_ms, block.end_ms) for block in outlined]
    _add(axes, PolyCollection(outlines, facecolors="none", edgecolors="white", linewidths=widths, zorder=3))
    _write_numbers(figure, axes, shown, points_per_ms, 72 * _row_height(chart.workers))


def _set_axes(axes: Axes, chart: Chart, span_ms: float, in_seconds: bool) -> None:
    axes.set_xlim(0, span_ms)
    axes.set_ylim(chart.workers, 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms / 1e3 if in_seconds else ms:,.10g}"))
    axes.tick_params(axis="x", labelsize=7.5, color=_QUIET, labelcolor=_QUIET, length=2.5, pad=2)
    axes.tick_params(axis="y", length=0, labelsize=min(7.5, 66 * _row_height(chart.workers)), pad=3)
    step = 1 if chart.workers <= 16 else 4
    axes.set_yticks([worker + 0.5 for worker in range(0, chart.workers, step)])
    axes.set_yticklabels([f"worker {worker}" for worker in range(0, chart.workers, step)])
    rows = [_corners(worker, 0, chart.span_ms) for worker in range(chart.workers)]
    _add(axes, PolyCollection(rows, facecolors=_IDLE, linewidths=0, zorder=1))
    heading = axes.annotate(
        chart.title, (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points", fontweight="bold"
    )
    heading.set_parse_math(False)  # a "$" in a model's name is a "$"
    axes.annotate(f"   {chart.facts}", (1, 0), xycoords=heading, va="bottom", fontsize=9, color=_QUIET)


def _add(axes: Axes, collection: Collection) -> None:
    axes.add_collection(collection, autolim=False)  # the limits are set, and finding them takes as long as drawing


def _spread(block: Block) -> Iterator[tuple[str, float, float]]:
    """Each part of the block with its begin and end."""
    ends = accumulate((length for _, length in block.parts), initial=block.start_ms)
    for (kind, _), (begin, end) in zip(block.parts, pairwise(ends), strict=True):
        yield kind, begin, end


def _corners(worker: int, begin: float, end: float) -> list[tuple[float, float]]:
    top, bottom = worker + 0.06, worker + 0.94
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _tint(colour: str, share_of_white: float) -> tuple[float, float, float]:
    red, green, blue = (value + share_of_white * (1 - value) for value in to_rgb(colour))
    return red, green, blue


def _write_numbers(
    figure: Figure, axes: Axes, blocks: Sequence[Block], points_per_ms: float, row_points: float
) -> None:
    """The microbatch's number into each block that has room for it; as outlines, since texts would take minutes."""
    smallest, largest = _TEXT_POINTS
    digits = len(str(max(block.microbatch for block in blocks)))
    paths, places = [], []
    for block in blocks:
        room = points_per_ms * (block.end_ms - block.start_ms) - 1.5
        size = round(min(largest, 0.72 * row_points, room / (0.64 * digits)), 1)
        if size < smallest:
            continue
        paths.append(_centred(str(block.microbatch), size))
        places.append(((block.start_ms + block.end_ms) / 2, block.worker + 0.5))
    numbers = PathCollection(paths, offsets=places, offset_transform=axes.transData, facecolors="black", linewidths=0)
    numbers.set_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)  # from points
    numbers.set_zorder(4)
    _add(axes, numbers)


@cache
def _centred(text: str, size: float) -> Outline:
    outline = TextPath((0, 0), text, size=size, prop=FontProperties())
    box = outline.get_extents()
    return Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).transform_path(outline)


# -- the trace -------------------------------------------------------------------------------------------------------


def write_charts_trace(charts: Sequence[Chart], path: Path) -> None:
    """Writes a Chrome trace, which https://ui.perfetto.dev opens: a process for each chart, a thread for a worker."""
    records: list[dict[str, Any]] = []
    for number, chart in enumerate(charts):
        # Perfetto reads process 0 as the idle process of the kernel.
        process = number + 1
        name = f"{chart.title}: {chart.facts}"
        records.append(_metadata("process_name", process, 0, name=name))
        records.append(_metadata("process_sort_index", process, 0, sort_index=number))
        for worker in range(chart.workers):
            records.append(_metadata("thread_name", process, worker + 1, name=f"worker {worker}"))
            records.append(_metadata("thread_sort_index", process, worker + 1, sort_index=worker))
        for block in chart.blocks:
            records.extend(_records(process, block))
        for wait in chart.waits:
            records.append(_span(wait.why, process, wait.worker, wait.start_ms, wait.end_ms))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": records}))


def _metadata(what: str, process: int, thread: int, **details: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": details}


def _records(process: int, block: Block) -> Iterator[dict[str, Any]]:
    """The block and, if it has several, its parts within it."""
    if not block.parts:
        return
    spans = [(f"{block.stage} m{block.microbatch}", block.start_ms, block.end_ms)]
    if len(block.parts) > 1:
        spans.extend(_spread(block))
    for name, begin_ms, end_ms in spans:
        args = {"stage": block.stage, "microbatch": block.microbatch}
        yield _span(name, process, block.worker, begin_ms, end_ms) | {"args": args}


def _span(name: str, process: int, worker: int, begin_ms: float, end_ms: float) -> dict[str, Any]:
    # Whole nanoseconds, or parts would stick out of their block by a rounding error.
    begin, end = round(begin_ms * 1e6), round(end_ms * 1e6)
    return {"name": name, "ph": "X", "pid": process, "tid": worker + 1, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
