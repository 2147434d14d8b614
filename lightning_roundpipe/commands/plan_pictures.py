"""Picture and trace of the first steps of a plan, for ``roundpipe-plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.search import paper_plan
from lightning_roundpipe.reports.pictures import draw_steps
from lightning_roundpipe.reports.planned import report_of
from lightning_roundpipe.reports.traces import write_trace

if TYPE_CHECKING:
    from lightning_roundpipe.estimates.outlook import Outlook

_STEPS = {0: 2, 1: 3}
"""Number of drawn steps, by staleness: with 1, steps overlap."""


def draw_plan(found: Outlook, picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of an estimate that fits, unless their paths are None."""
    assert found.run is not None
    costs, workers, microbatches = found.costs, found.workers, found.microbatches
    paper, rules = paper_plan(found.problem), found.problem.rules
    runs = {"the paper's algorithm": run_steps(paper, costs, workers, microbatches, rules, len(found.run.ends_s))}
    if found.plan != paper:
        runs["found by simulation"] = found.run
    name, steps = Path(found.request.model).name, _STEPS[found.request.staleness]
    reports = {
        f"{name}, {how}": report_of(run, costs, microbatches, run.period_s(len(run.ends_s) // 2), steps)
        for how, run in runs.items()
    }
    if picture:
        draw_steps(reports, picture)
    if trace:
        write_trace(reports, trace)
