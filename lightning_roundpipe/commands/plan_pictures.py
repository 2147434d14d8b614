"""Pictures of ``roundpipe-plan``: the first steps of a plan, and the tokens a second of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.search import paper_plan
from lightning_roundpipe.reports.pictures import draw_steps, save
from lightning_roundpipe.reports.planned import report_of
from lightning_roundpipe.reports.timeline import write_traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_roundpipe.commands.plan_model import Outlook
    from lightning_roundpipe.commands.plan_sweep import Cell

_STEPS = {0: 2, 1: 3}
"""Number of drawn steps, by staleness: with 1, steps overlap."""

_MACHINES = ("hardware", "gpu", "gpus", "workers")
"""Options whose values stand beside each other in the picture of a table."""


def draw_plan(found: Outlook, picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of an estimate that fits, unless their paths are None."""
    assert found.run is not None
    costs, workers, microbatches = found.costs, found.workers, found.microbatches
    paper = paper_plan(costs, workers, microbatches, found.limits)
    runs = {"the paper's algorithm": run_steps(paper, costs, workers, microbatches, found.rules, len(found.run.ends_s))}
    if found.plan != paper:
        runs["found by simulation"] = found.run
    name, steps = Path(found.wish.model).name, _STEPS[found.wish.staleness]
    reports = {
        f"{name}, {how}": report_of(run, costs, microbatches, found.period_of(run), steps) for how, run in runs.items()
    }
    if picture:
        draw_steps(reports, picture)
    if trace:
        write_traces(reports, trace)


def draw_cells(cells: Sequence[Cell], path: Path) -> None:
    """Write the picture of a table: machines beside each other, the rest below each other, tokens a second between."""
    save(figure_of(cells), path)


def figure_of(cells: Sequence[Cell]) -> Figure:
    """Return the heat map, on a logarithmic scale. What does not fit is grey."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    from lightning_roundpipe.commands.plan_sweep import common

    names = list(cells[0].given)
    across = [name for name in names if name in _MACHINES] or names[-1:]
    places = [
        tuple(
            "\n".join(text if name in ("model", "hardware", "gpu") else f"{name}={text}" for name, text in own)
            for own in (
                [pair for pair in cell.given.items() if pair[0] not in across],
                [pair for pair in cell.given.items() if pair[0] in across],
            )
        )
        for cell in cells
    ]
    rows, columns = (list(dict.fromkeys(side)) for side in zip(*places, strict=True))
    rates = np.full((len(rows), len(columns)), np.nan)
    width = 2.2 + max(1.6, 0.09 * max(map(len, columns))) * len(columns)
    figure = Figure((max(width, 6.0), 1.8 + 0.75 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for (row, column), cell in zip(places, cells, strict=True):
        at = rows.index(row), columns.index(column)
        if cell.found and cell.fits:
            rates[at] = cell.found["tokens_per_s"]
        shown = cell.verdict.replace(": ", "\n").replace(" tokens/s", "") if cell.found else "mistake"
        axes.text(at[1], at[0], shown, ha="center", va="center", bbox={"facecolor": "white", "alpha": 0.75, "lw": 0})
    fitting = rates[~np.isnan(rates)]
    norm = LogNorm(0.7 * fitting.min(), 1.4 * fitting.max()) if fitting.size else None
    shown_rates = np.ma.masked_invalid(rates)
    axes.imshow(shown_rates, colormaps["YlGnBu"].with_extremes(bad="#ECECEC"), norm=norm, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    figure.suptitle("Tokens a second (estimated)")
    figure.supxlabel(common(cells), fontsize=8, wrap=True)
    return figure
