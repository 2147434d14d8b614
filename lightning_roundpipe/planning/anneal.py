"""Simulated annealing of a plan: random moves, taken if they make the plan faster, and at first also if they do not.

The tabu search in `search` simulates all neighbours of a plan for one move, in batches of plans with equally many
stages. With many stages it misses better plans: a step takes as long as the longest sum of a worker's stages, and
equalising these sums takes several moves, through plans that are slower. Annealing simulates one plan per move, by the
rules of `batch` for one step from idle workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from lightning_roundpipe.planning.batch import Pace
from lightning_roundpipe.planning.shapes import PlanShape

_HOT, _COLD = 3e-3, 3e-5
"""First and last temperature, as a fraction of the first plan's time."""

EVALUATION_S, SLOT_S = 8e-6, 0.9e-6
"""Estimated seconds of a move, and of each slot in its simulation."""


class PlanTimer:
    """Simulates one step of a single plan, from idle workers.

    Args:
        pace: seconds of calls and turns.
        workers: number of workers.
    """

    def __init__(self, pace: Pace, workers: int) -> None:
        self._hop_s, self._ahead = pace.hop_s if workers > 1 else 0.0, pace.ahead
        each = pace.each(workers)
        self._paces = [_Sums(one) for one in {id(one): one for one in each}.values()]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(map(id, each)))}
        self._kinds = [numbers[id(one)] for one in each]
        """Index into ``_paces`` for each worker."""

    def __call__(self, forward: int, sizes: Sequence[int], rounds: Sequence[int]) -> float:
        """Return the seconds of a step; see `batch.step_ends`.

        Args:
            forward: number of forward stages.
            sizes: calls of each stage, as in `batch.Sizes`.
            rounds: number of microbatches of each round.
        """
        kinds = self._turns(forward, sizes)
        each = [kinds[kind] for kind in self._kinds]
        workers, stages = len(each), range(len(sizes))
        free = [0.0] * workers
        closed = [0.0] * len(stages)
        slot = 0
        for members in rounds:
            first = last = 0.0
            for stage in stages:
                worker = slot % workers
                length, comes = each[worker][stage]
                ready = free[worker]
                if closed[stage] > ready:
                    ready = closed[stage]
                first = ready + length if not stage or ready + length > first + comes else first + comes
                behind = first + length * (members - 1)
                last = behind if not stage or behind > last + comes else last + comes
                free[worker] = closed[stage] = last
                slot += 1
        return max(closed)

    def _turns(self, forward: int, sizes: Sequence[int]) -> list[list[tuple[float, float]]]:
        """Return two times of a turn, by pace and stage.

        The first is its length. The second is the time from the microbatch's end in the stage before to the turn's end.
        """
        hop_s = self._hop_s
        kinds = []
        begin = sum(sizes[:forward])
        for pace in self._paces:
            turns, first = [], 0
            for size in sizes[:forward]:
                length = pace.forward[first + size] - pace.forward[first] + pace.turn_s
                turns.append((length, length + hop_s))
                first += size
            length = pace.fused[-1] - pace.fused[begin] + pace.turn_s
            turns.append((length, length + hop_s))
            kinds.append(turns)
        end = begin
        since = min(pace.fused[-1] - pace.fused[begin] for pace in self._paces) + hop_s
        for size in sizes[forward + 1 :]:
            begin, least = end - size, math.inf
            for pace, turns in zip(self._paces, kinds, strict=True):
                recompute = pace.recompute[end] - pace.recompute[begin]
                backward = pace.backward[end] - pace.backward[begin]
                length = recompute + backward + pace.turn_s
                turns.append((length, length + hop_s - (min(recompute, since) if self._ahead else 0.0)))
                least = min(least, backward)
            since += least + hop_s
            end = begin
        return kinds


class _Sums:
    """A `Pace` as lists, whose elements are faster to read than those of arrays."""

    def __init__(self, pace: Pace) -> None:
        self.forward, self.fused, self.recompute, self.backward = (
            sums.tolist() for sums in (pace.forward, pace.fused, pace.recompute, pace.backward)
        )
        self.turn_s = pace.turn_s


def anneal(
    clock: PlanTimer,
    shape: PlanShape,
    sizes: list[int],
    microbatches: int,
    keeps: Callable[[PlanShape, list[int]], bool],
    random: Random,
    spend: Callable[[float], float],
) -> tuple[PlanShape, list[int], float]:
    """Return the shape, the sizes and the seconds of the best plan visited.

    Args:
        clock: simulates plans.
        shape: shape of the first plan. Rounds do not change.
        sizes: sizes of the first plan.
        microbatches: microbatches of a step.
        keeps: returns whether a plan is within the limits.
        random: random generator of the moves.
        spend: takes seconds of work done, and returns the fraction of the whole work that is done so far.
    """
    rounds = shape.rounds(microbatches)
    here, forward = list(sizes), shape.forward
    here_s = clock(forward, here, rounds)
    best, best_s = (forward, here), here_s
    hot = here_s * _HOT
    while (done := spend(EVALUATION_S + SLOT_S * len(here) * len(rounds))) < 1:
        move = random.choice(_MOVES)
        there, ahead = list(here), forward
        moved = move(there, ahead, random)
        if moved is None:
            continue
        ahead = moved
        there_s = clock(ahead, there, rounds)
        slower = there_s - here_s
        if slower > 0 and random.random() >= math.exp(-slower / (hot * (_COLD / _HOT) ** done)):
            continue
        if not keeps(PlanShape(ahead, len(there) - ahead - 1, shape.round_microbatches), there):
            continue
        here, forward, here_s = there, ahead, there_s
        if here_s < best_s:
            best, best_s = (forward, here), here_s
    forward, here = best
    return PlanShape(forward, len(here) - forward - 1, shape.round_microbatches), here, best_s


# Each move changes ``sizes`` in place and returns the new number of forward stages, or None if it cannot be made.


def _pass(sizes: list[int], forward: int, random: Random) -> range:
    """Return the indices of all forward stages, or of all backward stages."""
    return range(forward) if random.random() < 0.5 else range(forward + 1, len(sizes))


def _shift(sizes: list[int], forward: int, random: Random) -> int | None:
    """Move a call from one stage of a pass to another."""
    stages = _pass(sizes, forward, random)
    if len(stages) < 2:
        return None
    source, target = random.sample(stages, 2)
    if sizes[source] == 1:
        return None
    sizes[source] -= 1
    sizes[target] += 1
    return forward


def _swap(sizes: list[int], forward: int, random: Random) -> int | None:
    """Exchange two adjacent stages."""
    stages = _pass(sizes, forward, random)
    if len(stages) < 2:
        return None
    at = random.choice(stages[:-1])
    sizes[at], sizes[at + 1] = sizes[at + 1], sizes[at]
    return forward


def _fuse(sizes: list[int], forward: int, random: Random) -> int | None:
    """Move a call of each pass into the fused stage, or out of it."""
    if not 0 < forward < len(sizes) - 1:
        return None
    taken = random.choice((1, -1))
    one, other = random.randrange(forward), random.randrange(forward + 1, len(sizes))
    if min(sizes[one] - taken, sizes[other] - taken, sizes[forward] + taken) < 1:
        return None
    sizes[one] -= taken
    sizes[other] -= taken
    sizes[forward] += taken
    return forward


def _cut(sizes: list[int], forward: int, random: Random) -> int | None:
    """Split a stage."""
    stages = _pass(sizes, forward, random)
    if not stages:
        return None
    at = random.choice(stages)
    if sizes[at] == 1:
        return None
    part = random.randrange(1, sizes[at])
    sizes[at : at + 1] = [part, sizes[at] - part]
    return forward + (at < forward)


def _join(sizes: list[int], forward: int, random: Random) -> int | None:
    """Join two adjacent stages."""
    stages = _pass(sizes, forward, random)
    if len(stages) < 2:
        return None
    at = random.choice(stages[:-1])
    sizes[at : at + 2] = [sizes[at] + sizes[at + 1]]
    return forward - (at < forward)


def _both(sizes: list[int], forward: int, random: Random) -> int | None:
    """Split a stage and join two others."""
    cut = _cut(sizes, forward, random)
    return None if cut is None else _join(sizes, cut, random)


_MOVES = (*[_shift] * 9, *[_swap] * 3, *[_fuse] * 2, *[_cut] * 2, *[_join] * 2, _both)
"""Moves, repeated by their weight in the random choice."""
