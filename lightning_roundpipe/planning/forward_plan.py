"""Stages of a forward without a backward, as evaluation runs it.

The planner of steps places a fused stage and lets forward stages wait for it. A forward alone has neither, and its last
stage decides: an output layer that takes as long as many layers keeps one worker busy while the others have nothing
left to do. So stages may be spread, the last one or all: each worker receives their weights and takes a share of the
microbatches. Where all are spread, no worker waits for another one, but each receives all weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.span import Span

CUTS = 48
"""Numbers of stages to try, about."""


@dataclass(frozen=True)
class ForwardPlan:
    """Stages in running order.

    Attributes:
        stages: the stages.
        spread: number of workers that share the microbatches of the spread stages.
        first_spread: index of the first stage that is spread: 0 for all, -1 for the last one alone.
    """

    stages: tuple[Span, ...]
    spread: int = 1
    first_spread: int = -1

    def shares(self, sizes: Sequence[int]) -> list[range]:
        """Return the microbatches of each worker in the spread stages.

        Args:
            sizes: number of samples of each microbatch.
        """
        return _shares(min(self.spread, len(sizes)), tuple(sizes))


@functools.lru_cache  # the plans that `plan_forward` compares have a few different ones
def _shares(count: int, sizes: tuple[int, ...]) -> list[range]:
    """Return shares whose largest one is as small as possible. The first ones are filled, as theirs arrive first."""
    ends = list(accumulate(sizes, initial=0))
    room = -(-ends[-1] // count)
    while len(found := _filled(ends, room)) > count:
        room += 1
    return found


def _filled(ends: list[int], room: int) -> list[range]:
    """Return ranges of microbatches that have ``room`` samples at most, or are one microbatch."""
    found = [range(1)]
    for last in range(1, len(ends) - 1):
        if ends[last + 1] - ends[found[-1].start] <= room:
            found[-1] = range(found[-1].start, last + 1)
        else:
            found.append(range(last, last + 1))
    return found


def plan_forward(
    costs: Costs, workers: int, sizes: Sequence[int], upload_rate: float, turn_s: float, stage_bytes: int | None = None
) -> ForwardPlan:
    """Return the fastest of the plans whose stages take about equally long; of equally fast ones, that with the fewest.

    Args:
        costs: of the calls of one sample; only their forwards count.
        workers: number of workers. Slot *i* runs on worker *i* modulo ``workers``.
        sizes: number of samples of each microbatch.
        upload_rate: bytes a second from the host to a worker.
        turn_s: seconds that a turn takes beside its calls.
        stage_bytes: most weights of a stage of several calls; None for no limit.
    """
    total_s = sum(call.forward_s for call in costs)
    counts = {*range(1, len(costs), 1 + len(costs) // CUTS), len(costs)}
    cuts = dict.fromkeys(_stages(costs, total_s / count, stage_bytes) for count in sorted(counts))
    ways = [(1, -1), (workers, -1), (workers, 0)]
    plans = [ForwardPlan(stages, spread, first) for stages in cuts for spread, first in ways]
    return min(plans, key=lambda plan: forward_seconds(plan, costs, workers, sizes, upload_rate, turn_s))


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


def forward_seconds(
    plan: ForwardPlan, costs: Costs, workers: int, sizes: Sequence[int], upload_rate: float, turn_s: float = 0.0
) -> float:
    """Return how long all microbatches take under ``plan``. For the arguments see `plan_forward`.

    A worker computes one microbatch at a time, in order. It has room for two stages: the upload of a slot begins when
    the slot before opens, and when the one before that has closed. A microbatch makes all its calls of a stage before
    the next one makes its first.
    """
    calls, shares = list(costs), plan.shares(sizes)
    slots = [(span, range(len(sizes))) for span in plan.stages[: plan.first_spread]]
    slots += [(span, share) for span in plan.stages[plan.first_spread :] for share in shares]
    taken: dict[Span, tuple[float, int]] = {}
    for span in plan.stages:
        held = {calls[number].layer: calls[number].weight_bytes for number in span.calls()}
        taken[span] = sum(calls[number].forward_s for number in span.calls()), sum(held.values())
    ready = [0.0] * len(sizes)
    free, opened, closed, uploaded = ([0.0] * workers for _ in range(4))
    for slot, (span, served) in enumerate(slots):
        worker = slot % workers
        seconds, nbytes = taken[span]
        uploaded[worker] = max(uploaded[worker], opened[worker], closed[worker]) + nbytes / upload_rate
        opened[worker] = clock = max(free[worker], uploaded[worker])
        closed[worker] = free[worker]
        for microbatch in served:
            clock = ready[microbatch] = max(clock, ready[microbatch]) + turn_s + seconds * sizes[microbatch]
        free[worker] = clock
    return max(ready)
