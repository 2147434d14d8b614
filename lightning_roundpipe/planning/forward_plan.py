"""Stages of a forward without a backward, as evaluation runs it.

The planner of steps places a fused stage and lets forward stages wait for it. A forward alone has neither, and its last
stage decides: an output layer that takes as long as many layers keeps one worker busy while the others have nothing
left to do. So the last stage may be spread: each worker receives its weights and takes a share of the microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.span import Span

CUTS = 48
"""Numbers of stages to try, about."""


@dataclass(frozen=True)
class ForwardPlan:
    """Stages in running order.

    Attributes:
        stages: the stages.
        spread: number of workers that share the microbatches of the last stage.
    """

    stages: tuple[Span, ...]
    spread: int = 1

    def shares(self, microbatches: int) -> list[range]:
        """Return the microbatches of each worker in the last stage."""
        count = min(self.spread, microbatches)
        ends = [microbatches * (number + 1) // count for number in range(count)]
        return [range(first, last) for first, last in zip([0, *ends], ends, strict=False)]


def plan_forward(
    costs: Costs, workers: int, microbatches: int, upload_rate: float, stage_bytes: int | None = None
) -> ForwardPlan:
    """Return the fastest of the plans whose stages take about equally long.

    Args:
        costs: of the calls of one microbatch; only their forwards count.
        workers: number of workers. Slot *i* runs on worker *i* modulo ``workers``.
        microbatches: number of microbatches.
        upload_rate: bytes a second from the host to a worker.
        stage_bytes: most weights of a stage of several calls; None for no limit.
    """
    total_s = sum(call.forward_s for call in costs)
    counts = {*range(1, len(costs), 1 + len(costs) // CUTS), len(costs)}
    cuts = dict.fromkeys(_stages(costs, total_s / count, stage_bytes) for count in sorted(counts))
    plans = [ForwardPlan(stages, spread) for stages in cuts for spread in (1, workers)]
    return min(plans, key=lambda plan: forward_seconds(plan, costs, workers, microbatches, upload_rate))


def _stages(costs: Costs, limit_s: float, stage_bytes: int | None) -> tuple[Span, ...]:
    """Return stages that take ``limit_s`` at most, as far as a single call does."""
    stages: list[Span] = []
    first, taken, layers = 0, 0.0, dict[str, int]()
    for number, call in enumerate(costs):
        more = layers | {call.layer: call.weight_bytes}
        full = taken + call.forward_s > limit_s * (1 + 1e-9)
        if number > first and (full or (stage_bytes is not None and sum(more.values()) > stage_bytes)):
            stages.append(Span(first, number - 1))
            first, taken, more = number, 0.0, {call.layer: call.weight_bytes}
        taken, layers = taken + call.forward_s, more
    return (*stages, Span(first, len(costs) - 1))


def forward_seconds(plan: ForwardPlan, costs: Costs, workers: int, microbatches: int, upload_rate: float) -> float:
    """Return how long all microbatches take under ``plan``.

    A worker computes one microbatch at a time, in order. It has room for two stages: the upload of a slot begins when
    the slot before opens, and when the one before that has closed.
    """
    calls = list(costs)
    slots = [(span, range(microbatches)) for span in plan.stages[:-1]]
    slots += [(plan.stages[-1], share) for share in plan.shares(microbatches)]
    ready = [0.0] * microbatches
    free, opened, closed, uploaded = ([0.0] * workers for _ in range(4))
    for slot, (span, served) in enumerate(slots):
        worker = slot % workers
        seconds = sum(calls[number].forward_s for number in span.calls())
        nbytes = sum({calls[number].layer: calls[number].weight_bytes for number in span.calls()}.values())
        uploaded[worker] = max(uploaded[worker], opened[worker], closed[worker]) + nbytes / upload_rate
        opened[worker] = clock = max(free[worker], uploaded[worker])
        closed[worker] = free[worker]
        for microbatch in served:
            clock = ready[microbatch] = max(clock, ready[microbatch]) + seconds
        free[worker] = clock
    return max(ready)
