"""Plans as rows of an array, for the search: calls of each stage, in a shape that all rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.span import Span


@dataclass(frozen=True, order=True)
class PlanShape:
    """Numbers of forward stages, backward stages, and microbatches of a round."""

    forward: int
    backward: int
    round_microbatches: int

    def rounds(self, microbatches: int) -> list[int]:
        """Return the number of microbatches of each round of a step."""
        return [
            min(self.round_microbatches, microbatches - begin)
            for begin in range(0, microbatches, self.round_microbatches)
        ]


def plan_of(shape: PlanShape, sizes: Sequence[int]) -> Plan:
    """Return the plan of a row of `batch.Sizes`."""
    ends = np.cumsum(sizes[: shape.forward + 1])
    forward = tuple(
        Span(int(end) - size, int(end) - 1) for end, size in zip(ends, sizes[: shape.forward], strict=False)
    )
    last = int(ends[-1]) - 1
    end = last + 1 - sizes[shape.forward]
    fused = Span(end, last)
    backward = []
    for size in sizes[shape.forward + 1 :]:
        backward.append(Span(end - size, end - 1))
        end -= size
    return Plan(forward, fused, tuple(backward), shape.round_microbatches)


def sizes_of(plan: Plan) -> tuple[PlanShape, list[int]]:
    """Return shape and sizes of a plan: the inverse of `plan_of`."""
    shape = PlanShape(len(plan.forward), len(plan.backward), plan.round_microbatches)
    return shape, [len(span) for span in (*plan.forward, plan.fused, *plan.backward)]
