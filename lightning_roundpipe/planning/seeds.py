"""Where the search begins: plans of every shape, cut by a simple rule.

A shape is the number of stages each way, what the fused stage holds, and the microbatches of a round. Within a shape
the calls are dealt out so that stages take equal time, or grow: a pipeline fills faster when the first forward stages
are short, and drains faster when the last backward stages are. They grow evenly, or are of two kinds, because a round
with all microbatches is as long as the workers' sums of stages are, and those can be equal though the stages are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np

from lightning_roundpipe.planning.batch import Floats, PlanShape, Sizes, Timing
from lightning_roundpipe.planning.problem import Problem

_RAMPS = (1.0, 0.6, 0.3)
"""Shortest stage of a pass relative to the longest, if stages grow evenly."""

_STEEP = (0.15, 0.05)
"""The same if each stage is longer than the one before by a constant factor."""
_SHORT = (0.5, 0.33)
"""Short stages relative to long ones, if there are two kinds."""
_SHARES = (0.17, 0.33, 0.5, 0.67, 0.83)
"""Shares of the stages of a pass that are short."""

_MOST_COUNTS = 20
"""Most numbers of stages that are tried for a pass without gaps."""

_ALIKE = 0.5
"""Least ratio of the mean forward stage and the mean backward stage, whichever is shorter."""
_FUSED = 2.0
"""Most length of the fused stage relative to the longer mean, unless it holds only the last call."""


def round_choices(problem: Problem) -> list[int]:
    """Rounds worth trying: the largest allowed, equal parts of a step, and the smallest allowed and one more.

    One more than the number of workers is what hides a hop: each microbatch is there before its worker asks for it.
    """
    microbatches = problem.microbatches
    lowest, most = min(problem.min_round, microbatches), min(problem.max_round or microbatches, microbatches)
    fewest = -(-microbatches // most)
    parts = {-(-microbatches // rounds) for rounds in range(fewest, fewest + 4)}
    smallest = {lowest, min(lowest + 1, most)}
    return sorted({r for r in parts | smallest if lowest <= r}, reverse=True)


def seeds(timing: Timing) -> Iterator[tuple[PlanShape, Sizes]]:
    """Each shape with its first plans. With staleness 0, there are passes whose stages grow (forward) and shrink.

    Shapes of few stages come first, with such passes some of every kind: there is not always time for all. With
    unequal workers there are as many stages as let each of them come to one kind of worker, and its length is for that.
    """
    pace, ramps = timing.pace, not timing.problem.rules.staleness
    calls = len(pace.forward) - 1
    most = min(timing.problem.max_fused + 1, calls)
    rounds = round_choices(timing.problem)
    if most == calls:
        for members in rounds:
            yield PlanShape(0, 0, members), np.array([[calls]])
    both = pace.recompute + pace.backward
    fused = [count + 1 for count in _spread(0, min(most, calls - 1) - 1)] if calls > 1 else []
    shares = _shares(timing)
    period = math.lcm(*map(_period, shares))

    @cache
    def dealt(is_forward: bool, rest: int, stages: int, grow: bool, position: int) -> Sizes:
        """Calls per stage of a pass whose first stage is at ``position``, modulo the period."""
        elapsed = (pace.forward if is_forward else both)[: rest + 1]
        kinds = _weights(stages) if grow else [np.ones(stages)]
        if shares:
            order = slice(None) if is_forward else slice(None, None, -1)
            each = [np.take(share, np.arange(position, position + stages), mode="wrap")[order] for share in shares]
            kinds = [weights * share for share in each for weights in kinds]
        sizes = np.unique(deal(elapsed, np.array(kinds), alike=not shares), axis=0)
        return sizes if is_forward else sizes[:, ::-1]

    counts = _counts(calls)
    shapes = sorted(((f, b) for f in counts for b in counts), key=sum)
    if ramps:
        shapes = [shape for begin in (0, 2, 1, 3) for shape in shapes[begin::4]]
    for forward, backward in shapes:
        means = pace.forward[-1] / forward, both[-1] / backward
        if (forward + 1 + backward) % period or min(means) < max(means) * _ALIKE:
            continue
        for members in rounds:
            grow = ramps and members == rounds[0]
            rows = [
                _with_each(
                    dealt(True, calls - held, forward, grow, 0),
                    held,
                    dealt(False, calls - held, backward, grow, (forward + 1) % period),
                )
                for held in fused
                if max(forward, backward) <= calls - held
                and (held == 1 or pace.fused[-1] - pace.fused[-1 - held] <= _FUSED * max(means))
            ]
            if rows:
                yield PlanShape(forward, backward, members), np.concatenate(rows)


def _shares(timing: Timing) -> list[list[float]]:
    """Return shares of the work of unequal workers: by speed, by memory, and by the lesser of both."""
    shares = []
    if any(one is not timing.each[0] for one in timing.each):
        shares.append([timing.pace.fused[-1] / one.fused[-1] if one.fused[-1] else 1.0 for one in timing.each])
    if isinstance(memory := timing.problem.memory, tuple):
        mean = sum(memory) / len(memory)
        shares.append([nbytes / mean for nbytes in memory])
    if len(shares) == 2:
        shares.append([*map(min, *shares)])
    return shares


def _period(shares: list[float]) -> int:
    """Return the period of workers: 2 for fast, slow, fast, slow."""
    whole = len(shares)
    return next(n for n in range(1, whole + 1) if whole % n == 0 and shares == shares[:n] * (whole // n))


def _weights(stages: int) -> list[Floats]:
    """Return relative lengths of the stages of a pass, in the order of the trace."""
    weights = [np.linspace(slope, 1.0, stages) for slope in _RAMPS]
    weights += [np.geomspace(slope, 1.0, stages) for slope in _STEEP]
    for short in _SHORT:
        for count in sorted({round(share * stages) for share in _SHARES} - {0, stages}):
            weights.append(np.where(np.arange(stages) < count, short, 1.0))
    return weights


def _with_each(ahead: Sizes, held: int, behind: Sizes) -> Sizes:
    """Return every forward pass with ``held`` calls in the fused stage and every backward pass, (plans, stages)."""
    one, other = len(ahead), len(behind)
    return np.concatenate(
        [np.repeat(ahead, other, axis=0), np.full((one * other, 1), held), np.tile(behind, (one, 1))], axis=1
    )


def deal(elapsed: Floats, weights: Floats, *, alike: bool = True) -> Sizes:
    """Calls per stage, ascending through the trace, so that stage times are nearly as ``weights``; each at least one.

    ``elapsed`` are the sums before each call and of all; ``weights`` has a row for each way to deal, as the result.
    Between equal calls, stages of workers that are ``alike`` are sorted by size: what does not divide evenly goes to
    the later stages.
    """
    calls, (ways, stages) = len(elapsed) - 1, weights.shape
    goal = elapsed[-1] * np.cumsum(weights, axis=1) / np.sum(weights, axis=1, keepdims=True)
    cuts = np.searchsorted((elapsed[1:] + elapsed[:-1]) / 2, goal[:, :-1])
    places = np.arange(1, stages)
    cuts = np.maximum.accumulate(cuts - places, axis=1) + places  # each stage has a call,
    cuts = np.clip(cuts, places, calls - stages + places)  # and leaves one for each that follows
    ends = np.zeros((ways, 1), dtype=np.int64), np.full((ways, 1), calls)
    sizes = np.diff(np.concatenate([ends[0], cuts, ends[1]], axis=1), axis=1)
    times = np.diff(elapsed)
    if alike and np.ptp(times) <= 1e-9 * times[0]:
        sizes = np.sort(sizes, axis=1)
    return sizes


def _counts(calls: int) -> list[int]:
    """Return the numbers of stages to try: all for short traces, else a geometric selection."""
    if calls - 1 <= _MOST_COUNTS:
        return list(range(1, calls))
    counts = np.geomspace(1, calls - 1, 2 * _MOST_COUNTS)
    return sorted({round(count) for count in counts})


def _spread(lowest: int, highest: int) -> list[int]:
    if highest - lowest < 8:
        return list(range(lowest, highest + 1))
    return sorted({round(value) for value in np.linspace(lowest, highest, 8)} | {lowest + 1, lowest + 2})
