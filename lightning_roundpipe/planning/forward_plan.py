"""Stages and rounds of a forward without a backward, as evaluation runs it.

The planner of steps places a fused stage and lets forward stages wait for it. A forward alone has neither, and its last
stages decide: an output layer that takes as long as many layers keeps one worker busy while the others have nothing
left to do. With fewer microbatches in a round, the output layer of the first round runs beside the layers of the second
one. Each round uploads all weights once more, so that pays only where computing takes longer than copying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.span import Span


@dataclass(frozen=True)
class ForwardPlan:
    """Stages in running order, and how many microbatches pass all of them before the next ones begin."""

    stages: tuple[Span, ...]
    round_microbatches: int


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
    limits = sorted({sum(call.forward_s for call in costs) / count for count in range(1, len(costs) + 1)})
    cuts = dict.fromkeys(_stages(costs, limit, stage_bytes) for limit in limits)
    sizes = dict.fromkeys(-(-microbatches // rounds) for rounds in range(1, 1 + max(1, microbatches // workers)))
    plans = [ForwardPlan(stages, size) for stages in cuts for size in sizes]
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
    seconds = [sum(calls[number].forward_s for number in span.calls()) for span in plan.stages]
    uploads = [
        sum({calls[number].layer: calls[number].weight_bytes for number in span.calls()}.values()) / upload_rate
        for span in plan.stages
    ]
    ready = [0.0] * microbatches
    free, opened, closed, uploaded = ([0.0] * workers for _ in range(4))
    slot = 0
    for start in range(0, microbatches, plan.round_microbatches):
        served = range(start, min(start + plan.round_microbatches, microbatches))
        for position in range(len(plan.stages)):
            worker = slot % workers
            slot += 1
            uploaded[worker] = max(uploaded[worker], opened[worker], closed[worker]) + uploads[position]
            opened[worker] = clock = max(free[worker], uploaded[worker])
            closed[worker] = free[worker]
            for microbatch in served:
                clock = ready[microbatch] = max(clock, ready[microbatch]) + seconds[position]
            free[worker] = clock
    return max(ready, default=math.nan)
