"""What is planned: the calls of a step, the workers, and the limits that plans keep to.

Without a memory limit, the fastest plan would fuse the whole model, or run rounds of one microbatch: plain data
parallelism, for which no worker has the memory. So both have limits of their own if sizes are unknown. If they are
known, memory decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import (
    Item,
    Memory,
    Parameters,
    boundary_bytes,
    copies_of,
    fits,
    host_items,
    least,
    total,
)
from lightning_roundpipe.planning.pipeline import Rules, period_of_ends, step_ends
from lightning_roundpipe.planning.schedule import Plan, Span


@dataclass(frozen=True)
class Host:
    """Bytes of the host's memory, and the parameters that lie in it."""

    memory: int
    parameters: Parameters


@dataclass(frozen=True)
class Problem:
    """A step to plan.

    Args:
        costs: costs of the calls of one microbatch.
        workers: number of workers (N).
        microbatches: microbatches of a step (M).
        min_round: least microbatches of a round.
        max_fused: most calls in the fused stage besides the last call, which is always fused.
        memory: bytes of every worker, or of each if workers are unequal; None: no limit.
        max_round: most microbatches of a round, whose boundary tensors are on the host; None: all of a step.
        side_by_side: whether rounds of one microbatch may run side by side, with all calls fused, below ``min_round``.
            Only ``memory`` tells whether a worker can hold that, so without it they may not.
        rules: what takes time besides computing. The search itself knows staleness and hops only.
        host: memory of the host; None: it is no limit.

    Raises:
        ValueError: a number is too small.
    """

    costs: Costs
    workers: int
    microbatches: int
    min_round: int
    max_fused: int
    memory: Memory | None = None
    max_round: int | None = None
    side_by_side: bool = False
    rules: Rules = field(default_factory=Rules)
    host: Host | None = None

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
    def usual(
        cls, costs: Costs, workers: int, microbatches: int, memory: Memory | None = None, rules: Rules | None = None,
        host: Host | None = None,
    ) -> Problem:  # fmt: skip
        """Return the problem with the default limits.

        Rounds have at least N microbatches, or run side by side, and ``memory`` limits the fused stage. Without
        ``memory``, the fused stage has at most an eighth of the calls before the last one (rounded up), and no rounds
        run side by side.
        """
        others = len(costs) - 1
        fused = -(-others // 8) if memory is None else others
        return cls(
            costs, workers, microbatches, min(workers, microbatches), fused, memory,
            side_by_side=memory is not None, rules=rules or Rules(), host=host,
        )  # fmt: skip

    def fits(self, plan: Plan, *, ahead: bool = False, most: bool = False) -> bool:
        """Return whether ``plan`` fits into the workers' memory; see `memory.fits`."""
        return fits(plan, self.costs, self.workers, self.memory, ahead=ahead, most=most)

    def host_items(self, plan: Plan) -> list[Item]:
        """Return what the host holds; see `memory.host_items`."""
        assert self.host is not None
        return host_items(plan, self.costs, self.host.parameters, self.workers, self.microbatches)

    def fits_host(self, plan: Plan) -> bool:
        """Return whether ``plan`` fits into the host's memory."""
        return self.host is None or total(self.host_items(plan)) <= self.host.memory

    def has_room_for(self, plan: Plan) -> bool:
        """Return whether ``plan`` fits into all memory."""
        return self.fits(plan) and self.fits_host(plan)

    def host_round(self) -> int:
        """Return the most microbatches of a round whose boundary tensors the host has room for; 0: not for the rest.

        If no round of ``workers`` fits with the inputs of every call, stages are taken that keep least of them.
        """
        assert self.host is not None
        calls, found = len(self.costs), 0
        cut = [Plan.per_call(calls, members) for members in (self.microbatches, 1)]
        for plan in (*cut, *map(self.keeping_least, cut)):
            each = boundary_bytes(plan, self.costs) // plan.round_microbatches
            room = self.host.memory - total(self.host_items(plan)) + plan.round_microbatches * each
            found = self.microbatches if each == 0 else max(0, min(self.microbatches, room // each))
            if found == self.microbatches or (plan.round_microbatches == 1 and found >= self.workers):
                break
        return found

    def period_s(self, plan: Plan, steps: int) -> float:
        """Return the mean seconds of ``steps`` steps, after as many that fill the pipeline."""
        ends = step_ends(plan, self.costs, self.workers, self.microbatches, self.rules, 2 * steps)
        return period_of_ends(ends, steps)

    def beside(self) -> list[Plan]:
        """Return the plans within the limits whose rounds run side by side; see `Plan.side_by_side`."""
        plan = Plan.single(len(self.costs), 1)
        able = self.side_by_side and self.memory is not None
        return [plan] if able and plan.side_by_side(self.workers, self.microbatches) and self.fits(plan) else []

    def ahead(self, plan: Plan) -> Plan:
        """Return ``plan`` with recomputation ahead, if it has backward stages and fits."""
        ahead = replace(plan, recompute_ahead=bool(plan.backward))
        return ahead if self.fits(ahead) else plan

    def keeping_least(self, plan: Plan) -> Plan:
        """Return ``plan`` with equal backward stages, the longest that fit when recomputed ahead: the host keeps least.

        Without a memory limit, nothing says how long they may be.
        """
        calls = plan.fused.first
        for size in range(calls, 1, -1) if self.memory is not None else ():
            backward = tuple(Span(max(0, last - size + 1), last) for last in range(calls - 1, -1, -size))
            found = replace(plan, backward=backward, recompute_ahead=True)
            if self.fits(found):
                return found
        return plan

    def unpacking_once(self, plan: Plan, *, most: bool = False) -> Plan:
        """Return ``plan`` with as many of its stages as memory has room for unpacking packed weights once.

        All of these are faster, but only memory says how many a worker can hold, so without a limit there are none.
        What is brought ahead keeps its room, and with ``most`` so does the largest arena.
        """
        if self.memory is None:
            return plan
        alone = min(plan.round_microbatches, self.microbatches) == 1  # a forward stage uses its copies once anyway
        sizes = {s.position: copies_of(s, self.costs) for s in plan.stages() if not alone or s.phase != "forward"}
        for largest in sorted({size for size in sizes.values() if size}, reverse=True):
            chosen = tuple(position for position, size in sizes.items() if 0 < size <= largest)
            found = replace(plan, unpack_once=chosen)
            if self.fits(found, ahead=True, most=most):
                return found
        return plan
