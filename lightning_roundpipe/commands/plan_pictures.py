"""Pictures of ``roundpipe-plan``: the first steps of a plan, and the tokens a second of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.search import paper_plan
from lightning_roundpipe.reports.pictures import bar_chart, draw_steps, save
from lightning_roundpipe.reports.planned import report_of
from lightning_roundpipe.reports.timeline import write_traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_roundpipe.commands.plan_model import Outlook
    from lightning_roundpipe.commands.plan_sweep import Cell

_STEPS = {0: 2, 1: 3}
"""Number of drawn steps, by staleness: with 1, steps overlap."""


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
    """Write the picture of a table: a bar for each row that fits."""
    save(figure_of(cells), path)


def figure_of(cells: Sequence[Cell]) -> Figure:
    """Return the picture of a table."""
    labels = [
        f"{cell.name}{'' if cell.fits else f' ({cell.verdict})' if cell.found else ' (mistake)'}" for cell in cells
    ]
    rates = [cell.found["tokens_per_s"] if cell.found else None for cell in cells]
    return bar_chart(labels, {"Tokens a second (estimated)": rates})
