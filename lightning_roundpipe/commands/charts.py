"""Runs of the paper's schedules as Gantt charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_roundpipe.planning.bubble import Bubble
from lightning_roundpipe.planning.cases import FIGURES
from lightning_roundpipe.planning.paper_schedules import PaperRun
from lightning_roundpipe.reports.pictures import Block, Chart
from lightning_roundpipe.reports.traces import write_charts

_LONGEST_NAME = 60


def draw(runs: Sequence[PaperRun], bubbles: Sequence[Bubble], picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of the runs, unless their paths are None."""
    write_charts([chart_of(run, bubble) for run, bubble in zip(runs, bubbles, strict=True)], picture, trace)


def chart_of(run: PaperRun, bubble: Bubble) -> Chart:
    """Return the chart of a run, with its figures in the title."""
    case, ms = run.case, run.ticks_per_ms
    # In RoundPipe, backward stages follow forward stages on a worker. In baselines, a stage runs in both directions.
    before = len(case.forward_stages) if case.backward_stages else 0
    parts = {key: tuple((kind, ticks / ms) for kind, ticks in found) for key, found in run.parts.items()}
    blocks = [
        Block(
            worker=operation.worker,
            microbatch=operation.microbatch,
            stage=f"{operation.direction}{operation.stage}",
            turn=(operation.stage + (before if operation.direction == "B" else 0)) // case.workers,
            start_ms=operation.start / ms,
            parts=parts[operation.direction, operation.stage],
        )
        for operation in run.operations
    ]
    model = " ".join(case.model.split())
    model = model if len(model) <= _LONGEST_NAME else model[: _LONGEST_NAME - 1] + "…"
    shares = ", ".join(f"{name.removesuffix('_pct')} {getattr(bubble, name):.1f}" for name in FIGURES[2:])
    facts = f", bubble {bubble.bubble_pct:.1f} % ({shares})"
    return Chart(
        f"{model}, {case.schedule}", bubble.makespan_ms, facts, case.model, case.workers, bubble.makespan_ms, blocks
    )
