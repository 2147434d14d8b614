"""Where the search begins: plans of every shape, cut by a simple rule.

A shape is the number of stages each way, what the fused stage holds, and the microbatches of a round. Within a shape
the calls are dealt out so that stages take equal time, or grow: a pipeline fills faster when the first forward stages
are short, and drains faster when the last backward stages are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_roundpipe.planning.batch import Floats, Pace, Sizes
from lightning_roundpipe.planning.limits import Limits

_RAMPS = (1.0, 0.6, 0.3)
"""Length of the shortest stage of a pass, as a part of the longest one's."""

_MOST_COUNTS = 26
"""Numbers of stages that are tried for a pass."""

_ALIKE = (0.5, 2.0)
"""How far the mean forward stage's length may be from the mean backward stage's."""


@dataclass(frozen=True)
class Shape:
    """Plans with equally many stages and microbatches a round."""

    forward: int
    backward: int
    round_microbatches: int


def round_choices(microbatches: int, limits: Limits) -> list[int]:
    """Rounds worth trying: all microbatches at once, equal parts of them, and the smallest allowed and one more.

    One more than the number of workers is what hides a hop: each microbatch is there before its worker asks for it.
    """
    lowest = min(limits.min_round, microbatches)
    parts = {-(-microbatches // rounds) for rounds in range(1, 5)}
    smallest = {lowest, min(lowest + 1, microbatches)}
    return sorted({r for r in parts | smallest if lowest <= r}, reverse=True)


def seeds(pace: Pace, microbatches: int, limits: Limits, ramps: bool) -> Iterator[tuple[Shape, Sizes]]:
    """Each shape with its first plans. ``ramps``: also stages that grow (forward) and shrink (backward)."""
    calls = len(pace.forward) - 1
    most = min(limits.max_fused + 1, calls)
    if most == calls:
        for members in round_choices(microbatches, limits):
            yield Shape(0, 0, members), np.array([[calls]])
    both = pace.recompute + pace.backward
    slopes = [(f, b) for f in _RAMPS for b in _RAMPS] if ramps else [(1.0, 1.0)]
    fused = _spread(0, min(most, calls - 1) - 1)
    for forward in _counts(calls):
        for backward in _counts(calls):
            mean = pace.forward[-1] / forward, both[-1] / backward
            if mean[1] > 0 and not _ALIKE[0] < mean[0] / mean[1] < _ALIKE[1]:
                continue
            rows = []
            for held in (count + 1 for count in fused):
                rest = calls - held
                if max(forward, backward) > rest:
                    continue
                for rise, fall in slopes:
                    ahead = deal(pace.forward[: rest + 1], np.linspace(rise, 1.0, forward))
                    behind = deal(both[: rest + 1], np.linspace(fall, 1.0, backward))
                    rows.append([*ahead, held, *behind[::-1]])
            if rows:
                sizes = np.unique(np.array(rows), axis=0)
                for members in round_choices(microbatches, limits):
                    yield Shape(forward, backward, members), sizes


def deal(elapsed: Floats, weights: Floats) -> list[int]:
    """Calls per stage, ascending through the trace, so that stage times are nearly as ``weights``; each at least one.

    ``elapsed`` are the sums before each call and of all. Between equal calls, stages are sorted by size: what does
    not divide evenly goes to the later stages.
    """
    calls, stages = len(elapsed) - 1, len(weights)
    goal = elapsed[-1] * np.cumsum(weights) / np.sum(weights)
    cuts = np.searchsorted((elapsed[1:] + elapsed[:-1]) / 2, goal[:-1])
    places = np.arange(1, stages)
    cuts = np.maximum.accumulate(cuts - places) + places  # each stage has a call,
    cuts = np.clip(cuts, places, calls - stages + places)  # and leaves one for each that follows
    sizes = np.diff(np.concatenate([[0], cuts, [calls]]))
    times = np.diff(elapsed)
    if np.ptp(times) <= 1e-9 * times[0]:
        sizes = np.sort(sizes)
    return [int(size) for size in sizes]


def _counts(calls: int) -> list[int]:
    """Numbers of stages: all of them for short traces, else fewer and fewer the more stages there are."""
    if calls - 1 <= _MOST_COUNTS:
        return list(range(1, calls))
    counts = np.geomspace(1, calls - 1, 2 * _MOST_COUNTS)
    return sorted({round(count) for count in counts})


def _spread(lowest: int, highest: int) -> list[int]:
    if highest - lowest < 8:
        return list(range(lowest, highest + 1))
    return sorted({round(value) for value in np.linspace(lowest, highest, 8)} | {lowest + 1, lowest + 2})
