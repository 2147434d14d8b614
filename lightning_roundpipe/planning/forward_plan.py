"""Stages of a forward without a backward, as evaluation runs it.

Batches follow one another through the stages, which lie on the workers in turn, and the next round of batches follows
the last batch of a round. So no worker waits for another one, and a round takes as long as its longest stage times its
number of stages, shared by the workers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_roundpipe.planning.schedule import Span

CUTS = 48
"""Numbers of stages to try, about."""


@dataclass(frozen=True)
class ForwardPlan:
    """Stages in running order.

    Attributes:
        forward: the calls of each stage.
        recompute_ahead: never, as nothing is recomputed.
    """

    forward: tuple[Span, ...]
    recompute_ahead: bool = False

    @functools.cached_property
    def stage_of_forward(self) -> Mapping[int, int]:
        """The position of each call's stage."""
        return {call: position for position, span in enumerate(self.forward) for call in span.calls()}

    def round_batches(self, workers: int, in_flight: int) -> int:
        """Return how many batches a round has, so that those ``in_flight`` keep all workers busy.

        With fewer stages than workers, several rounds are in flight.
        """
        return max(1, in_flight // -(-workers // len(self.forward)))


def plan_forward(
    seconds: Sequence[float], layers: Sequence[int], nbytes: Mapping[int, int], workers: int,
    stage_bytes: int | None = None,
) -> ForwardPlan:  # fmt: skip
    """Return the fastest of the plans whose stages take about equally long; of equally fast ones, the shortest.

    Args:
        seconds: of each call.
        layers: the layer of each call.
        nbytes: size of each layer's weights.
        workers: number of workers.
        stage_bytes: most weights of a stage of several calls; None for no limit.
    """
    total_s, calls = sum(seconds), len(seconds)
    counts = range(min(workers, calls), calls, 1 + calls // CUTS)
    limits = {max(seconds), total_s / calls, *(total_s / count for count in counts)}
    plans = (_stages(seconds, layers, nbytes, limit, stage_bytes) for limit in sorted(limits, reverse=True))
    return min(
        plans, key=lambda plan: len(plan.forward) * max(sum(seconds[c] for c in s.calls()) for s in plan.forward)
    )


def _stages(
    seconds: Sequence[float], layers: Sequence[int], nbytes: Mapping[int, int], limit_s: float, stage_bytes: int | None
) -> ForwardPlan:
    """Return stages that take ``limit_s`` at most, as far as a single call does."""
    stages: list[Span] = []
    first, taken, held = 0, 0.0, set[int]()
    for call, layer in enumerate(layers):
        full = taken + seconds[call] > limit_s * (1 + 1e-9)
        full |= stage_bytes is not None and sum(nbytes[other] for other in held | {layer}) > stage_bytes
        if full and call > first:
            stages.append(Span(first, call - 1))
            first, taken, held = call, 0.0, set()
        taken += seconds[call]
        held.add(layer)
    return ForwardPlan((*stages, Span(first, len(layers) - 1)))
