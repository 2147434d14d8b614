"""A table of many plans as a picture: machines beside each other, models below each other, tokens a second between."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.commands.plan_several import Cell
from lightning_roundpipe.commands.plan_several_table import common
from lightning_roundpipe.reports.pictures import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MACHINES = ("hardware", "gpu", "gpus", "workers")
_WIDTH, _HEIGHT = 1.45, 0.62
"""Inches of a field."""
_LETTER = 0.085
"""Inches of a letter beside the rows and above the columns."""
_SMALL_LETTER, _LINE = 0.065, 0.17
"""Inches of a letter below, and of a line."""
_COLOURS, _LIGHTEST, _DARKEST, _DARK = "YlGnBu", 0.08, 0.92, 0.58
"""The part of the scale that is used, by the logarithm, and from where on letters are white."""
_REFUSED = "#ECECEC"


def draw_cells(cells: Sequence[Cell], path: Path) -> None:
    """Writes the picture to ``path``, whose suffix says in which format."""
    save(figure_of(cells), path)


def figure_of(cells: Sequence[Cell]) -> Figure:
    """The heat map; what does not fit is grey, and says what is too small."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    across, down = _axes(cells)
    places = [(_label(cell, down) or cell.wish.model, _label(cell, across) or cell.machine) for cell in cells]
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
    margin = 0.5 + _LETTER * max(map(len, rows))
    machines = [textwrap.fill(name, int(_WIDTH / _LETTER)) for name in columns]  # each within its column
    width = max(margin + _WIDTH * len(columns) + 0.3, 4.8)
    below = textwrap.wrap(", ".join(common(cells)), int(width / _SMALL_LETTER))
    lines = max(name.count("\n") for name in machines) + len(below) - 1
    size = (width, _HEIGHT * len(rows) + 1.3 + _LINE * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    rates = [cell.found["tokens_per_s"] for cell in cells if cell.found and cell.fits]
    colours = colormaps[_COLOURS]
    norm = LogNorm(min(rates), max(rates)) if len(set(rates)) > 1 else None
    for (row, column), cell in zip(places, cells, strict=True):
        x, y = columns.index(column), rows.index(row)
        face, ink, text, font = to_rgba(_REFUSED), "#555555", _why(cell), 8.0
        if cell.found and cell.fits:
            rate = cell.found["tokens_per_s"]
            share = _LIGHTEST + (_DARKEST - _LIGHTEST) * (float(norm(rate)) if norm else 0.3)
            face, ink, text, font = colours(share), "white" if share > _DARK else "black", f"{rate:,.0f}", 11.0
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5))
        axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=font, linespacing=1.3)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), machines)
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle("Tokens a second (estimated)", fontsize=12)
    figure.supxlabel("\n".join(below), fontsize=8, color="#555555")
    return figure


def _axes(cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """Options whose values stand beside each other, and those whose values stand below each other."""
    names = list(cells[0].given)
    across = [name for name in names if name in _MACHINES]
    if not across and len(names) > 1:
        across = names[-1:]
    return across, [name for name in names if name not in across]


def _label(cell: Cell, names: Sequence[str]) -> str:
    """Values that say nothing without their option have its name."""
    speaking = ("model", "hardware", "gpu", "precision")
    return ", ".join(
        cell.given[name] if name in speaking else f"{name.replace('_', ' ')} {cell.given[name]}" for name in names
    )


def _why(cell: Cell) -> str:
    if cell.found is None:
        return "mistake"
    lines = ["does not fit"]
    for name, key in (("worker", "device_memory"), ("host", "host_memory")):
        if name in cell.too_small:
            memory = cell.found[key]
            lines.append(f"{name}: {_gib(memory['needed_bytes'])} of {_gib(memory['limit_bytes'])} GiB")
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    gib = nbytes / 2**30
    return f"{math.ceil(gib):,}" if gib >= 100 else f"{gib:.1f}"
