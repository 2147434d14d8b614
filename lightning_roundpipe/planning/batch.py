"""Times and memory of many plans at once, for the search. All have one shape: the stages of each pass, and the round.

The rules of time are those of `pipeline`, without copies and updates. The simulation computes only the first and the
last turn of each slot. With ``d`` a turn's length, ``left[m]`` when its microbatch left the stage before, and ``lead``
how much of the turn may come before that (the recomputation),

    end[m] = max(end[m - 1], left[m] - lead) + d    so, over all turns,
    end[m] = max(free + (m + 1) d, left[j] - lead + (m - j + 1) d for each j up to m)

If the ends of a slot are convex in m, as those of a first stage are, ``left[j] - j d`` is largest at j = 0 or j = m. A
maximum of convex rows is convex. So the last end of a slot follows from the first and the last end of the stage before,
for any number of microbatches. The first stage of a step follows the last stage of the step before in the same way.

Two simplifications can make a plan look slower, never faster. A recomputation begins only after all forward stages,
which matters if a stage recomputes for longer than all stages before it compute. With unequal workers, these stages
count as run by the fastest worker. The interpreter is left out: if it limits steps, it limits those of all plans alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.costs import Costs, Phase, StageBytes, for_each
from lightning_roundpipe.planning.memory import Memory, arenas, between_bytes, layer_arena, waiting, waiting_at
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan, Span

Floats = NDArray[np.float64]
Sizes = NDArray[np.int64]
"""Plans of one shape, a row each: calls per forward stage, of the fused stage, per backward stage (deepest first)."""

PERIOD_STEPS = 16
"""Number of steps whose mean is the period, after as many that fill the pipeline."""

_BATCH = 1024
"""Most plans timed together, which is many for numpy's overhead."""
_CALL_S, _SLOT_S, _PLAN_S = 400e-6, 8e-6, 50e-9
"""Estimated seconds of a batch, of each of its slots, and of each slot of each plan."""
_CHECK_S, _CHECKED_S = 100e-6, 30e-9
"""Estimated seconds of a check of plans' memory, and of each stage in it."""
_SEARCH_SLOTS = 160
"""Slots to simulate for a period while searching: the fewer slots a step has, the more steps it takes to settle."""
_DRAIN = 1e-3
"""Of two plans with nearly the same period, the one with the shorter step is better: as if every 1000 steps drained."""
_AT_ONCE = 6144
"""Stages whose memory is looked up at once. Larger arrays come from the system each time, which takes three times as
long."""


@dataclass(frozen=True, order=True)
class PlanShape:
    """Numbers of forward stages, backward stages, and microbatches of a round."""

    forward: int
    backward: int
    round_microbatches: int


def plan_of(shape: PlanShape, sizes: Sequence[int] | Sizes) -> Plan:
    """Return the plan of a row of `Sizes`."""
    starts, ends = _stage_ends(shape.forward, np.array([sizes]))
    spans = [Span(int(start), int(end) - 1) for start, end in zip(starts[0], ends[0], strict=True)]
    forward = shape.forward
    return Plan(tuple(spans[:forward]), spans[forward], tuple(spans[forward + 1 :]), shape.round_microbatches)


def sizes_of(plan: Plan) -> tuple[PlanShape, Sizes]:
    """Return shape and sizes of a plan: the inverse of `plan_of`."""
    shape = PlanShape(len(plan.forward), len(plan.backward), plan.round_microbatches)
    return shape, np.array([len(span) for span in (*plan.forward, plan.fused, *plan.backward)])


def _stage_ends(forward: int, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Return the first call of every stage, and the call after its last, (plans, stages) each."""
    upwards = np.cumsum(sizes[:, : forward + 1], axis=1)
    downwards = upwards[:, forward : forward + 1] - np.cumsum(sizes[:, forward:], axis=1)
    starts = np.concatenate([upwards - sizes[:, : forward + 1], downwards[:, 1:]], axis=1)
    ends = np.concatenate([upwards, downwards[:, :-1]], axis=1)
    return starts, ends


class Pace(NamedTuple):
    """Seconds on a worker: sums over the calls of a microbatch before each call and over all calls, (calls + 1,)."""

    forward: Floats
    fused: Floats
    recompute: Floats
    backward: Floats

    @classmethod
    def of(cls, costs: Costs, carried: int | None = None) -> Pace:
        """Return the pace of calls that take ``costs``. ``carried``: see `Timing`."""
        forward = [call.forward_s for call in costs]
        again = [call.forward_s if carried is None else call.recompute_s(carried) for call in costs]
        recompute = [seconds if call.needs_backward else 0.0 for call, seconds in zip(costs, again, strict=True)]
        backward = [call.backward_s if call.needs_backward else 0.0 for call in costs]
        fused = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(*(np.concatenate([[0.0], np.cumsum(times)]) for times in (forward, fused, recompute, backward)))


class _Turns(NamedTuple):
    """What turns take on a worker, in seconds.

    Attributes:
        length: length of a turn, (stages, plans).
        lead: the part of a turn that may run before the microbatch arrives, (stages, plans).
        behind_loss: the part of a fused turn after its loss is known, (plans,).
    """

    length: Floats
    lead: Floats
    behind_loss: Floats


class Timing:
    """Times plans within a budget of work, which is counted and not measured.

    With staleness 0, the time of a plan is that of one step; with 1, the mean of many steps.

    Args:
        work: limit of the search in estimated seconds.
        ahead: whether recomputation may run before the gradient is there.
        carried: least FLOPs a byte of the products that all calls carry; None: none do.

    Attributes:
        pace: of the mean worker.
        each: of every worker. Equal workers share one object.
    """

    def __init__(self, problem: Problem, work: float, *, ahead: bool = True, carried: int | None = None) -> None:
        costs, workers = problem.costs, problem.workers
        self.pace = Pace.of(costs, carried)
        self.each = for_each([costs.on(worker) for worker in range(workers)], lambda one: Pace.of(one, carried))
        self.problem, self.ahead, self.work_left = problem, ahead, work
        self._hop_s = problem.rules.host.hop_s if workers > 1 else 0.0

    def is_over(self) -> bool:
        """Return whether the work is used up."""
        return self.work_left <= 0

    def take_check(self, sizes: Sizes) -> None:
        """Count the work of a check of plans' memory."""
        self.work_left -= _CHECK_S + _CHECKED_S * sizes.size

    def least_s(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """Return a lower bound of the plans' seconds, (plans,): their work divided by the number of workers."""
        pace, first = self.pace, len(self.pace.fused) - 1 - sizes[:, shape.forward]
        calls = pace.forward[first] + pace.fused[-1] - pace.fused[first] + pace.recompute[first] + pace.backward[first]
        return np.asarray(calls * (self.problem.microbatches / self.problem.workers))

    def times(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """Return the seconds by which the search compares plans, (plans,); infinite when the work is used up."""
        size, microbatches = shape.round_microbatches, self.problem.microbatches
        rounds = [min(size, microbatches - begin) for begin in range(0, microbatches, size)]
        slots, steps = sizes.shape[1] * len(rounds), 1
        if self.problem.rules.staleness:
            steps = max(6, min(2 * PERIOD_STEPS, 2 * (_SEARCH_SLOTS // slots)))
        times = []
        for begin in range(0, len(sizes), _BATCH):
            part = sizes[begin : begin + _BATCH]
            if self.is_over():
                times.append(np.full(len(part), np.inf))
                continue
            ends = self._step_ends(shape.forward, part, rounds, steps)
            self.work_left -= _CALL_S + steps * slots * (_SLOT_S + _PLAN_S * len(part))
            half = steps // 2
            times.append((ends[-1] - ends[-1 - half]) / half + _DRAIN * ends[0] if half else ends[0])
        return np.concatenate(times)

    def _step_ends(self, forward: int, sizes: Sizes, rounds: Sequence[int], steps: int) -> Floats:
        """Return the end of each step, (steps, plans). ``rounds``: numbers of microbatches."""
        starts, ends = _stage_ends(forward, sizes)
        firsts = starts[:, forward:]  # of the fused stage and the backward stages
        since = None
        if self.ahead:
            since = np.minimum.reduce(for_each(self.each, lambda one: self._since(one, firsts)))
        each = for_each(self.each, lambda one: _turns(one, forward, starts, ends, since))
        hop, workers, stages, plans = self._hop_s, self.problem.workers, sizes.shape[1], len(sizes)

        def times(turns: _Turns) -> tuple[Floats, Floats, dict[int, Floats]]:
            length = turns.length
            comes = length - turns.lead + hop  # from a microbatch's end in the stage before to its own, without waiting
            return length, comes, {members: length * (members - 1) for members in set(rounds)}  # to the last turn's end

        of_workers = for_each(each, times)
        unequal = any(turns is not each[0] for turns in each)
        free = [np.zeros(plans) for _ in range(workers)]
        found = np.empty((steps, plans))
        begin = behind_loss = np.zeros(plans)
        through = [(begin, begin)] * len(rounds)  # ends of each round's first and last microbatch in the step before
        slot = 0
        for step in range(steps):
            if unequal:  # as in `pipeline`
                slot += -slot % workers
            closed: list[Floats] = []
            for round_, members in enumerate(rounds):
                before, closed = closed, []
                first = last = begin
                for s in range(stages):
                    worker = slot % workers
                    length, comes, behind = of_workers[worker]
                    ready = free[worker]
                    if before:
                        ready = np.maximum(ready, before[s])
                    if s:
                        first = np.maximum(ready + length[s], first + comes[s])
                        last = np.maximum(first + behind[members][s], last + comes[s])
                    else:
                        first = np.maximum(np.maximum(ready, begin), through[round_][0]) + length[0]
                        last = np.maximum(first + behind[members][0], through[round_][1] + length[0])
                    if s == forward:
                        behind_loss = each[worker].behind_loss
                    free[worker] = last
                    closed.append(last)
                    slot += 1
                through[round_] = first, last
            found[step] = np.maximum.reduce(closed)
            begin = closed[forward] - behind_loss
        return found

    def _since(self, pace: Pace, firsts: Sizes) -> Floats:
        """Return the time since a microbatch left the forward stages, (plans, backward stages)."""
        backward = pace.backward[firsts]
        elapsed = np.empty(backward.shape)
        elapsed[:, 0] = pace.fused[-1] - pace.fused[firsts[:, 0]]
        np.subtract(backward[:, :-1], backward[:, 1:], out=elapsed[:, 1:])
        elapsed += self._hop_s
        return np.cumsum(elapsed[:, :-1], axis=1)


def _turns(pace: Pace, forward: int, starts: Sizes, ends: Sizes, since: Floats | None) -> _Turns:
    firsts, behind = starts.T, ends.T
    length, lead = np.empty(firsts.shape), np.zeros(firsts.shape)
    length[:forward] = pace.forward[behind[:forward]] - pace.forward[firsts[:forward]]
    length[forward] = pace.fused[-1] - pace.fused[firsts[forward]]
    recompute = pace.recompute[behind[forward + 1 :]] - pace.recompute[firsts[forward + 1 :]]
    length[forward + 1 :] = recompute + pace.backward[behind[forward + 1 :]] - pace.backward[firsts[forward + 1 :]]
    if since is not None:
        np.minimum(recompute, since.T, out=lead[forward + 1 :])
    return _Turns(length, lead, pace.backward[-1] - pace.backward[firsts[forward]])


class MemoryTable:
    """Bytes of every possible stage, to check the memory of a batch of plans at once.

    ``ahead``: whether backward stages recompute ahead. ``most``: whether the arena is as large as is of use, instead of
    as small as possible.
    """

    def __init__(self, costs: Costs, workers: int, memory: Memory, *, ahead: bool = False, most: bool = False) -> None:
        self._workers, self._memory, self._most, self._layer = workers, memory, most, layer_arena(costs)
        self._between = between_bytes(costs, workers)
        self._waiting = [np.array(sizes) for sizes in waiting_at(costs)]
        self._needs = {phase: _needs(costs, phase, ahead and phase == "backward") for phase in get_args(Phase)}

    def fits(self, shape: PlanShape, sizes: Sizes) -> NDArray[np.bool_]:
        """Return which of the plans fit, (plans,), by the sum of `memory.device_bytes`. Rows of ``sizes`` are plans."""
        rows = max(1, _AT_ONCE // sizes.shape[1])
        return np.concatenate([self._fits(shape, sizes[at : at + rows]) for at in range(0, len(sizes) or 1, rows)])

    def _fits(self, shape: PlanShape, sizes: Sizes) -> NDArray[np.bool_]:
        forward, workers = shape.forward, self._workers
        starts, ends = _stage_ends(forward, sizes)
        parts = (slice(0, forward), slice(forward, forward + 1), slice(forward + 1, None))
        tables = zip(self._needs.values(), parts, strict=True)
        needs = [table[:, starts[:, part], ends[:, part] - 1] for table, part in tables]
        weights, gradients, activations = np.concatenate(needs, axis=2)
        before, behind = self._waiting
        left = np.concatenate([before[ends[:, :forward]], behind[starts[:, forward:]]], axis=1)
        activations += self._between + waiting(left, workers, shape.round_microbatches)
        of_stages = arenas(weights, gradients, workers)[self._most]
        fitting = np.ones(len(sizes), dtype=np.bool_)
        for part, memory in self._parts(sizes.shape[1]):
            arena = np.maximum(of_stages[:, part].max(axis=1), self._layer)
            fitting &= arena + activations[:, part].max(axis=1) <= memory
        return fitting

    def _parts(self, stages: int) -> list[tuple[slice, int]]:
        """Return the stages that run on the same workers, with the least memory of these. See `memory.of_worker`."""
        if isinstance(self._memory, int):
            return [(slice(None), self._memory)]
        every = math.gcd(stages, self._workers)
        return [(slice(first, None, every), min(self._memory[first::every])) for first in range(every)]


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
