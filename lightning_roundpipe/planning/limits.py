"""Limits of a plan: calls in the fused stage, microbatches of a round, and memory.

Without a memory limit, the fastest plan would fuse the whole model, or run rounds of one microbatch: plain data
parallelism, for which no worker has the memory. So both have limits of their own if sizes are unknown. If they are
known, memory decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.batch import Sizes
from lightning_roundpipe.planning.costs import Costs, Phase, StageBytes
from lightning_roundpipe.planning.memory import Memory, arenas, fits, layer_arena, least, waiting, waiting_at
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.shapes import PlanShape

_AT_ONCE = 6144
"""Stages whose memory is looked up at once. Larger arrays come from the system each time, which takes three times as
long."""


@dataclass(frozen=True)
class Limits:
    """Limits of a plan.

    Args:
        min_round: least microbatches of a round.
        max_fused: most calls in the fused stage besides the last call, which is always fused.
        memory: bytes of every worker, or of each if workers are unequal; None: no limit.
        max_round: most microbatches of a round, whose boundary tensors are on the host; None: all of a step.
        side_by_side: whether rounds of one microbatch may run side by side, with all calls fused, below ``min_round``.
            Only ``memory`` tells whether a worker can hold that, so without it they may not.

    Raises:
        ValueError: a number is too small.
    """

    min_round: int
    max_fused: int
    memory: Memory | None = None
    max_round: int | None = None
    side_by_side: bool = False

    def __post_init__(self) -> None:
        least_memory = least(self.memory)
        for name, value, lowest in (
            ("min_round", self.min_round, 1), ("max_fused", self.max_fused, 0), ("memory", least_memory, 1),
        ):  # fmt: skip
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value!r} must be at least {lowest}.")
        if self.max_round is not None and self.max_round < self.min_round:
            raise ValueError(f"max_round={self.max_round!r} must be at least min_round={self.min_round!r}.")

    @classmethod
    def usual(cls, costs: Costs, workers: int, microbatches: int, memory: Memory | None = None) -> Limits:
        """Return the default limits.

        Rounds have at least N microbatches, or run side by side, and ``memory`` limits the fused stage. Without
        ``memory``, the fused stage has at most an eighth of the calls before the last one (rounded up), and no rounds
        run side by side.
        """
        others = len(costs) - 1
        fused = -(-others // 8) if memory is None else others
        return cls(min(workers, microbatches), fused, memory, side_by_side=memory is not None)

    def beside(self, costs: Costs, workers: int, microbatches: int) -> list[Plan]:
        """Return the plans within the limits whose rounds run side by side; see `Plan.side_by_side`."""
        plan = Plan.single(len(costs), 1)
        if not self.side_by_side or self.memory is None or not plan.side_by_side(workers, microbatches):
            return []
        return [plan] if fits(plan, costs, workers, self.memory) else []


class MemoryTable:
    """Bytes of every possible stage, to check the memory of a batch of plans at once.

    Args:
        costs: costs of the calls.
        workers: number of workers.
        memory: bytes of the workers.
        ahead: whether backward stages recompute ahead.
        most: whether the arena is as large as is of use, instead of as small as possible.
    """

    def __init__(self, costs: Costs, workers: int, memory: Memory, ahead: bool = False, most: bool = False) -> None:
        self._workers, self._memory, self._most, self._layer = workers, memory, most, layer_arena(costs)
        self._waiting = [np.array(sizes) for sizes in waiting_at(costs)]
        self._needs = {phase: _needs(costs, phase, ahead and phase == "backward") for phase in get_args(Phase)}

    def fits(self, shape: PlanShape, sizes: Sizes) -> NDArray[np.bool_]:
        """Return which of the plans fit, (plans,), by the sum of `memory.device_bytes`. Rows of ``sizes`` are plans."""
        rows = max(1, _AT_ONCE // sizes.shape[1])
        return np.concatenate([self._fits(shape, sizes[at : at + rows]) for at in range(0, len(sizes) or 1, rows)])

    def _fits(self, shape: PlanShape, sizes: Sizes) -> NDArray[np.bool_]:
        forward, workers = shape.forward, self._workers
        starts, ends = _stage_ends(forward, sizes)
        phases: Sequence[tuple[Phase, slice]] = (
            ("forward", slice(0, forward)),
            ("fused", slice(forward, forward + 1)),
            ("backward", slice(forward + 1, None)),
        )
        needs = [self._needs[phase][:, starts[:, part], ends[:, part] - 1] for phase, part in phases]
        weights, gradients, activations = np.concatenate(needs, axis=2)
        before, behind = self._waiting
        left = np.concatenate([before[ends[:, :forward]], behind[starts[:, forward:]]], axis=1)
        activations += waiting(left, workers, shape.round_microbatches)
        sizes_of_arenas = arenas(weights, gradients, workers)[self._most]
        fitting = np.ones(len(sizes), dtype=np.bool_)
        for part, memory in self._parts(sizes.shape[1]):
            arena = np.maximum(sizes_of_arenas[:, part].max(axis=1), self._layer)
            fitting &= arena + activations[:, part].max(axis=1) <= memory
        return fitting

    def _parts(self, stages: int) -> list[tuple[slice, int]]:
        """Return the stages that run on the same workers, with the least memory of these. See `memory.of_worker`."""
        if isinstance(self._memory, int):
            return [(slice(None), self._memory)]
        every = math.gcd(stages, self._workers)
        return [(slice(first, None, every), min(self._memory[first::every])) for first in range(every)]


def _stage_ends(forward: int, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Return the first call of every stage, and the call after its last, (plans, stages) each."""
    upwards = np.cumsum(sizes[:, : forward + 1], axis=1)
    downwards = upwards[:, forward : forward + 1] - np.cumsum(sizes[:, forward:], axis=1)
    starts = np.concatenate([upwards - sizes[:, : forward + 1], downwards[:, 1:]], axis=1)
    ends = np.concatenate([upwards, downwards[:, :-1]], axis=1)
    return starts, ends


def _needs(costs: Costs, phase: Phase, ahead: bool) -> NDArray[np.int64]:
    """Return bytes of weights, gradients and activations, (3, first calls, last calls)."""
    calls = len(costs)
    table = np.zeros((3, calls, calls), dtype=np.int64)
    for first in range(calls):
        need = StageBytes(phase, ahead)
        for last in range(first, calls):
            need.add(costs.calls[last])
            table[:, first, last] = need.weights, need.gradients, need.activations
    return table
