"""What a plan must keep to, whatever it takes: so many calls in the fused stage, so large rounds, so much memory.

Without a limit on memory nothing would speak against a fused stage that holds the whole model, or against rounds of one
microbatch: plain data parallelism, which no worker could hold. So both have a limit of their own where sizes are not
known. Where they are, memory decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.batch import Sizes, stage_ends
from lightning_roundpipe.planning.costs import CallCost, Costs, Phase, StageBytes
from lightning_roundpipe.planning.memory import BOTH, Memory, arenas_within, least
from lightning_roundpipe.planning.schedule import Arenas, Plan
from lightning_roundpipe.planning.shapes import PlanShape


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to.

    Args:
        min_round: the fewest microbatches of a round.
        max_fused: how many calls may be fused besides the last one, which always is.
        memory: bytes that each worker has, or each of those that are not equal; None: no limit.
        max_round: the most microbatches of a round; None: all of a step's. Boundary tensors of a round are on the host.
        side_by_side: whether rounds of one microbatch may run side by side, all calls fused, though ``min_round`` asks
            for more. Only memory says whether a worker can hold that, so without ``memory`` they may not.
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
        """Rounds of at least N microbatches, or side by side; as many calls fused as ``memory`` has room for.

        Without ``memory`` an eighth of the calls before the last one (rounded up) are fused, and no rounds are side by
        side.
        """
        others = len(costs) - 1
        fused = -(-others // 8) if memory is None else others
        return cls(min(workers, microbatches), fused, memory, side_by_side=memory is not None)

    def beside(self, costs: Costs, workers: int, microbatches: int) -> list[Plan]:
        """The plans within the limits whose rounds run side by side; see `Plan.side_by_side`."""
        plan = Plan.single(len(costs), 1)
        if not self.side_by_side or self.memory is None or not plan.side_by_side(workers, microbatches):
            return []
        return arenas_within(plan, costs, workers, self.memory)


class MemoryTable:
    """The bytes of every possible stage, recomputed ahead or not, so that a batch of plans can be checked at once."""

    def __init__(self, costs: Costs, workers: int, memory: Memory, ahead: bool = False, arenas: Arenas = BOTH) -> None:
        self._workers, self._memory, self._arenas = workers, memory, arenas
        self._layer = (
            max(call.weight_bytes for call in costs),
            max((call.gradient_bytes for call in costs if call.needs_backward), default=0),
        )
        self._waiting = np.array([*(call.waiting_bytes for call in costs), 0])
        self._returning = np.array(list(accumulate(costs, _returning, initial=0)))
        self._needs = {phase: _needs(costs, phase, ahead) for phase in get_args(Phase)}

    def fits(self, shape: PlanShape, sizes: Sizes) -> NDArray[np.bool_]:
        """Which of the plans (rows of ``sizes``, see `batch`) fit, by the same sum as `memory.device_bytes`."""
        forward = shape.forward
        starts, ends = stage_ends(forward, sizes)
        phases: Sequence[tuple[Phase, slice]] = (
            ("forward", slice(0, forward)),
            ("fused", slice(forward, forward + 1)),
            ("backward", slice(forward + 1, None)),
        )
        needs = [self._needs[phase][:, starts[:, part], ends[:, part] - 1] for phase, part in phases]
        weights, gradients, activations = np.concatenate(needs, axis=2)
        left = np.concatenate([self._waiting[ends[:, :forward]], self._returning[starts[:, forward:]]], axis=1)
        waiting = (shape.round_microbatches - 1) * np.maximum(left, np.roll(left, self._workers, axis=1))
        of_weights, of_gradients = self._arenas
        of_weight, of_gradient = self._layer
        fitting = np.ones(len(sizes), dtype=np.bool_)
        for part, memory in self._parts(sizes.shape[1]):
            arenas = of_weights * np.maximum(weights[:, part].max(axis=1), of_weight)
            arenas += of_gradients * np.maximum(gradients[:, part].max(axis=1), of_gradient)
            fitting &= arenas + (activations + waiting)[:, part].max(axis=1) <= memory
        return fitting

    def _parts(self, stages: int) -> list[tuple[slice, int]]:
        """Stages that come to the same workers, and the memory that each of these has. See `memory.of_worker`."""
        if isinstance(self._memory, int):
            return [(slice(None), self._memory)]
        every = math.gcd(stages, self._workers)
        return [(slice(first, None, every), min(self._memory[first::every])) for first in range(every)]


def _returning(before: int, call: CallCost) -> int:
    """Gradients that wait for the next call in front that has a backward."""
    return call.returning_bytes if call.needs_backward else before


def _needs(costs: Costs, phase: Phase, ahead: bool) -> NDArray[np.int64]:
    """Bytes of (weights, gradients, activations), first call, last call."""
    calls = len(costs)
    table = np.zeros((3, calls, calls), dtype=np.int64)
    for first in range(calls):
        need = StageBytes(phase, ahead)
        for last in range(first, calls):
            need.add(costs.calls[last])
            table[:, first, last] = need.weights, need.gradients, need.activations
    return table
