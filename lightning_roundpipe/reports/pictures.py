"""Draws schedules: one or more charts below each other, with a row for each worker.

A step that ran (`timeline`) and simulated steps are drawn alike, so a reader who knows one picture knows the other. A
block is one stage for one microbatch, with the microbatch's number where there is room. Every second stage of a worker
is paler. A chart with copies has two lanes below each row of blocks: copies to the device, and back to the host.

matplotlib is imported inside functions, so programs that draw nothing do not load it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_roundpipe.messages import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
MOST_PIXELS = 4000
"""Most pixels of the longer side: browsers scale larger pictures down until they are illegible."""

# Okabe and Ito's colours, which colour-blind readers and greyscale prints can tell apart.
COLOURS = {
    "forward": "#56B4E9",
    "recompute": "#F0D442",
    "backward": "#009E73",
    "head forward": "#E6BBD3",
    "head backward": "#CC79A7",
}
"""Colour per kind of computation."""
COPIES = {"weights": "#8C6BB1", "activations": "#8A8A8A", "gradients": "#D55E00"}
"""Colour per kind of copy."""
WAITS = {"waits for weights": "#B5A88F", "waits for the optimizer": "#E9A178"}
"""Colour per reason why a worker is idle."""
PAUSE = ""
"""The kind of a part of a block in which nothing is computed."""
_IDLE, _QUIET = "#EFEFEF", "#555555"

_WIDTH = 12.0
_LANES = {"compute": (0.04, 0.96), "up": (0.74, 0.83), "down": (0.87, 0.96)}
"""Top and bottom of each lane within a row."""
_BELOW_NAMES, _ABOVE_COPIES = 0.24, 0.7
"""Top of the compute lane in charts with names of stages, and its bottom in charts with copies."""


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times in a picture: in titles and along axes."""

    name: str
    seconds: float

    @classmethod
    def of(cls, longest_s: float, seconds_from: float = 1.0) -> TimeUnit:
        """Return the unit for a picture whose longest time is ``longest_s``: seconds from ``seconds_from`` on."""
        return cls("s", 1.0) if longest_s >= seconds_from else cls("ms", 1e-3)

    def show(self, seconds: float) -> str:
        """Return a time with its unit, to four significant digits, but at least to whole units."""
        value = seconds / self.seconds
        digits = next((digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if abs(value) < limit), 0)
        return f"{value:,.{digits}f} {self.name}"


@dataclass(frozen=True)
class Block:
    """One stage for one microbatch on one worker.

    Args:
        worker: the row.
        microbatch: the number in the block.
        stage: its name.
        turn: the number of the stage on its worker, from 0. Odd ones are paler.
        start_ms: when the block begins.
        parts: kinds (of `COLOURS`, or `PAUSE`) and durations, in milliseconds, of its parts in order.
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

    def spread(self) -> list[tuple[str, float, float]]:
        """Return the kind, begin and end of each part."""
        ends = accumulate((length for _, length in self.parts), initial=self.start_ms)
        return [(kind, begin, end) for (kind, _), (begin, end) in zip(self.parts, pairwise(ends), strict=True)]


@dataclass(frozen=True)
class IdleBlock:
    """A span in which a worker waits for one of `WAITS`."""

    worker: int
    why: str
    start_ms: float
    end_ms: float


class CopySpan(NamedTuple):
    """A copy of one of `COPIES`, on the link ``"up"`` to a device or ``"down"`` from it."""

    worker: int
    kind: str
    way: str
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
        span_ms: the end of the axis.
        blocks: what the workers compute.
        waits: why they are idle.
        copies: what the links carry.
        begin_ms: the begin of the axis.
        named: whether the names of stages stand above them.
    """

    title: str
    step_ms: float
    facts: str
    group: str
    workers: int
    span_ms: float
    blocks: Sequence[Block]
    waits: Sequence[IdleBlock] = ()
    copies: Sequence[CopySpan] = ()
    begin_ms: float = 0.0
    named: bool = False

    @cached_property
    def rows(self) -> dict[int, int]:
        """The row of each worker that has a stage. The others have none."""
        working = sorted({block.worker for block in self.blocks if block.parts})
        return {worker: row for row, worker in enumerate(working or range(self.workers))}

    @property
    def lanes(self) -> dict[str, tuple[float, float]]:
        """Top and bottom of each lane within a row."""
        top, bottom = _LANES["compute"]
        compute = _BELOW_NAMES if self.named else top, _ABOVE_COPIES if self.copies else bottom
        return {**_LANES, "compute": compute} if self.copies else {"compute": compute}

    def described(self, unit: TimeUnit) -> str:
        """Return the text beside the title."""
        idle = self.workers - len(self.rows)
        left_out = f"; {idle:,} of {plural(self.workers, 'worker')} without a stage" if idle else ""
        return f"{unit.show(self.step_ms / 1e3)}{self.facts}{left_out}"


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts below each other to ``path``. Its suffix is the format (png, pdf, svg)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sum(len(chart.rows) for chart in charts)
    room = max(MOST_PIXELS / DPI - 0.6 - 0.7 * len(charts), 1.0)
    usual = [0.3 + 0.1 * chart.named + 0.25 * bool(chart.copies) for chart in charts]
    heights = [len(chart.rows) * min(height, room / rows) for chart, height in zip(charts, usual, strict=True)]
    unit = TimeUnit.of(max(chart.span_ms for chart in charts) / 1e3)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.7 * len(charts) + 0.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    groups = {chart.group: max(one.span_ms for one in charts if one.group == chart.group) for chart in charts}
    for axes, chart, height in zip(panels, charts, heights, strict=True):
        axes.set_xlim(chart.begin_ms / 1e3 / unit.seconds, (groups[chart.group] or 1.0) / 1e3 / unit.seconds)
        _draw(axes, chart, unit, 72 * height / len(chart.rows))
    panels[-1].set_xlabel(f"time ({unit.name}); every second stage of a worker is paler", color=_QUIET, fontsize=9)
    kinds = {kind for chart in charts for block in chart.blocks for kind, _ in block.parts}
    kinds |= {wait.why for chart in charts for wait in chart.waits}
    copied = {copy.kind for chart in charts for copy in chart.copies}
    colours = {kind: colour for kind, colour in (COLOURS | WAITS).items() if kind in kinds}
    colours |= {f"copies of {kind}": colour for kind, colour in COPIES.items() if kind in copied} | {"idle": _IDLE}
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in colours.items()],
        loc="outside lower center", ncols=len(colours), frameon=False, fontsize=9, handlelength=1.2,
    )  # fmt: skip
    save(figure, path)


def _draw(axes: Axes, chart: Chart, unit: TimeUnit, row_points: float) -> None:
    from matplotlib.collections import PolyCollection

    scale = 1e-3 / unit.seconds
    lanes = chart.lanes
    boxes: dict[tuple[str, bool, int], list[list[tuple[float, float]]]] = defaultdict(list)

    def box(worker: int, lane: str, begin_ms: float, end_ms: float) -> list[tuple[float, float]]:
        top, low = (chart.rows[worker] + edge for edge in lanes[lane])
        begin, end = begin_ms * scale, end_ms * scale
        return [(begin, top), (end, top), (end, low), (begin, low)]

    def add(
        colour: str, worker: int, lane: str, begin_ms: float, end_ms: float, pale: bool = False, z: int = 2
    ) -> None:
        if worker in chart.rows:
            boxes[colour, pale, z].append(box(worker, lane, begin_ms, end_ms))

    for worker in chart.rows:
        for lane in lanes:
            add(_IDLE, worker, lane, chart.begin_ms, chart.span_ms, z=0)
    for wait in chart.waits:
        add(WAITS[wait.why], wait.worker, "compute", wait.start_ms, wait.end_ms, z=1)
    for copy in chart.copies:
        add(COPIES[copy.kind], copy.worker, copy.way, copy.start_ms, copy.end_ms)
    for block in chart.blocks:
        for kind, begin, end in block.spread():
            if kind != PAUSE:
                add(COLOURS[kind], block.worker, "compute", begin, end, bool(block.turn % 2))
    for (colour, pale, z), corners in boxes.items():  # one collection per colour: a patch per box would be too slow
        edges = {"edgecolors": colour, "linewidths": 0.4} if colour in COPIES.values() else {"linewidths": 0}
        axes.add_collection(
            PolyCollection(corners, facecolors=colour, alpha=0.6 if pale else None, zorder=z, **edges), autolim=False
        )
    # Outlines take at most an eighth of a block: a narrow block would be all outline otherwise.
    begin, end = axes.get_xlim()
    points = 72 * 0.9 * _WIDTH * scale / (end - begin)
    blocks = [block for block in chart.blocks if block.parts]
    axes.add_collection(
        PolyCollection(
            [box(block.worker, "compute", block.start_ms, block.end_ms) for block in blocks],
            facecolors="none", edgecolors="white", zorder=3,
            linewidths=[min(0.8, points * (block.end_ms - block.start_ms) / 8) for block in blocks],
        ),
        autolim=False,
    )  # fmt: skip
    _write_numbers(axes, chart, scale, points, row_points)
    if chart.named and row_points > 20:
        _write_names(axes, chart, scale, points)
    axes.set_ylim(len(chart.rows), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8, color=_QUIET, labelcolor=_QUIET)
    axes.tick_params(axis="y", length=0, labelsize=8)
    every = -(-9 // max(1, int(row_points)))  # a label is as high as this many rows
    named = list(chart.rows.items())[::every]
    middle = sum(lanes["compute"]) / 2
    axes.set_yticks([row + middle for _, row in named], [f"worker {worker}" for worker, _ in named])
    heading = axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
    heading.set_parse_math(False)  # "$" in a model's name does not begin a formula
    axes.annotate(f"  {chart.described(unit)}", (1, 0), xycoords=heading, va="bottom", fontsize=9, color=_QUIET)


def _write_names(axes: Axes, chart: Chart, scale: float, points: float) -> None:
    """Write the name of each stage above its blocks, with a line as long as they take."""
    stages: dict[tuple[int, int, str], list[Block]] = defaultdict(list)
    for block in chart.blocks:
        stages[block.worker, block.turn, block.stage].append(block)
    for (worker, _, name), blocks in stages.items():
        start, end = min(block.start_ms for block in blocks), max(block.end_ms for block in blocks)
        top, inset = chart.rows[worker] + chart.lanes["compute"][0] - 0.03, min(1.0 / points, (end - start) / 4)
        axes.plot([(start + inset) * scale, (end - inset) * scale], [top, top], color=_QUIET, linewidth=0.7)
        if points * (end - start) > 5 * len(name):
            axes.text((start + end) / 2 * scale, top, name, fontsize=7, color=_QUIET, ha="center", va="bottom")


def _write_numbers(axes: Axes, chart: Chart, scale: float, points: float, row_points: float) -> None:
    """Write its microbatch's number into the longest part of each block that has room.

    ``points``: of a millisecond along the axis.
    """
    top, bottom = chart.lanes["compute"]
    digits = max((len(str(block.microbatch)) for block in chart.blocks), default=1)
    for block in chart.blocks:
        computed = [part for part in block.spread() if part[0] != PAUSE]
        if not computed or block.microbatch < 0:
            continue
        kind, start, stop = max(computed, key=lambda part: part[2] - part[1])
        dark = kind == "backward" and not block.turn % 2
        size = min(8.5, 0.7 * (bottom - top) * row_points, (points * (stop - start) - 1.5) / (0.65 * digits))
        if size >= 4.5:
            axes.text(
                (start + stop) / 2 * scale, chart.rows[block.worker] + (top + bottom) / 2, str(block.microbatch),
                fontsize=size, ha="center", va="center_baseline", color="white" if dark else "black",
            )  # fmt: skip


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write the figure in the format of ``path``'s suffix (png, pdf, svg; PNG without one).

    No side is longer than `MOST_PIXELS`. Uses no matplotlib backend of the user's program.
    """
    fitting = min(dpi, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(path, format=None if path.suffix else "png", dpi=fitting)


def setting_names(keys: Sequence[str]) -> dict[str, str]:
    """Return short names of settings for tables and pictures: the shortest end of each key that is unambiguous.

    A single letter is too little: ``lora r``, not ``r``.
    """
    found = shortest_endings(keys, lambda ending: len(ending) > 1)
    return {key: re.sub(r"[._]", " ", ending) for key, ending in found.items()}


def shortest_endings(names: Collection[str], suits: Callable[[str], bool]) -> dict[str, str]:
    """Return the shortest ending of each dotted name that ``suits`` allows and no other name has; else the name."""

    def endings(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[start:]) for start in reversed(range(len(parts)))]

    counts = Counter(ending for name in {*names} for ending in endings(name))
    return {name: next(e for e in endings(name) if e == name or (counts[e] == 1 and suits(e))) for name in names}
