"""Pictures of ``roundpipe-plan``: the first steps of a plan, and the tokens a second of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.pipeline import COMPUTE, SimulatedEvent, SimulatedRun, run_steps
from lightning_roundpipe.planning.search import paper_plan
from lightning_roundpipe.reports.pictures import Block, Chart, IdleBlock, save
from lightning_roundpipe.reports.traces import write_charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_roundpipe.commands.plan_model import Outlook
    from lightning_roundpipe.commands.plan_sweep import Cell

_STEPS = {0: 2, 1: 3}
"""Number of drawn steps, by staleness: with 1, steps overlap."""

_MACHINES = ("hardware", "gpu", "gpus", "workers")
"""Options whose values stand beside each other in the picture of a table."""


# -- steps -------------------------------------------------------------------------------------------------------------


def draw_steps(found: Outlook, picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of an estimate that fits, unless their paths are None."""
    assert found.run is not None
    costs, workers, microbatches = found.costs, found.workers, found.microbatches
    paper = paper_plan(costs, workers, microbatches, found.limits)
    runs = {"the paper's algorithm": run_steps(paper, costs, workers, microbatches, found.rules, len(found.run.ends_s))}
    if found.plan != paper:
        runs["found by simulation"] = found.run
    steps = _STEPS[found.wish.staleness]
    charts = [
        _chart(run, costs, microbatches, steps, f"{Path(found.wish.model).name}, {how}", found.period_of(run))
        for how, run in runs.items()
    ]
    write_charts(charts, picture, trace)


def _chart(run: SimulatedRun, costs: Costs, microbatches: int, steps: int, title: str, step_s: float) -> Chart:
    """Return the chart of a run's first steps.

    Args:
        run: the simulated steps.
        costs: costs of the calls.
        microbatches: number of microbatches of a step.
        steps: number of steps to draw.
        title: title of the chart.
        step_s: seconds of a step; of each of many steps if several are drawn.
    """
    blocks = [
        Block(
            worker=event.worker,
            microbatch=event.microbatch,
            stage=f"{event.kind} stage {event.position}" + f" of step {event.step}",
            turn=event.slot // run.workers,
            start_ms=1e3 * event.start_s,
            parts=_parts(event, run, costs),
        )
        for event in run.events
        if event.kind in COMPUTE and event.step < steps
    ]
    rounds = -(-microbatches // run.plan.round_microbatches)
    cut = plural(len(run.plan.stages()), "stage") + (f", {plural(rounds, 'round')}" if rounds > 1 else "")
    cut += " side by side" if run.plan.side_by_side(run.workers, microbatches) else ""
    of = f"each of many steps, of which {steps} are shown"
    span_ms = 1e3 * max(run.ends_s[:steps])
    waits = [
        IdleBlock(wait.worker, why, 1e3 * start_s, 1e3 * end_s)
        for wait in run.waits
        for why, start_s, end_s in (
            ("waits for the optimizer", wait.input_s, wait.update_s),
            ("waits for weights", wait.update_s, wait.transfer_s),
        )
        if start_s < end_s and 1e3 * end_s <= span_ms
    ]
    return Chart(title, 1e3 * step_s, f" {of}; {cut}", "plans", run.workers, span_ms, blocks, waits)


def _parts(event: SimulatedEvent, run: SimulatedRun, costs: Costs) -> tuple[tuple[str, float], ...]:
    if event.kind != "fused":
        return ((str(event.kind), 1e3 * (event.end_s - event.start_s)),)
    head = costs.calls[-1]
    layers = costs.calls[run.plan.fused.first : -1]
    times = {
        "forward": sum(call.forward_s for call in layers),
        "head forward": head.forward_s,
        "head backward": head.backward_s if head.needs_backward else 0.0,
        "backward": sum(call.backward_s for call in layers if call.needs_backward),
    }
    return tuple((kind, 1e3 * seconds) for kind, seconds in times.items() if seconds)


# -- tables ------------------------------------------------------------------------------------------------------------


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
