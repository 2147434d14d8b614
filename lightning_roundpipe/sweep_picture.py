"""A sweep as a picture: step time and memory over the number of microbatches, one line per combination of the rest.

The numbers of microbatches are those that the runs had, so sweeps over their size and over their number look alike. In
a sweep that does not vary them, the first varied setting takes their place. Numbers and sizes are sorted along the axis
by value, whatever their units, and texts by the numbers in them. Failed runs are listed below with their errors, which
a missing point would not explain.
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
_CUTS = {"data.batch_size", "strategy.num_microbatches", "strategy.microbatch_size"}
"""Settings that determine the number of microbatches."""

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_STYLES = [
    (colour, _MARKERS[(number + shift) % len(_MARKERS)])
    for shift in range(len(_MARKERS))
    for number, colour in enumerate(_COLOURS)
]
"""Styles of lines: all pairs of colour and marker, in an order that changes both."""
_WIDTH, _PANEL, _NOTE, _LABEL = 7.0, 2.2, 0.14, 0.22
_DPI = 130
_LEGEND = 84
"""Most characters in a row of the legend."""
_TICKS = 78
"""Most characters below the axis, with a little space between labels."""
_NOTE_WIDTH, _NOTE_LINES, _MOST_NOTES = 112, 2, 6

_DEFAULT = "default"
_FIRST = (_DEFAULT, "None", "null", "False", "false", "True", "true")
_NUMBER, _TEXT = len(_FIRST), len(_FIRST) + 1

Row = dict[str, Any]
_Order = tuple[int, float, tuple[tuple[str, int], ...], str]


def draw_sweep(rows: Sequence[Row], varied: Sequence[str], path: Path) -> bool:
    """Write the picture to ``path``, whose suffix selects the format. Return False if no run has finished."""
    if (figure := figure_of(rows, varied)) is None:
        return False
    save(figure, path, _DPI)
    return True


def figure_of(rows: Sequence[Row], varied: Sequence[str]) -> Figure | None:
    """Return the picture of a sweep; None if no run has finished.

    Args:
        rows: the runs, as ``sweep.read_runs`` returns them.
        varied: the settings in which they differ.
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
        figure.draw_without_rendering()  # the length of slanted labels depends on the layout, and the layout on it
    return figure


def _columns(labels: Iterable[str]) -> int:
    """Return how many columns of the legend fit beside each other."""
    each = max(map(len, labels)) + 6  # line and marker are as wide as this many characters
    return min(len(list(labels)), max(_LEGEND // each, 1), 3)


def _along(finished: Sequence[Row], varied: Sequence[str]) -> str:
    """Return what the horizontal axis shows."""
    counts = {row[_MICROBATCHES] for row in finished}
    others = [key for key in varied if key not in _CUTS]
    if None in counts:  # plain Lightning has no microbatches
        others += varied
    return others[0] if others and (len(counts) == 1 or None in counts) else _MICROBATCHES


def _lines(finished: Sequence[Row], keys: Sequence[str], names: Mapping[str, str]) -> dict[str, list[Row]]:
    """Return the runs by their label in the legend, in the order of the settings' values."""
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
    apart = 0.0 if ordered else min(0.12, 0.7 / len(lines))  # texts have no order: shift points, draw no lines
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
    """Return the places along the axis in order, with their labels. 1 and 1.0 are one place, and 1GiB and 1024MiB."""
    labels = {_order(value): str(value) for value in reversed(list(values))}
    return {key: labels[key] for key in sorted(labels)}


def _order(value: Any) -> _Order:
    """Return the sort key of a setting's value: default, null, false and true, then numbers and sizes, then texts."""
    text = str(value)
    if text in _FIRST:
        return _FIRST.index(text), 0.0, (), ""
    for number in (float, partial(parse_bytes, name="")):
        try:
            if math.isfinite(found := number(text)):
                return _NUMBER, float(found), (), ""
        except ValueError:
            continue
    parts = re.findall(r"(\D*)(\d*)", text)  # texts and numbers alternate
    return _TEXT, 0.0, tuple((part, int(digits or 0)) for part, digits in parts), text
