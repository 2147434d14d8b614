"""A sweep as a picture: step time and memory against the number of microbatches, a line for each way to set the rest.

Numbers of microbatches are those that the runs really had, so that sweeps over their size and over their number look
alike. In a sweep that leaves them alone, the first setting that it varies takes their place. Runs that failed are named
below: that a point is missing does not say why.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_PANELS = (
    ("step_time_s", "step time"),
    ("peak_device_gib", "device memory, peak"),
    ("peak_host_gib", "host memory, peak"),
)
_MICROBATCHES = "microbatches"
_CUTS = {"strategy.num_microbatches", "strategy.microbatch_size"}
"""Settings that are the number of microbatches in other words."""

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_WIDTH, _PANEL, _NOTE, _LABEL = 7.0, 2.2, 0.14, 0.22
_DPI = 130
_LEGEND = 84
"""Characters of the legend's font that fit beside each other."""
_NOTE_WIDTH, _NOTE_LINES, _MOST_NOTES = 112, 2, 6

Row = dict[str, Any]


def draw_sweep(rows: Sequence[Row], varied: Sequence[str], path: Path) -> bool:
    """Writes the picture to ``path``, whose suffix says of which kind; False if no run has finished."""
    if (figure := figure_of(rows, varied)) is None:
        return False
    figure.savefig(path, dpi=_DPI)
    return True


def figure_of(rows: Sequence[Row], varied: Sequence[str]) -> Figure | None:
    """The picture of a sweep. None if no run has finished.

    Args:
        rows: the runs, as ``sweep.read_runs`` makes them.
        varied: settings in which they differ.
    """
    finished = [row for row in rows if not row["error"] and row["step_time_s"] is not None]
    if not finished:
        return None
    along = _along(finished, varied)
    lines = _lines(finished, [key for key in varied if key != along and not (along == _MICROBATCHES and key in _CUTS)])
    values = sorted({_place(row.get(along, "default")) for row in finished}, key=_order)
    panels = [panel for panel in _PANELS if any(row[panel[0]] is not None for row in finished)]
    notes = _notes([row for row in rows if row["error"]], varied)
    legend = -(-len(lines) // _columns(lines)) * _LABEL if len(lines) > 1 else 0
    note_lines = sum(note.count("\n") + 1 for note in notes)
    height = _PANEL * len(panels) + 0.4 + legend + _NOTE * (note_lines + 1)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for number, (key, heading) in enumerate(panels):
        _panel(axes[number], key, heading, lines, along, values)
    axes[-1].set_xticks(range(len(values)), [str(value) for value in values])
    axes[-1].set_xlim(-0.3, len(values) - 0.7)
    axes[-1].set_xlabel(along if along == _MICROBATCHES else _short(along))
    if len(lines) > 1:
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=_columns(lines), frameon=False
        )
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=7.5, color="#B22222", x=0.02, ha="left")
    return figure


def _columns(labels: Iterable[str]) -> int:
    """Of the legend: as many as fit beside each other."""
    each = max(map(len, labels)) + 6  # line and marker take the place of so many characters
    return min(len(list(labels)), max(_LEGEND // each, 1), 3)


def _along(finished: Sequence[Row], varied: Sequence[str]) -> str:
    """What the horizontal axis shows."""
    counts = {row[_MICROBATCHES] for row in finished}
    others = [key for key in varied if key not in _CUTS]
    return others[0] if others and (len(counts) == 1 or None in counts) else _MICROBATCHES


def _lines(finished: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """The runs by what is said of them in the legend."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in finished:
        lines[", ".join(f"{_short(key)} {row.get(key, 'default')}" for key in keys)].append(row)
    return lines


def _panel(axes: Axes, key: str, heading: str, lines: dict[str, list[Row]], along: str, values: list[Any]) -> None:
    largest = max(row[key] or 0 for rows in lines.values() for row in rows)
    factor, unit = (1, "s") if key.endswith("_s") else (1, "GiB") if largest >= 1 else (1024, "MiB")
    if unit == "s" and largest < 1:
        factor, unit = 1000, "ms"
    line = "" if any(isinstance(value, str) for value in values) else "-"  # nothing lies between two models
    for number, (label, rows) in enumerate(lines.items()):
        points = [
            (values.index(_place(row.get(along, "default"))), row[key] * factor) for row in rows if row[key] is not None
        ]
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker + line, color=colour, label=label, markersize=5)
    axes.set_title(f"{heading} ({unit})", loc="left", fontsize=9)
    axes.set_ylim(0, 1.12 * largest * factor or 1)
    axes.grid(axis="y", color="#E5E5E5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _notes(failed: Sequence[Row], varied: Sequence[str]) -> list[str]:
    notes = []
    for row in failed:
        settings = ", ".join(f"{_short(key)} {row[key]}" for key in varied if row.get(key) is not None)
        note = f"run {row['run']} ({settings}) failed: {row['error']}"
        notes.append(textwrap.fill(note, _NOTE_WIDTH, max_lines=_NOTE_LINES, placeholder=" …", subsequent_indent="   "))
    return [*notes[:_MOST_NOTES], *([f"and {len(notes) - _MOST_NOTES} more"] if len(notes) > _MOST_NOTES else [])]


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def _place(value: Any) -> Any:
    """Numbers that come as text, as numbers."""
    try:
        return float(value) if not float(value).is_integer() else int(float(value))
    except (TypeError, ValueError):
        return str(value)


def _order(value: Any) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, float(value), "")
