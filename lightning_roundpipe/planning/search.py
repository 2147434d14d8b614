"""A better plan than the paper's algorithm finds: many plans, judged by simulation, and the best ones improved.

The paper's algorithm fills stages up to a common length. What it cannot see: that a fused stage saves a recomputation
and may still be worth its length, that the first forward stages should be short when each step fills the pipeline anew,
that stages of unlike length do no harm when enough microbatches lie between, and that the whole is as fast as its
slowest chain of waits, not as its longest stage. So here every shape of plan is cut by a simple rule (`seeds`), timed
by the engine's own rules (`batch`), and the best of them are improved by moving single calls between stages.

The improvement is a tabu search: from a plan always to its best neighbour that was not visited yet, also when that is
worse, until nothing better was found for a while. Many plans take equally long (whatever is not on the slowest chain
can be moved freely), and a search that only climbs would stop on the first such plateau. What work is left goes to
plans of other shapes near the best ones.

A caller may know what the search leaves out, such as copies and updates. It then judges the plans that were found, and
the neighbours of the best of these.

Where the search stops is counted in work, not in seconds, so that the same question has the same answer on any machine,
however busy it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain

import numpy as np

from lightning_roundpipe.planning.batch import Pace, Sizes
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits, MemoryTable
from lightning_roundpipe.planning.memory import BESIDE, ahead_within, fits, unpacked_within
from lightning_roundpipe.planning.moves import Neighbours, kicked, recuts
from lightning_roundpipe.planning.partition import partition_within
from lightning_roundpipe.planning.pipeline import Rules, Staleness, period_of_ends, step_ends
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.seeds import seeds
from lightning_roundpipe.planning.shapes import PlanShape, plan_of, sizes_of
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.planning.timing import PERIOD_STEPS, Timing

SEARCH_SECONDS = 10.0
"""The default length of a search. It is a measure of work: no clock ends a search."""

WORK_PER_SECOND = 0.5
"""Work in estimated seconds of an ordinary core, for each second. A search where memory decides takes several times so
much, and the judge some."""
_SEEDING = 0.4
"""Share of the work for finding starts."""
_OTHERS = 0.5
"""Share of the work for each further search, if memory limits what the first one finds."""
_HOPEFUL = 1.02
"""The search skips a start whose lower bound exceeds the best time so far by this factor."""
_MOST_JUDGED = 48
"""Most plans of a search that the judge is asked about."""
_NEARBY = 0.25
"""Share of the work for timing neighbours of the best plan."""
_ALIKE = 2
"""Most neighbours that take equally long and are judged: many differ by what is not on the slowest chain."""
_CLEARLY = 1e-4
"""Candidates come in the order of their searched times. A later one must be better by more than this fraction, and so
must a neighbour."""
_NEAR = 512
"""Most neighbours that a move times; of more, a random choice."""
_CHECK_S, _CHECKED_S, _KICK_S = 100e-6, 30e-9, 300e-6
"""Estimated seconds of a check of plans' memory, of each stage in it, and of making a random plan nearby."""


@dataclass(order=True)
class _Found:
    score: float
    order: int
    shape: PlanShape = field(compare=False)
    sizes: Sizes = field(compare=False)


def search_partition(
    costs: Costs,
    workers: int,
    microbatches: int,
    limits: Limits | None = None,
    staleness: Staleness = 0,
    host: HostTime | None = None,
    search_seconds: float = SEARCH_SECONDS,
    judge: Callable[[Plan], float] | None = None,
    judged: int = 16,
) -> Plan:
    """The plan with the shortest simulated step (staleness 0) or period of steps (staleness 1) that was found.

    It is never worse than the paper's plan within the same limits (`paper_plan`) by ``judge``: the paper's plan is one
    of those that are judged. So are rounds side by side (`Limits.beside`), whose time the search does not know.

    Args:
        costs: what each call costs for one microbatch.
        workers: N.
        microbatches: M of one step.
        limits: what the plan has to keep to; by default `Limits.usual`.
        staleness: 0: a step ends before the next begins; 1: steps overlap.
        host: what the engine itself takes; by default nothing.
        search_seconds: how much work the search may be, in seconds of an ordinary core that also pay for a usual
            ``judge``; 0: nothing is searched, and the paper's plan is taken, or that of rounds side by side.
        judge: what the plan is to be best by, such as the step's time with copies and updates, which the search itself
            leaves out; the lower the better, and infinite for what cannot be taken. By default the time without them.
        judged: how many of the plans that each search finds ``judge`` is asked about, and how many near the best one.

    Raises:
        ValueError: no plan keeps to the limits, or a number makes no sense.
    """
    if not search_seconds >= 0:
        raise ValueError(f"search_seconds={search_seconds!r} must be 0 or more.")
    limits, host = limits or Limits.usual(costs, workers, microbatches), host or HostTime()
    judge = cache(judge or partial(_simulated_s, costs, workers, microbatches, Rules(staleness, host)))
    beside = limits.beside(costs, workers, microbatches)
    try:
        baseline = baseline_within(costs, workers, microbatches, limits)
    except ValueError:
        if not beside:
            raise
        return min(beside, key=judge)
    work, memory = search_seconds * WORK_PER_SECOND, limits.memory
    best = ahead_within(baseline, costs, workers, memory)
    best = min(unpacking_plans([best, *beside], costs, workers, microbatches, limits), key=judge)
    if not search_seconds:
        return best

    def search(
        most: bool, ahead: bool = True, share: float = 1.0, limits: Limits = limits, costs: Costs = costs
    ) -> list[Plan]:
        timing = Timing(Pace.of(costs, host, ahead), workers, microbatches, staleness, share * work)
        found = PlanSearch(timing, costs, limits, share * work, most).run(baseline)
        return [replace(plan, recompute_ahead=ahead and bool(plan.backward)) for plan in found[:judged]]

    # Only the judge knows what a copy costs that does not run beside a stage.
    plans = search(most=memory is None)
    if any(not plan.forward for plan in (*plans[:1], baseline)):
        plans += partly_fused(costs, workers, microbatches, limits)
    if memory is not None and (not plans or not fits(plans[0], costs, workers, memory, most=True)):
        # Memory decides: in a smaller arena, or without graphs of whole stages, stages are larger.
        roomy = fits(baseline, costs, workers, memory, most=True)
        for most, ahead in [(True, True), (False, False), (True, False)] if roomy else [(False, False)]:
            plans += search(most, ahead, _OTHERS)
    if isinstance(memory, tuple):  # where each worker does its share in what all have, more for one is no better
        plans += search(most=False, share=_OTHERS, limits=replace(limits, memory=min(memory)))
    plans = list(dict.fromkeys(plan for plan in plans if fits(plan, costs, workers, memory)))
    if memory is not None and best.unpack_once:
        for most in (True, False):
            copied = costs.holding_copies(microbatches, BESIDE if most else 1)
            with suppress(ValueError):  # the baseline does not fit beside copies
                plans += search(most, share=_OTHERS, costs=copied)
    candidates = [best, *unpacking_plans(plans, costs, workers, microbatches, limits)]
    starts = {plan.recompute_ahead: plan for plan in sorted(candidates, key=judge, reverse=True)}
    near = _near(costs, workers, microbatches, limits, staleness, host, _NEARBY * work)
    return min((descent(plan, judge, near, -(-judged // len(starts))) for plan in starts.values()), key=judge)


def _simulated_s(costs: Costs, workers: int, microbatches: int, rules: Rules, plan: Plan) -> float:
    """Return the seconds of a step from idle workers, or of each of many steps that overlap."""
    if not rules.staleness:
        return step_ends(plan, costs, workers, microbatches, rules)[0]
    return period_of_ends(step_ends(plan, costs, workers, microbatches, rules, 2 * PERIOD_STEPS), PERIOD_STEPS)


def _near(
    costs: Costs,
    workers: int,
    microbatches: int,
    limits: Limits,
    staleness: Staleness,
    host: HostTime,
    work: float,
) -> Callable[[Plan], Iterator[Plan]]:
    """Return a function that yields a plan's neighbours within the limits, the fastest by the search's times first.

    The first one is the plan itself with or without recomputation ahead. A plan that unpacks packed weights once has
    neighbours that do so, too. ``work`` is the limit in estimated seconds, for plans with recomputation ahead and
    without.
    """
    searches = {}
    for ahead in (True, False):
        timing = Timing(Pace.of(costs, host, ahead), workers, microbatches, staleness, work)
        searches[ahead] = PlanSearch(timing, costs, limits, 0.0, most=False)

    def near(plan: Plan) -> Iterator[Plan]:
        ahead = plan.recompute_ahead
        found = [replace(plan, recompute_ahead=False) if ahead else ahead_within(plan, costs, workers, limits.memory)]
        for other in chain(found, searches[ahead].near(plan)):
            once = bool(plan.unpack_once)
            yield unpacked_within(other, costs, workers, microbatches, limits.memory) if once else other

    return near


def descent(plan: Plan, judge: Callable[[Plan], float], near: Callable[[Plan], Iterator[Plan]], judged: int) -> Plan:
    """Return the plan where a descent by ``judge`` ends, which goes from ``plan`` to better and better neighbours.

    The search leaves out copies and updates. Plans that hide them better are often near the one that it finds.

    Args:
        plan: the start.
        judge: as of `search_partition`.
        near: function that yields neighbours of a plan, the most promising ones first.
        judged: how many neighbours ``judge`` is asked about.
    """
    best, others, seen = plan, near(plan), {plan}
    for _ in range(judged):
        if (found := next((other for other in others if other not in seen), None)) is None:
            break
        seen.add(found)
        if judge(found) < judge(best) * (1 - _CLEARLY):
            best, others = found, near(found)
    return best


def partly_fused(costs: Costs, workers: int, microbatches: int, limits: Limits) -> list[Plan]:
    """Return plans that fuse an eighth of the calls, two eighths, and so on.

    Where everything is fused, all updates wait for the last microbatch, which only a judge sees. Recomputing some
    layers may hide the updates of others.
    """
    found = []
    for eighths in range(1, 8):
        fewer = replace(limits, max_fused=min(limits.max_fused, len(costs) * eighths // 8))
        with suppress(ValueError):
            found.append(paper_plan(costs, workers, microbatches, fewer))
    return list(dict.fromkeys(found))


def unpacking_plans(
    plans: Iterable[Plan], costs: Costs, workers: int, microbatches: int, limits: Limits, *, ahead: bool = True
) -> list[Plan]:
    """The plans, and others that unpack packed weights once: they themselves, where ``limits`` leaves room for the
    copies, also in the smallest arena, and the paper's plan with stages that are cut for it.

    ``ahead``: whether plans may say that they recompute ahead.
    """
    found, memory = list(plans), limits.memory
    if memory is None or not any(call.unpacked_bytes for call in costs):
        return found
    choices = list(found)
    for copied in (costs.holding_copies(microbatches, stages) for stages in (BESIDE, 1)):
        with suppress(ValueError):  # a layer does not fit beside its copies
            cut = unpacked_within(
                baseline_within(copied, workers, microbatches, limits), costs, workers, microbatches, memory
            )
            choices += [cut, ahead_within(cut, costs, workers, memory)] if ahead else [cut]
    once = [
        unpacked_within(plan, costs, workers, microbatches, memory, most=most)
        for plan in choices
        for most in (True, False)
    ]
    return list(dict.fromkeys([*found, *(plan for plan in once if plan.unpack_once)]))


def baseline_within(
    costs: Costs, workers: int, microbatches: int, limits: Limits, stage_s: float | None = None
) -> Plan:
    """Return the paper's plan. Calls beyond the limit of the fused stage become a forward and a backward stage.

    ``stage_s``: most seconds of a stage for one microbatch; None: the best.

    Raises:
        ValueError: a cut at every call does not fit into memory, or a call takes longer than ``stage_s``.
    """
    plan = partition_within(
        costs, workers, microbatches, None, limits.memory, limits.min_round, stage_s, limits.max_round
    )
    if len(plan.fused) > limits.max_fused + 1:
        first = plan.fused.last - limits.max_fused
        rest = Span(plan.fused.first, first - 1)
        plan = Plan(
            (*plan.forward, rest), Span(first, plan.fused.last), (rest, *plan.backward), plan.round_microbatches
        )
    return plan


def paper_plan(costs: Costs, workers: int, microbatches: int, limits: Limits, stage_s: float | None = None) -> Plan:
    """Return `baseline_within` with recomputation ahead if memory allows it, for comparison with other plans."""
    plan = baseline_within(costs, workers, microbatches, limits, stage_s)
    return ahead_within(plan, costs, workers, limits.memory)


class PlanSearch:
    def __init__(self, timing: Timing, costs: Costs, limits: Limits, work: float, most: bool) -> None:
        self._timing, self._limits = timing, limits
        self._table = (
            None
            if limits.memory is None
            else MemoryTable(costs, timing.workers, limits.memory, timing.pace.ahead, most)
        )
        self._random = np.random.default_rng(0)
        self._seeding_ends = work * (1 - _SEEDING)
        self._count = 0
        self._recut: set[int] = set()
        """``order`` of the plans whose neighbours of other shapes have been timed."""

    def run(self, baseline: Plan) -> list[Plan]:
        """Return up to `_MOST_JUDGED` plans, best first."""
        shape, sizes = sizes_of(baseline)
        found = self._improved(sorted([*self._best(shape, np.array([sizes]), 1), *self._seeds()]))
        return [plan_of(one.shape, one.sizes.tolist()) for one in found[:_MOST_JUDGED]]

    def near(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans that differ by one move, fastest first, and few of those that take equally long."""
        shape, calls = sizes_of(plan)
        sizes, found = np.array(calls), dict[Plan, float]()
        for other, rows in chain([(shape, self._near(shape, sizes))], self._recuts(shape, sizes)):
            if not self._timing.is_over():
                found |= {plan_of(one.shape, one.sizes.tolist()): one.score for one in self._best(other, rows, _NEAR)}
        alike, last = 0, -1.0
        for near, score in sorted(found.items(), key=lambda item: item[1]):
            alike, last = (alike + 1, last) if score <= last * (1 + _CLEARLY) else (1, score)
            if alike <= _ALIKE:
                yield replace(near, recompute_ahead=plan.recompute_ahead and bool(near.backward))

    def _seeds(self) -> list[_Found]:
        """Return starts, at most two of a shape."""
        timing, found, best = self._timing, [], float("inf")
        for shape, sizes in seeds(timing.pace, timing.microbatches, self._limits, ramps=not timing.staleness):
            if timing.is_over() or timing.work_left < self._seeding_ends:
                break
            sizes = sizes[timing.least_s(shape, sizes) < best * _HOPEFUL]
            starts = self._best(shape, sizes, 2)
            found.extend(starts)
            best = min([best, *(start.score for start in starts)])
        return found

    def _improved(self, starts: list[_Found]) -> list[_Found]:
        """Search shortly from many starts, longer from the best of them, then from plans nearby until work is over."""
        ends = _distinct(starts)
        longer = ((30, 4),) if self._timing.staleness else ()
        for patience, most in ((3, 40), (12, 8), *longer):
            ends = _distinct(
                [self._tabu(start, patience) for start in ends[:most] if not self._timing.is_over()] + ends
            )
        while ends and not self._timing.is_over():
            for start in ends[:6]:
                for shape, sizes in self._around(start):
                    ends.extend(self._tabu(near, 8) for near in self._best(shape, sizes, 1))
            ends = _distinct(ends)
        return ends

    def _around(self, start: _Found) -> Iterable[tuple[PlanShape, Sizes]]:
        """Return plans of other shapes nearby: all of them the first time, later a random one."""
        if start.order in self._recut:
            self._timing.work_left -= _KICK_S  # so that a search ends where no plan nearby is allowed
            shape, sizes = kicked(start.shape, start.sizes, self._random)
            return [(shape, sizes[None])]
        self._recut.add(start.order)
        return self._recuts(start.shape, start.sizes)

    def _recuts(self, shape: PlanShape, sizes: Sizes) -> Iterator[tuple[PlanShape, Sizes]]:
        return ((near.shape, near.plans(self._chosen(len(near)))) for near in recuts(shape, sizes))

    def _chosen(self, count: int) -> Sizes:
        """Return the numbers of the plans to look at, ascending: all, or `_NEAR` of them, chosen at random."""
        return np.arange(count) if count <= _NEAR else np.sort(self._random.permutation(count)[:_NEAR])

    def _tabu(self, start: _Found, patience: int) -> _Found:
        best, here, visited, waited = start, start.sizes, {start.sizes.tobytes()}, 0
        while waited < patience and not self._timing.is_over():
            near = self._near(start.shape, here)
            if not len(near):
                break
            scores = self._timing.times(start.shape, near)
            for row in np.argsort(scores, kind="stable"):
                if near[row].tobytes() not in visited:
                    break
            else:
                break
            here = near[row]
            visited.add(here.tobytes())
            waited += 1
            if scores[row] < best.score * (1 - 1e-12):
                best, waited = self._found(scores[row], start.shape, here), 0
        return best

    def _near(self, shape: PlanShape, sizes: Sizes) -> Sizes:
        """Return at most `_NEAR` of the plan's neighbours that keep to the limits, chosen at random."""
        near = Neighbours(shape.forward, sizes, self._limits.max_fused + 1)
        if self._table is None or len(near) <= _NEAR:
            return self._allowed(shape, near.plans(self._chosen(len(near))))
        numbers, count = self._random.permutation(len(near)), 0
        found: list[Sizes] = []
        for at in range(0, len(near), _NEAR):
            if count >= _NEAR or (found and self._timing.is_over()):
                break
            found.append(self._allowed(shape, near.plans(numbers[at : at + _NEAR])))
            count += len(found[-1])
        return np.concatenate(found)[:_NEAR]

    def _allowed(self, shape: PlanShape, sizes: Sizes) -> Sizes:
        """Return the plans within the limits."""
        sizes = sizes[sizes[:, shape.forward] <= self._limits.max_fused + 1]
        if self._table is None or not len(sizes):
            return sizes
        self._timing.work_left -= _CHECK_S + _CHECKED_S * sizes.size
        return sizes[self._table.fits(shape, sizes)]

    def _best(self, shape: PlanShape, sizes: Sizes, most: int) -> list[_Found]:
        sizes = self._allowed(shape, sizes)
        if not len(sizes):
            return []
        scores = self._timing.times(shape, sizes)
        return [self._found(scores[row], shape, sizes[row]) for row in np.argsort(scores, kind="stable")[:most]]

    def _found(self, score: float, shape: PlanShape, sizes: Sizes) -> _Found:
        self._count += 1
        return _Found(float(score), self._count, shape, sizes)


def _distinct(found: list[_Found]) -> list[_Found]:
    """Return plans best first, without duplicates, and at most two of a shape: similar starts lead to the same plan."""
    kept: list[_Found] = []
    seen: set[tuple[PlanShape, bytes]] = set()
    shapes: dict[PlanShape, int] = {}
    for one in sorted(found):
        key = one.shape, one.sizes.tobytes()
        if key in seen or shapes.get(one.shape, 0) >= 2:
            continue
        seen.add(key)
        shapes[one.shape] = shapes.get(one.shape, 0) + 1
        kept.append(one)
    return kept
