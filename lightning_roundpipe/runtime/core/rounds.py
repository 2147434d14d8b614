"""The slots of one step under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_roundpipe.planning.schedule import Stage
from lightning_roundpipe.runtime.core.schedule import Slot
from lightning_roundpipe.runtime.core.trace import Trace, distinct_layers

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.core.step import Step


def make_rounds(
    step: Step, stages: Sequence[Stage], trace: Trace, microbatches: int, round_microbatches: int
) -> list[list[Slot]]:
    """All slots of ``step`` for ``stages``, by round and stage, in their order in the global sequence."""
    rounds: list[list[Slot]] = []
    for number, start in enumerate(range(0, microbatches, round_microbatches)):
        served = range(start, min(start + round_microbatches, microbatches))
        before = rounds[-1] if rounds else [None] * len(stages)
        rounds.append(
            [
                _slot(step, number, stage, trace, served, predecessor)
                for stage, predecessor in zip(stages, before, strict=True)
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
