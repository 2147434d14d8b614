"""A sweep as a picture: step time and memory against the number of microbatches, a line for each way to set the rest.

Numbers of microbatches are those that the runs really had, so that sweeps over their size and over their number look
alike. In a sweep that leaves them alone, the first setting that it varies takes their place. Numbers and sizes stand in
their order along the axis, whatever their units, and texts in that of the numbers in them. Runs that failed are named
below: that a point is missing does not say why.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.pictures import TimeUnit, save, setting_names

if TYPE_CHECKING:
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
_STYLES = [
    (colour, _MARKERS[(number + shift) % len(_MARKERS)])
    for shift in range(len(_MARKERS))
    for number, colour in enumerate(_COLOURS)
]
"""Of lines: as many as there are pairs, no two of which look alike."""
_WIDTH, _PANEL, _NOTE, _LABEL = 7.0, 2.2, 0.14, 0.22
_DPI = 130
_LEGEND = 84
"""Characters of the legend's font that fit beside each other."""
_TICKS = 78
"""Likewise below the axis, with a little space between labels."""
_NOTE_WIDTH, _NOTE_LINES, _MOST_NOTES = 112, 2, 6

_DEFAULT = "default"
_FIRST = (_DEFAULT, "None", "null", "False", "false", "True", "true")
_NUMBER, _TEXT = len(_FIRST), len(_FIRST) + 1

Row = dict[str, Any]
_Order = tuple[int, float, tuple[tuple[str, int], ...], str]


def draw_sweep(rows: Sequence[Row], varied: Sequence[str], path: Path) -> bool:
    """Writes the picture to ``path``, whose suffix says of which kind; False if no run has finished."""
    if (figure := figure_of(rows, varied)) is None:
        return False
    save(figure, path, _DPI)
    return True


def figure_of(rows: Sequence[Row], varied: Sequence[str]) -> Figure | None:
    """The picture of a sweep. None if no run has finished.

    Args:
        rows: the runs, as ``sweep.read_runs`` makes them.
        varied: settings in which they differ.
    """
    from matplotlib.figure import Figure

    finished = [row for row in rows if not row["error"] and row["step_time_s"] is not None]
    if not finished:
        return None
    names = setting_names(varied)
    along = _along(finished, varied)
    keys = [key for key in varied if key != along and not (along == _MICROBATCHES and key in _CUTS)]
    lines = _lines(finished, keys, names)
    places = _places(row.get(along, _DEFAULT) for row in finished)
    panels = [panel for panel in _PANELS if any(row[panel[0]] is not None for row in finished)]
    notes = _notes([row for row in rows if row["error"]], varied, names)
    legend = -(-len(lines) // _columns(lines)) * _LABEL if len(lines) > 1 else 0
    note_lines = sum(note.count("\n") + 1 for note in notes)
    slanted = sum(len(label) + 2 for label in places.values()) > _TICKS
    ticks = 0.06 * max(map(len, places.values())) if slanted else 0
    height = _PANEL * len(panels) + 0.4 + legend + ticks + _NOTE * (note_lines + 1)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for number, (key, heading) in enumerate(panels):
        _panel(axes[number], key, heading, lines, along, list(places))
    axes[-1].set_xticks(range(len(places)), list(places.values()))
    if slanted:
        axes[-1].tick_params(axis="x", labelrotation=30)
        for label in axes[-1].get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes[-1].set_xlim(-0.5, len(places) - 0.5)
    axes[-1].set_xlabel(names.get(along, along))
    if len(lines) > 1:
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=_columns(lines), frameon=False
        )
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=7.5, color="#B22222", x=0.02, ha="left")
    if slanted:
        figure.draw_without_rendering()  # how far labels reach depends on the layout, and the layout on that
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


def _lines(finished: Sequence[Row], keys: Sequence[str], names: Mapping[str, str]) -> dict[str, list[Row]]:
    """The runs by what is said of them in the legend, in the order of the settings' values."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(finished, key=lambda row: [_order(row.get(key, _DEFAULT)) for key in keys]):
        lines[", ".join(f"{names[key]} {row.get(key, _DEFAULT)}" for key in keys)].append(row)
    return lines


def _panel(
    axes: Axes, key: str, heading: str, lines: Mapping[str, list[Row]], along: str, places: Sequence[_Order]
) -> None:
    largest = max(row[key] or 0 for rows in lines.values() for row in rows)
    if key.endswith("_s"):
        time = TimeUnit.of(largest)
        factor, unit = 1 / time.seconds, time.name
    else:
        factor, unit = (1, "GiB") if largest >= 1 else (1024, "MiB")
    ordered = all(kind == _NUMBER for kind, *_ in places)
    apart = 0.0 if ordered else min(0.12, 0.7 / len(lines))  # between two models there is room for points, and no line
    for number, ((label, rows), (colour, marker)) in enumerate(zip(lines.items(), itertools.cycle(_STYLES))):
        shift = apart * (number - (len(lines) - 1) / 2)
        points = [
            (places.index(_order(row.get(along, _DEFAULT))) + shift, row[key] * factor)
            for row in rows
            if row[key] is not None
        ]
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "linestyle": "-" if ordered else "None",
            "label": label,
        }
        if points:
            axes.plot(*zip(*sorted(points), strict=True), markersize=5, **style)
    axes.set_title(f"{heading} ({unit})", loc="left", fontsize=9)
    axes.set_ylim(0, 1.12 * largest * factor or 1)
    axes.grid(axis="y", color="#E5E5E5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _notes(failed: Sequence[Row], varied: Sequence[str], names: Mapping[str, str]) -> list[str]:
    notes = []
    for row in failed:
        settings = ", ".join(f"{names[key]} {row[key]}" for key in varied if row.get(key) is not None)
        note = f"run {row['run']} ({settings}) failed: {row['error']}"
        notes.append(textwrap.fill(note, _NOTE_WIDTH, max_lines=_NOTE_LINES, placeholder=" …", subsequent_indent="   "))
    return [*notes[:_MOST_NOTES], *([f"and {len(notes) - _MOST_NOTES} more"] if len(notes) > _MOST_NOTES else [])]


def _places(values: Iterable[Any]) -> dict[_Order, str]:
    """What stands along the axis, in order, each with its label; 1 and 1.0 are one place, as are 1GiB and 1024MiB."""
    labels = {_order(value): str(value) for value in reversed(list(values))}
    return {key: labels[key] for key in sorted(labels)}


def _order(value: Any) -> _Order:
    """What values of a setting are sorted by: the default, null, false and true, numbers and sizes, then texts."""
    text = str(value)
    if text in _FIRST:
        return _FIRST.index(text), 0.0, (), ""
    for number in (float, partial(parse_bytes, name="")):
        try:
            if math.isfinite(found := number(text)):
                return _NUMBER, float(found), (), ""
        except ValueError:
            continue
    parts = re.findall(r"(\D*)(\d*)", text)  # texts and numbers by turns
    return _TEXT, 0.0, tuple((part, int(digits or 0)) for part, digits in parts), text
