"""Limits of a plan: calls in the fused stage, microbatches of a round, and memory.

Without a memory limit, the fastest plan would fuse the whole model, or run rounds of one microbatch: plain data
parallelism, for which no worker has the memory. So both have limits of their own if sizes are unknown. If they are
known, memory decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import Memory, fits, least
from lightning_roundpipe.planning.schedule import Plan


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
