"""Draws steps below each other, with a row for each worker: what it computes, and what its links carry.

A step that ran and a simulated one have the form of a report, so a reader who knows one picture knows the other.
matplotlib is imported inside functions, so programs that draw nothing do not load it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_roundpipe.engine.events import COMPUTE, UPLOADS
from lightning_roundpipe.messages import plural, seconds

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
    "copies of weights": "#8C6BB1",
    "copies of activations": "#8A8A8A",
    "copies of gradients": "#D55E00",
    "idle": "#EFEFEF",
}
_QUIET = "#555555"
_WIDTH = 12.0
_ROW = 0.65
"""Inches of a worker's row."""
_LANES = {"compute": (0.24, 0.7), "up": (0.74, 0.83), "down": (0.87, 0.96)}
"""Top and bottom of each lane within a row. Names of stages stand above the first one."""


class Bar(NamedTuple):
    """An event of a report in a picture, in seconds."""

    worker: int
    lane: str
    kind: str
    slot: int
    microbatch: int
    start_s: float
    end_s: float


def draw_steps(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw reports of steps below each other to ``path``, each under its title, on one scale.

    Every second slot of a worker is paler. A number is that of a microbatch.

    Args:
        reports: by title, what ``RoundPipeStrategy.report()`` or `planned.report_of` returns.
        path: the file to write; its suffix is the format (png, pdf, svg).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = {title: bars_of(report) for title, report in reports.items()}
    rows = {title: sorted({bar.worker for bar in drawn if bar.lane == "compute"}) for title, drawn in bars.items()}
    room = max(MOST_PIXELS / DPI - 0.6 - 0.7 * len(reports), 1.0)
    height = min(_ROW, room / sum(map(len, rows.values())))
    heights = [len(workers) * height for workers in rows.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.7 * len(reports) + 0.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(reports), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    begin_s = min(bar.start_s for drawn in bars.values() for bar in drawn)
    end_s = max(bar.end_s for drawn in bars.values() for bar in drawn)
    scale, unit = (1.0, "s") if end_s >= 1 else (1e3, "ms")
    for axes, (title, report) in zip(panels, reports.items(), strict=True):
        axes.set_xlim(scale * begin_s, scale * end_s)
        _draw(axes, bars[title], rows[title], stage_names(report), scale, 72 * height)
        heading = axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        heading.set_parse_math(False)  # "$" in a model's name does not begin a formula
        axes.annotate(f"  {_facts(report)}", (1, 0), xycoords=heading, va="bottom", fontsize=9, color=_QUIET)
    panels[-1].set_xlabel(f"time ({unit}); every second stage of a worker is paler", color=_QUIET, fontsize=9)
    kinds = {bar.kind for drawn in bars.values() for bar in drawn} | {"idle"}
    figure.legend(
        handles=[Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds],
        loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9, handlelength=1.2,
    )  # fmt: skip
    save(figure, path)


def bars_of(report: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of a report, without what was uploaded before its first computation.

    Raises:
        ValueError: no training step has finished yet.
    """
    events = report.get("events")
    if not events:
        raise ValueError("The report has no events, as no training step has finished yet: call fit() first.")
    bars = []
    for event in events:
        kind, lane = event["kind"], "compute"
        if kind not in COMPUTE:
            kind, lane = f"copies of {kind.rpartition('_')[2]}", "up" if kind in UPLOADS else "down"
        bars.append(
            Bar(event["worker"], lane, kind, event["slot"], event["microbatch"], event["start_s"], event["end_s"])
        )
    begin_s = min([0.0, *(bar.start_s for bar in bars if bar.lane == "compute")])
    return [bar._replace(start_s=max(bar.start_s, begin_s)) for bar in bars if bar.end_s >= begin_s]


def stage_names(report: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each slot's stage: ``F1``, ``F2``, …, ``fused``, ``B1``, …; empty without slots."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    names = {}
    for slot in sorted(report.get("slots", ()), key=lambda slot: int(slot["slot"])):
        counts[slot["round"], slot["phase"]] += 1
        letter = {"forward": "F", "backward": "B"}.get(slot["phase"])
        if letter or slot["phase"] == "fused":
            names[slot["slot"]] = f"{letter}{counts[slot['round'], slot['phase']]}" if letter else "fused"
    return names


def _facts(report: Mapping[str, Any]) -> str:
    of = f"{plural(report['microbatches'], 'microbatch')} on {plural(report['workers'], 'worker')}"
    return f"{seconds(report['step_time_s'])} a step, {of}, bubble {report['bubble_pct']:.1f} %"


def _draw(
    axes: Axes, bars: Sequence[Bar], workers: Sequence[int], names: Mapping[int, str], scale: float, row_points: float
) -> None:
    """Draw a report. ``scale``: units of the axis in a second; ``row_points``: height of a row."""
    begin, end = axes.get_xlim()
    points = 72 * 0.9 * _WIDTH * scale / (end - begin)
    """Of a second along the axis."""
    turns: dict[int, dict[int, int]] = defaultdict(dict)
    boxes: dict[tuple[int, str, str, bool], list[tuple[float, float]]] = defaultdict(list)
    blocks: dict[tuple[int, int, int, bool], list[Bar]] = defaultdict(list)
    """Computation of a slot for one microbatch in one direction."""
    for bar in bars:
        if bar.worker not in workers:
            continue
        turn = turns[bar.worker].setdefault(bar.slot, len(turns[bar.worker])) if bar.lane == "compute" else 0
        span = scale * bar.start_s, scale * (bar.end_s - bar.start_s)
        boxes[workers.index(bar.worker), bar.lane, bar.kind, bool(turn % 2)].append(span)
        if bar.lane == "compute":
            blocks[bar.worker, bar.slot, bar.microbatch, bar.kind == "forward"].append(bar)
    for row in range(len(workers)):
        for top, bottom in _LANES.values():
            axes.broken_barh([(begin, end - begin)], (row + top, bottom - top), facecolors=COLOURS["idle"])
    for (row, lane, kind, pale), spans in boxes.items():
        top, bottom = _LANES[lane]
        axes.broken_barh(
            spans, (row + top, bottom - top), facecolors=COLOURS[kind], alpha=0.6 if pale else None, linewidths=0
        )
    top, bottom = _LANES["compute"]
    stages: dict[tuple[int, int], list[float]] = defaultdict(list)
    outlines: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (worker, slot, microbatch, _), block in blocks.items():
        row, start_s, end_s = workers.index(worker), block[0].start_s, max(bar.end_s for bar in block)
        stages[row, slot] += [start_s, end_s]
        outlines[row].append((scale * start_s, scale * (end_s - start_s)))
        longest = max(block, key=lambda bar: bar.end_s - bar.start_s)
        width = (points * (longest.end_s - longest.start_s) - 1.5) / (0.65 * len(str(microbatch)))
        if (size := min(8.5, 0.7 * (bottom - top) * row_points, width)) >= 4.5:
            axes.text(
                scale * (longest.start_s + longest.end_s) / 2, row + (top + bottom) / 2, str(microbatch),
                fontsize=size, ha="center", va="center_baseline",
            )  # fmt: skip
    for row, spans in outlines.items():
        # An outline takes at most an eighth of a block: a narrow block would be all outline otherwise.
        widths = [min(0.8, points / scale * length / 8) for _, length in spans]
        axes.broken_barh(
            spans, (row + top, bottom - top), facecolors="none", edgecolors="white", linewidths=widths, zorder=3
        )
    for (row, slot), edges in stages.items():
        name, (start_s, end_s) = names.get(slot, ""), (min(edges), max(edges))
        if row_points > 20 and points * (end_s - start_s) > 5 * len(name):
            axes.plot([scale * start_s, scale * end_s], [row + top - 0.03] * 2, color=_QUIET, linewidth=0.7)
            axes.text(
                scale * (start_s + end_s) / 2, row + top - 0.03, name,
                fontsize=7, color=_QUIET, ha="center", va="bottom",
            )  # fmt: skip
    axes.set_ylim(len(workers), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="both", labelsize=8, color=_QUIET, labelcolor=_QUIET)
    axes.tick_params(axis="y", length=0)
    every = -(-9 // max(1, int(row_points)))  # a label is as high as this many rows
    axes.set_yticks(
        [row + (top + bottom) / 2 for row in range(0, len(workers), every)],
        [f"worker {worker}" for worker in workers[::every]],
    )


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of ``path``'s suffix (png, pdf, svg; PNG without one).

    No side is longer than `MOST_PIXELS`. Uses no matplotlib backend of the user's program.
    """
    fitting = min(DPI, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(path, format=None if path.suffix else "png", dpi=fitting)
