"""Plans as Gantt charts: steps under the paper's plan and under the one that was found, on one scale."""

from __future__ import annotations

from pathlib import Path

from lightning_roundpipe.commands.plan_costs import Answer, Question, answer, run_answer
from lightning_roundpipe.gantt import Block, Chart, draw_charts, write_charts_trace
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.pipeline import COMPUTE, Event, Run

_STEPS = {0: 1, 1: 3}
"""Steps that are drawn, by staleness: more than one where they overlap."""


_LONGEST_NAME = 40


def draw(question: Question, found: Answer, picture: Path | None, trace: Path | None) -> None:
    """Writes the picture and the trace, whichever is wanted."""
    name = " ".join(question.name.split())[:_LONGEST_NAME]
    charts = [
        _chart(question, answer(question, partitioner="paper"), f"{name}, the paper's algorithm"),
        _chart(question, found, f"{name}, found by simulation"),
    ]
    if picture:
        draw_charts(charts, picture)
    if trace:
        write_charts_trace(charts, trace)


def _chart(question: Question, shown: Answer, title: str) -> Chart:
    steps = _STEPS[question.staleness]
    run = run_answer(question, shown.plan, steps)
    facts = f"{1e3 * shown.makespan_s:,.1f} ms a step, bubble {shown.bubble_pct:.1f} %"
    if question.staleness:
        facts = f"{1e3 * shown.period_s:,.1f} ms each of many steps, bubble {shown.bubble_pct:.1f} %; {steps} steps"
    stages = len(shown.plan.stages())
    rounds = -(-question.microbatches // shown.plan.round_microbatches)
    blocks = [
        Block(
            worker=event.worker,
            microbatch=event.microbatch,
            stage=f"{event.kind} stage {event.position}" + (f" of step {event.step}" if steps > 1 else ""),
            turn=event.slot // question.workers,
            start_ms=1e3 * event.start_s,
            parts=_parts(event, run, question.costs),
        )
        for event in run.events
        if event.kind in COMPUTE
    ]
    cut = f"{stages} stages" + (f", {rounds} rounds" if rounds > 1 else "")
    return Chart(title, f"{facts}; {cut}", "plans", question.workers, 1e3 * run.makespan_s, blocks)


def _parts(event: Event, run: Run, costs: Costs) -> tuple[tuple[str, float], ...]:
    if event.kind != "fused":
        return ((str(event.kind), 1e3 * (event.end_s - event.start_s)),)
    head = costs.calls[-1]
    layers = costs.calls[run.plan.fused.first : -1]
    times = {
        "forward": sum(call.forward_s for call in layers),
        "head forward": head.forward_s,
        "head backward": head.backward_s,
        "backward": sum(call.backward_s for call in layers),
    }
    return tuple((kind, 1e3 * seconds) for kind, seconds in times.items() if seconds)
