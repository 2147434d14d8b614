"""A better plan than the paper's algorithm finds: many plans, judged by simulation, and the best ones improved.

The paper's algorithm fills stages up to a common length. What it cannot see: that a fused stage saves a recomputation
and may still be worth its length, that the first forward stages should be short when each step fills the pipeline anew,
that stages of unlike length do no harm when enough microbatches lie between, and that the whole is as fast as its
slowest chain of waits, not as its longest stage. So here every shape of plan is cut by a simple rule (`seeds`), timed
by the engine's own rules (`batch`), and the best of them are improved by moving single calls between stages.

The improvement is a tabu search: from a plan always to its best neighbour that was not visited yet, also when that is
worse, until nothing better was found for a while. Many plans take equally long (whatever is not on the slowest chain
can be moved freely), and a search that only climbs would stop on the first such plateau.

Where the search stops is counted in work, not in seconds, so that the same question has the same answer; the clock only
ends what takes far longer than expected. The paper's plan is among the candidates, so the result is never worse.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lightning_roundpipe.planning.batch import Floats, Pace, Sizes, stage_times, step_ends
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.limits import Limits, MemoryTable
from lightning_roundpipe.planning.memory import partition_within
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.seeds import Shape, seeds
from lightning_roundpipe.planning.simulate import HostTime
from lightning_roundpipe.planning.span import Span

Staleness = Literal[0, 1]

SEARCH_SECONDS = 10.0
"""The default limit. The work that goes with it takes about a third of it, so a slow machine does it all as well."""

PERIOD_STEPS = 16
"""The period is the mean over so many steps, after as many that fill the pipeline."""

_WORK_PER_SECOND = 0.3
"""Work, in estimated seconds of an ordinary core, that is done for each second allowed."""
_SLOT_S, _TURN_S = 12e-6, 2.2e-9
"""Estimated seconds of one slot of a batch, and more for each turn of each plan in it."""

_BATCH = 256
"""Plans that are timed together: enough to make numpy's own time small, few enough to stay in the cache."""
_SEARCH_SLOTS = 160
"""Slots to simulate for a period while searching: short steps settle later, counted in steps."""
_DRAIN = 1e-3
"""Of two plans with nearly the same period, the one with the shorter step is better: as if every 1000 steps drained."""


@dataclass(order=True)
class _Found:
    score: float
    order: int
    shape: Shape = field(compare=False)
    sizes: Sizes = field(compare=False)


def search_partition(
    costs: Costs,
    workers: int,
    microbatches: int,
    limits: Limits | None = None,
    staleness: Staleness = 0,
    host: HostTime | None = None,
    search_seconds: float = SEARCH_SECONDS,
) -> Plan:
    """The plan with the shortest simulated step (staleness 0) or period of steps (staleness 1) that was found.

    Args:
        costs: what each call costs for one microbatch.
        workers: N.
        microbatches: M of one step.
        limits: what the plan has to keep to; by default `Limits.usual`.
        staleness: 0: a step ends before the next begins; 1: steps overlap.
        host: what the engine itself takes; by default nothing.
        search_seconds: at most so long; 0 gives the better of the paper's plan and the rules' first few.

    Raises:
        ValueError: no plan keeps to the limits, or a number makes no sense.
    """
    if not search_seconds >= 0:
        raise ValueError(f"search_seconds={search_seconds!r} must be 0 or more.")
    limits = limits or Limits.usual(costs, workers, microbatches)
    baseline = baseline_within(costs, workers, microbatches, limits)
    search = _Search(costs, workers, microbatches, limits, staleness, host or HostTime(), search_seconds)
    plans = [baseline, *search.run()]
    times = [search.time_s(plan) for plan in plans]
    return plans[times.index(min(times))]


def baseline_within(costs: Costs, workers: int, microbatches: int, limits: Limits) -> Plan:
    """The paper's plan, with what its fused stage holds too much moved to stages of their own.

    Raises:
        ValueError: not even a cut at every call fits into memory.
    """
    plan = partition_within(costs, workers, microbatches, None, limits.memory)
    if len(plan.fused) > limits.max_fused + 1:
        first = plan.fused.last - limits.max_fused
        rest = Span(plan.fused.first, first - 1)
        plan = Plan((*plan.forward, rest), Span(first, plan.fused.last), (rest, *plan.backward), microbatches)
    return plan


def plan_of(shape: Shape, sizes: Sequence[int]) -> Plan:
    """The plan that a row of ``Sizes`` means."""
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


def sizes_of(plan: Plan) -> tuple[Shape, list[int]]:
    """The inverse of `plan_of`."""
    shape = Shape(len(plan.forward), len(plan.backward), plan.round_microbatches)
    return shape, [len(span) for span in (*plan.forward, plan.fused, *plan.backward)]


class _Search:
    def __init__(
        self,
        costs: Costs,
        workers: int,
        microbatches: int,
        limits: Limits,
        staleness: Staleness,
        host: HostTime,
        seconds: float,
    ) -> None:
        self._costs, self._workers, self._microbatches, self._limits = costs, workers, microbatches, limits
        self._staleness = staleness
        self._pace = Pace.of(costs, host.call_s, host.turn_s, host.hop_s)
        self._table = None if limits.memory is None else MemoryTable(costs, limits.memory)
        self._random = np.random.default_rng(0)
        self._work = seconds * _WORK_PER_SECOND
        self._deadline = time.monotonic() + seconds
        self._count = 0

    def run(self) -> list[Plan]:
        """The best plans found, best first."""
        starts = self._seeds()
        ends = self._improve(starts)
        best: dict[bytes, _Found] = {}
        for found in sorted([*ends, *starts[:8]]):
            best.setdefault(found.sizes.tobytes() + bytes([found.shape.forward % 251]), found)
        return [plan_of(found.shape, found.sizes.tolist()) for found in list(best.values())[:16]]

    def time_s(self, plan: Plan) -> float:
        """What a plan is judged by in the end, over enough steps to settle."""
        shape, sizes = sizes_of(plan)
        return float(self._times(shape, np.array([sizes]), 2 * PERIOD_STEPS)[0])

    def _seeds(self) -> list[_Found]:
        found: list[_Found] = []
        for shape, sizes in seeds(self._pace, self._microbatches, self._limits, ramps=not self._staleness):
            found.extend(self._best(shape, sizes, 2))
            if self._is_over():
                break
        return sorted(found)

    def _improve(self, starts: list[_Found]) -> list[_Found]:
        """Short searches from many starts, then longer ones from those that came farthest."""
        ends = starts
        for patience, most in ((3, 48), (12, 12), (40, 6), (120, 3)):
            ends = sorted([self._tabu(start, patience) for start in ends[:most] if not self._is_over()] + ends)
            ends = _distinct(ends)
        return ends

    def _tabu(self, start: _Found, patience: int) -> _Found:
        best, here, visited, waited = start, start.sizes, {start.sizes.tobytes()}, 0
        while waited < patience and not self._is_over():
            near = self._neighbours(start.shape, here)
            for step in self._best(start.shape, near, len(near)):
                if step.sizes.tobytes() not in visited:
                    break
            else:
                break
            here = step.sizes
            visited.add(here.tobytes())
            waited += 1
            if step.score < best.score * (1 - 1e-12):
                best, waited = step, 0
        return best

    def _neighbours(self, shape: Shape, sizes: Sizes) -> Sizes:
        near = neighbours(shape.forward, sizes)
        near = near[near[:, shape.forward] <= self._limits.max_fused + 1]
        if len(near) > 2 * _BATCH:
            near = near[np.sort(self._random.permutation(len(near))[: 2 * _BATCH])]
        return near

    def _best(self, shape: Shape, sizes: Sizes, most: int) -> list[_Found]:
        if self._table is not None:
            sizes = sizes[self._table.fits(shape.forward, sizes)]
        if not len(sizes):
            return []
        scores = self._times(shape, sizes)
        found = []
        for row in np.argsort(scores, kind="stable")[:most]:
            self._count += 1
            found.append(_Found(float(scores[row]), self._count, shape, sizes[row]))
        return found

    def _times(self, shape: Shape, sizes: Sizes, steps: int | None = None) -> Floats:
        rounds = [
            min(shape.round_microbatches, self._microbatches - begin)
            for begin in range(0, self._microbatches, shape.round_microbatches)
        ]
        slots = sizes.shape[1] * len(rounds)
        if not self._staleness:
            steps = 1
        elif steps is None:
            steps = max(6, min(2 * PERIOD_STEPS, 2 * (_SEARCH_SLOTS // slots)))
        times = []
        for begin in range(0, len(sizes), _BATCH):
            part = sizes[begin : begin + _BATCH]
            length, lead = stage_times(self._pace, shape.forward, part)
            ends = step_ends(length, lead, self._pace.hop_s, self._workers, rounds, steps)
            self._work -= steps * slots * (_SLOT_S + _TURN_S * max(rounds) * len(part))
            if steps == 1:
                times.append(ends[0])
            else:
                half = steps // 2
                times.append((ends[-1] - ends[-1 - half]) / half + _DRAIN * ends[0])
        return np.concatenate(times)

    def _is_over(self) -> bool:
        return self._work <= 0 or time.monotonic() > self._deadline


def neighbours(forward: int, sizes: Sizes) -> Sizes:
    """All plans of the same shape in which one call more or less is in a stage; rows may have too large a fused stage.

    A call moves from one stage of a pass to another one of the pass, however far: the calls between move by one. Or the
    fused stage takes one from each pass, or gives one to each.
    """
    ahead, behind = np.arange(forward), np.arange(forward + 1, len(sizes))
    moves = [np.stack([a, b]) for a, b in ((_pairs(ahead)), (_pairs(behind))) if len(a)]
    rows = []
    for source, target in moves:
        near = np.repeat(sizes[None], len(source), axis=0)
        at = np.arange(len(source))
        near[at, source] -= 1
        near[at, target] += 1
        rows.append(near)
    if forward and len(behind):
        one, other = (grid.ravel() for grid in np.meshgrid(ahead, behind))
        at = np.arange(len(one))
        for taken in (1, -1):
            near = np.repeat(sizes[None], len(one), axis=0)
            near[at, one] -= taken
            near[at, other] -= taken
            near[:, forward] += taken
            rows.append(near)
    if not rows:
        return np.empty((0, len(sizes)), dtype=np.int64)
    near = np.concatenate(rows)
    return near[(near >= 1).all(axis=1)]


def _pairs(stages: Sizes) -> tuple[Sizes, Sizes]:
    source, target = (grid.ravel() for grid in np.meshgrid(stages, stages))
    return source[source != target], target[source != target]


def _distinct(found: list[_Found]) -> list[_Found]:
    """Without the same plan twice, and at most two of a shape: a start nearby would only come to the same end."""
    kept: list[_Found] = []
    seen: set[tuple[Shape, bytes]] = set()
    shapes: dict[Shape, int] = {}
    for one in found:
        key = one.shape, one.sizes.tobytes()
        if key in seen or shapes.get(one.shape, 0) >= 2:
            continue
        seen.add(key)
        shapes[one.shape] = shapes.get(one.shape, 0) + 1
        kept.append(one)
    return kept
