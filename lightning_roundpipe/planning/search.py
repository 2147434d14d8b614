"""A better plan than the paper's algorithm finds: many plans, judged by simulation, and the best ones improved.

The paper's algorithm fills stages up to a common length. What it cannot see: that a fused stage saves a recomputation
and may still be worth its length, that the first forward stages should be short when each step fills the pipeline anew,
that stages of unlike length do no harm when enough microbatches lie between, and that the whole is as fast as its
slowest chain of waits, not as its longest stage. So here every shape of plan is cut by a simple rule (`seeds`), timed
by the engine's own rules (`batch`), and the best of them are improved by moving single calls between stages.

The improvement is a tabu search: from a plan always to its best neighbour that was not visited yet, also when that is
worse, until nothing better was found for a while. Many plans take equally long (whatever is not on the slowest chain
can be moved freely), and a search that only climbs would stop on the first such plateau.

A caller may know what the search leaves out, such as copies and updates. It then judges the plans that were found.

Where the search stops is counted in work, not in seconds, so that the same question has the same answer on any machine,
however busy it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from lightning_roundpipe.planning.batch import PERIOD_STEPS, MemoryTable, PlanShape, Sizes, Timing, plan_of, sizes_of
from lightning_roundpipe.planning.memory import BESIDE
from lightning_roundpipe.planning.partition import partition_within
from lightning_roundpipe.planning.pipeline import step_ends
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan, Span
from lightning_roundpipe.planning.seeds import round_choices, seeds

SEARCH_SECONDS = 10.0
"""The default length of a search. It is a measure of work: no clock ends a search."""

WORK_PER_SECOND = 0.5
"""Work in estimated seconds of an ordinary core, for each second. The judge takes some more."""
_SEEDING = 0.4
"""Share of the work for finding starts."""
_HOPEFUL = 1.02
"""The search skips a start whose lower bound exceeds the best time so far by this factor."""
_TABU = ((3, 40), (12, 8))
"""Steps without success that end a tabu search, and from how many of the best plans it begins, round by round."""
_RECUT = (8, 6)
"""The same for plans with a stage more or fewer than the best plans, of which the fastest is searched from."""
_NEARBY = 1.0
"""Work for timing neighbours of a plan that are judged."""
_ALIKE = 2
"""Most neighbours that take equally long and are judged: many differ by what is not on the slowest chain."""
_CLEARLY = 1e-4
"""A neighbour must be better by more than this fraction."""
_NEAR = 512
"""Most neighbours that a move times; of more, a random choice."""


def search_partition(
    problem: Problem, search_seconds: float = SEARCH_SECONDS, judge: Callable[[Plan], float] | None = None,
    judged: int = 16, also: Sequence[Plan] = (),
) -> Plan:  # fmt: skip
    """Return the plan with the shortest step (staleness 0) or period of steps (staleness 1) that was found.

    It is never worse than the paper's plan within the same limits (`paper_plan`) by ``judge``: the paper's plan is one
    of those that are judged. So are rounds side by side (`Problem.beside`), whose time the search does not know.

    Args:
        search_seconds: how much work the search may be, in seconds of an ordinary core that also pay for a usual
            ``judge``; 0: nothing is searched, and the paper's plan is taken, or that of rounds side by side.
        judge: what the plan is to be best by; the lower the better, and infinite for what cannot be taken. By default
            the simulated time by the problem's rules.
        judged: how many of the plans that are found ``judge`` is asked about.
        also: plans that may be taken where ``judge`` refuses those that are found.

    Raises:
        ValueError: no plan keeps to the limits, or a number makes no sense.
    """
    if not search_seconds >= 0:
        raise ValueError(f"search_seconds={search_seconds!r} must be 0 or more.")
    judge = cache(judge or partial(_simulated_s, problem))
    beside = problem.beside()
    try:
        baseline = baseline_within(problem)
    except ValueError:
        if not beside:
            raise
        return min(beside, key=judge)
    memory, searches = problem.memory, dict[bool, PlanSearch]()
    plans = [problem.ahead(baseline), *also, *beside]
    if not search_seconds:
        return min(unpacking_plans(plans, problem), key=judge)

    def search(ahead: bool = True, roomy: bool = False, problem: Problem = problem) -> list[Plan]:
        one = PlanSearch(Timing(problem, search_seconds * WORK_PER_SECOND, ahead=ahead), roomy=roomy)
        searches.setdefault(ahead, one)
        return one.run(baseline, judged)

    plans += (found := search())
    if any(not plan.forward for plan in (*found[:1], baseline)):
        plans += partly_fused(problem)
    if memory is not None:  # without graphs of whole stages, these are larger
        plans += search(ahead=False)
    if not found or not problem.fits(found[0], most=True):  # only the judge knows what copies cost
        plans += search(ahead=False, roomy=True) + search(roomy=True)
    if isinstance(memory, tuple):  # where each worker does its share in what all have, more for one is no better
        plans += search(problem=replace(problem, memory=min(memory)))
    if memory is not None and any(call.unpacked_bytes for call in problem.costs):
        plans += search(problem=replace(problem, costs=problem.costs.holding_copies(problem.microbatches, 1)))
    plans = [plan for plan in dict.fromkeys(plans) if problem.fits(plan)]

    def near(plan: Plan) -> Iterator[Plan]:
        for size in round_choices(problem):
            if problem.fits(other := replace(plan, round_microbatches=size)):
                yield other
        for other in searches.get(plan.recompute_ahead, searches[True]).near(plan):
            yield problem.unpacking_once(other) if plan.unpack_once else other

    return descent(min(unpacking_plans(plans, problem), key=judge), judge, near, judged)


def descent(plan: Plan, judge: Callable[[Plan], float], near: Callable[[Plan], Iterator[Plan]], judged: int) -> Plan:
    """Return the plan where a descent by ``judge`` ends, which goes from ``plan`` to better and better neighbours.

    The search leaves out copies and updates. Plans that hide them better are often near the one that it finds.
    ``near`` yields neighbours, the most promising ones first, and ``judge`` is asked about ``judged`` of them.
    """
    best, others, seen = plan, near(plan), {plan}
    for _ in range(judged):
        if (found := next((other for other in others if other not in seen), None)) is None:
            break
        seen.add(found)
        if judge(found) < judge(best) * (1 - _CLEARLY):
            best, others = found, near(found)
    return best


def _simulated_s(problem: Problem, plan: Plan) -> float:
    """Return the seconds of a step from idle workers, or of each of many steps that overlap."""
    if problem.rules.staleness:
        return problem.period_s(plan, PERIOD_STEPS)
    return step_ends(plan, problem.costs, problem.workers, problem.microbatches, problem.rules)[0]


def partly_fused(problem: Problem) -> list[Plan]:
    """Return plans that fuse an eighth of the calls, two eighths, and so on.

    Where everything is fused, all updates wait for the last microbatch, which only a judge sees. Recomputing some
    layers may hide the updates of others.
    """
    found = []
    for eighths in range(1, 8):
        most = min(problem.max_fused, len(problem.costs) * eighths // 8)
        with suppress(ValueError):
            found.append(paper_plan(replace(problem, max_fused=most)))
    return list(dict.fromkeys(found))


def unpacking_plans(plans: Iterable[Plan], problem: Problem) -> list[Plan]:
    """The plans, and others that unpack packed weights once: they themselves, where there is room for the copies, also
    in the smallest arena, and the paper's plan with stages that are cut for it.
    """
    found, costs = list(plans), problem.costs
    if problem.memory is None or not any(call.unpacked_bytes for call in costs):
        return found
    choices = list(found)
    for stages in (BESIDE, 1):
        with suppress(ValueError):  # a layer does not fit beside its copies
            holding = replace(problem, costs=costs.holding_copies(problem.microbatches, stages))
            cut = problem.unpacking_once(baseline_within(holding))
            choices += [cut, problem.ahead(cut)]
    once = [problem.unpacking_once(plan, most=most) for plan in choices for most in (True, False)]
    return list(dict.fromkeys([*found, *(plan for plan in once if plan.unpack_once)]))


def baseline_within(problem: Problem) -> Plan:
    """Return the paper's plan. Calls beyond the limit of the fused stage become a forward and a backward stage.

    Raises:
        ValueError: a cut at every call does not fit into memory.
    """
    plan, most = partition_within(problem), problem.max_fused
    if len(plan.fused) <= most + 1:
        return plan
    first = plan.fused.last - most
    rest = Span(plan.fused.first, first - 1)
    fused = Span(first, plan.fused.last)
    return Plan((*plan.forward, rest), fused, (rest, *plan.backward), plan.round_microbatches)


def paper_plan(problem: Problem) -> Plan:
    """Return `baseline_within` with recomputation ahead if memory allows it, for comparison with other plans."""
    return problem.ahead(baseline_within(problem))


@dataclass(order=True)
class _Found:
    score: float
    order: int
    shape: PlanShape = field(compare=False)
    sizes: Sizes = field(compare=False)


class PlanSearch:
    """Searches plans by the times and the work of ``timing``.

    ``roomy``: whether the arena is as large as is of use, so that weights come while the stage before runs.
    """

    def __init__(self, timing: Timing, *, roomy: bool = False) -> None:
        problem, self._table = timing.problem, None
        self._timing, self._max_fused, memory = timing, problem.max_fused, problem.memory
        if memory is not None:
            self._table = MemoryTable(problem.costs, problem.workers, memory, ahead=timing.ahead, most=roomy)
        self._random = np.random.default_rng(0)
        self._seeding_ends = timing.work_left * (1 - _SEEDING)
        self._count = 0

    def run(self, baseline: Plan, most: int) -> list[Plan]:
        """Return at most so many plans, best first."""
        shape, sizes = sizes_of(baseline)
        ends = _distinct([*self._best(shape, sizes[None], 1), *self._starts()])
        for patience, starts in _TABU:
            ends = _distinct(
                [self._tabu(start, patience) for start in ends[:starts] if not self._timing.is_over()] + ends
            )
        patience, starts = _RECUT
        done = set[int]()
        while (start := next((one for one in ends[:starts] if one.order not in done), None)) is not None:
            done.add(start.order)
            for near, rows in recuts(start.shape, start.sizes):
                ends += [self._tabu(one, patience) for one in self._best(near, self._chosen(rows), 1)]
            ends = _distinct(ends)
            if self._timing.is_over():
                break
        plans = [plan_of(one.shape, one.sizes) for one in ends[:most]]
        return [replace(plan, recompute_ahead=self._timing.ahead and bool(plan.backward)) for plan in plans]

    def near(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans that differ by one move, fastest first, and few of those that take equally long."""
        shape, sizes = sizes_of(plan)
        self._timing.work_left = _NEARBY
        found = self._best(shape, self._near(shape, sizes), _NEAR)
        for other, rows in recuts(shape, sizes):
            found += self._best(other, self._chosen(rows), _NEAR)
        alike, last = 0, -1.0
        for one in sorted(found):
            alike, last = (alike + 1, last) if one.score <= last * (1 + _CLEARLY) else (1, one.score)
            if alike <= _ALIKE:
                near = plan_of(one.shape, one.sizes)
                yield replace(near, recompute_ahead=plan.recompute_ahead and bool(near.backward))

    def _starts(self) -> list[_Found]:
        """Return starts, at most two of a shape."""
        timing, found, best = self._timing, list[_Found](), float("inf")
        for shape, sizes in seeds(timing):
            if timing.is_over() or timing.work_left < self._seeding_ends:
                break
            sizes = sizes[timing.least_s(shape, sizes) < best * _HOPEFUL]
            starts = self._best(shape, sizes, 2)
            found.extend(starts)
            best = min([best, *(start.score for start in starts)])
        return found

    def _tabu(self, start: _Found, patience: int) -> _Found:
        best, here, visited, waited = start, start.sizes, {start.sizes.tobytes()}, 0
        while waited < patience and not self._timing.is_over():
            near = self._near(start.shape, here)
            scores = self._timing.times(start.shape, near) if len(near) else np.zeros(0)
            order = np.argsort(scores, kind="stable")
            if (row := next((row for row in order if near[row].tobytes() not in visited), None)) is None:
                break
            here = near[row]
            visited.add(here.tobytes())
            waited += 1
            if scores[row] < best.score * (1 - 1e-12):
                best, waited = self._found(scores[row], start.shape, here), 0
        return best

    def _near(self, shape: PlanShape, sizes: Sizes) -> Sizes:
        """Return at most `_NEAR` of the plan's neighbours that keep to the limits, chosen at random."""
        moves = neighbours(shape.forward, sizes, self._max_fused + 1)
        count, numbers = 0, self._chosen(np.arange(len(moves[0])), len(moves[0]))
        found = [sizes[None][:0]]
        for at in range(0, len(numbers), _NEAR):
            if count >= _NEAR or (count and self._timing.is_over()):
                break
            found.append(self._allowed(shape, moved(shape.forward, sizes, moves[:, numbers[at : at + _NEAR]])))
            count += len(found[-1])
        return np.concatenate(found)[:_NEAR]

    def _chosen(self, rows: Sizes, most: int = _NEAR) -> Sizes:
        """Return all rows, or so many in random order if there are more than `_NEAR`."""
        return rows if len(rows) <= _NEAR else self._random.permutation(rows)[:most]

    def _allowed(self, shape: PlanShape, sizes: Sizes) -> Sizes:
        """Return the plans within the limits."""
        sizes = sizes[sizes[:, shape.forward] <= self._max_fused + 1]
        if self._table is None or not len(sizes):
            return sizes
        self._timing.take_check(sizes)
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


def neighbours(forward: int, sizes: Sizes, most: int) -> Sizes:
    """Return the plans that differ by one call as columns of changes: a stage, its change, another stage, its change.

    A call moves between any two stages of a pass, or the fused stage takes a call from each pass or gives one to each.
    ``forward``: number of forward stages. ``most``: largest number of calls in the fused stage.
    """
    stages, fused = np.arange(len(sizes)), sizes[forward]
    one, other = (grid.ravel() for grid in np.meshgrid(stages, stages, indexing="ij"))
    one_is_ahead, other_is_ahead = one < forward, other < forward
    passes = (one != forward) & (other != forward)
    within = passes & (one_is_ahead == other_is_ahead) & (one != other) & (sizes[one] > 1)
    across = passes & one_is_ahead & ~other_is_ahead
    takes = across & (sizes[one] > 1) & (sizes[other] > 1) & (fused < most)
    gives = across & (fused > 1)
    kinds = ((within, -1, 1), (takes, -1, -1), (gives, 1, 1))
    return np.concatenate(
        [
            np.stack([one[kind], np.full(kind.sum(), first), other[kind], np.full(kind.sum(), second)])
            for kind, first, second in kinds
        ],
        axis=1,
    )


def moved(forward: int, sizes: Sizes, moves: Sizes) -> Sizes:
    """Return the sizes of plans with changes as `neighbours` returns them, (plans, stages)."""
    one, first, other, second = moves
    rows, at = np.repeat(sizes[None], len(one), axis=0), np.arange(len(one))
    rows[at, one] += first
    rows[at, other] += second
    rows[:, forward] -= np.where(first == second, first, 0)
    return rows


def recuts(shape: PlanShape, sizes: Sizes) -> Iterator[tuple[PlanShape, Sizes]]:
    """Yield plans in which a stage of one pass merges into another, or half of one becomes a new stage."""
    fused = shape.forward
    for part, change in ((slice(0, fused), (1, 0)), (slice(fused + 1, len(sizes)), (0, 1))):
        before, stages, after = (sizes[at].tolist() for at in (slice(part.start), part, slice(part.stop, None)))
        merged, split = [], []
        for one, calls in enumerate(stages):
            others = [*stages[:one], *stages[one + 1 :]]
            merged += [[*others[:to], others[to] + calls, *others[to + 1 :]] for to in range(len(others))]
            if calls > 1:
                rest = [*stages[:one], calls - calls // 2, *stages[one + 1 :]]
                split += [[*rest[:at], calls // 2, *rest[at:]] for at in range(len(rest) + 1)]
        for rows, sign in ((merged, -1), (split, 1)):
            if rows:
                forward, backward = (sign * one for one in change)
                near = PlanShape(fused + forward, shape.backward + backward, shape.round_microbatches)
                yield near, np.array([[*before, *row, *after] for row in rows])


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
