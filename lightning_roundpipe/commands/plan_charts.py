"""Gantt charts of plans: steps under the paper's plan and under the plan that was found, on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.commands.plan_costs import Answer, Question, answer, run_answer
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.pipeline import COMPUTE, SimulatedEvent, SimulatedRun, run_steps
from lightning_roundpipe.planning.search import paper_plan
from lightning_roundpipe.reports.pictures import Block, Chart, IdleBlock
from lightning_roundpipe.reports.traces import write_charts

if TYPE_CHECKING:
    from lightning_roundpipe.commands.plan_model import Outlook  # imports torch

_STEPS = {0: 1, 1: 3}
"""Number of drawn steps, by staleness: steps of staleness 1 overlap."""
_MODEL_STEPS = {0: 2, 1: 3}
"""The same for a model, whose optimizer takes time between steps."""


_LONGEST_NAME = 40


def draw(question: Question, found: Answer, picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of an answer for measured times, unless their paths are None."""
    steps = _STEPS[question.staleness]

    def chart(shown: Answer, how: str) -> Chart:
        step_s = shown.period_s if question.staleness else shown.makespan_s
        run = run_answer(question, shown.plan, steps)
        title, facts = _title(question.name, how), f", bubble {shown.bubble_pct:.1f} %"
        return _chart(run, question.costs, question.microbatches, steps, title, step_s, facts)

    charts = [
        chart(answer(question, partitioner="paper"), "the paper's algorithm"),
        chart(found, "found by simulation"),
    ]
    write_charts(charts, picture, trace)


def draw_model(found: Outlook, picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of an estimate that fits, unless their paths are None."""
    assert found.run is not None
    costs, workers, microbatches = found.costs, found.workers, found.microbatches
    paper = paper_plan(costs, workers, microbatches, found.limits)
    runs = {"the paper's algorithm": run_steps(paper, costs, workers, microbatches, found.rules, len(found.run.ends_s))}
    if found.plan != paper:
        runs["found by simulation"] = found.run
    steps = _MODEL_STEPS[found.wish.staleness]
    charts = []
    for how, run in runs.items():
        title, step_s = _title(found.wish.model, how), found.period_of(run)
        charts.append(_chart(run, costs, microbatches, steps, title, step_s))
    write_charts(charts, picture, trace)


def _title(name: str, how: str) -> str:
    return f"{' '.join(name.split())[:_LONGEST_NAME]}, {how}"


def _chart(
    run: SimulatedRun, costs: Costs, microbatches: int, steps: int, title: str, step_s: float, facts: str = ""
) -> Chart:
    """Return the chart of a run's first steps.

    Args:
        run: the simulated steps.
        costs: costs of the calls.
        microbatches: number of microbatches of a step.
        steps: number of steps to draw.
        title: title of the chart.
        step_s: seconds of a step; of each of many steps if several are drawn.
        facts: text after the step time.
    """
    blocks = [
        Block(
            worker=event.worker,
            microbatch=event.microbatch,
            stage=f"{event.kind} stage {event.position}" + (f" of step {event.step}" if steps > 1 else ""),
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
    of = "a step" if steps == 1 else f"each of many steps, of which {steps} are shown"
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
    return Chart(title, 1e3 * step_s, f" {of}{facts}; {cut}", "plans", run.workers, span_ms, blocks, waits)


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
