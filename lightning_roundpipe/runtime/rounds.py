"""The slots of one step under a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.runtime.slots import Slot
from lightning_roundpipe.runtime.trace import Trace, distinct_layers

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.step import Step


def make_rounds(step: Step, plan: Plan, trace: Trace) -> list[list[Slot]]:
    """All slots of ``step``, by round and stage, in their order in the global sequence."""
    rounds: list[list[Slot]] = []
    size, count = plan.round_microbatches, len(step.sizes)
    for number, start in enumerate(range(0, count, size)):
        microbatches = range(start, min(start + size, count))
        before = rounds[-1] if rounds else [None] * len(plan.stages())
        rounds.append(
            [
                _slot(step, number, stage, trace, microbatches, predecessor)
                for stage, predecessor in zip(plan.stages(), before, strict=True)
            ]
        )
    return rounds


def _slot(step: Step, number: int, stage: Stage, trace: Trace, microbatches: range, predecessor: Slot | None) -> Slot:
    calls = range(stage.first, stage.last + 1)
    loaded = [trace.calls[c] for c in calls if stage.phase != "backward" or trace.calls[c].taped]
    sums = {}
    if stage.phase != "forward":
        for c in calls:
            if trace.calls[c].taped and (total := step.sums_of(trace.calls[c])) is not None:
                sums[c] = total
    return step.new_slot(stage.phase, calls, distinct_layers(loaded), sums, microbatches, number, predecessor)
