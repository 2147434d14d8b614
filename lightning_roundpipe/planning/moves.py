"""Neighbours of a plan in the search: all plans that differ by one call, and random ones that differ by more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from lightning_roundpipe.planning.batch import Sizes
from lightning_roundpipe.planning.shapes import PlanShape


class Neighbours:
    """All plans of the same shape that differ by one call. There are many, so `plans` makes only those that are wanted.

    A call moves between any two stages of a pass, or the fused stage takes a call from each pass or gives one to each.

    Args:
        forward: number of forward stages.
        sizes: calls in each stage of the plan.
        most: largest number of calls in the fused stage; None for any.
    """

    def __init__(self, forward: int, sizes: Sizes, most: int | None = None) -> None:
        self._forward, self._sizes = forward, sizes
        ahead, behind = np.arange(forward), np.arange(forward + 1, len(sizes))
        spare, fused = sizes > 1, int(sizes[forward])
        ends = np.empty((2, 0), dtype=np.int64)
        moves = [ends]  # of each (which stage gives a call, which one takes it)
        if most is None or fused <= most:
            for stages in (ahead, behind):
                if len(stages) > 1:
                    source, target = _pairs(len(stages))
                    possible = spare[stages][source]
                    moves.append(np.stack([stages[source[possible]], stages[target[possible]]]))
        takes = gives = ends  # of each (a forward stage, a backward stage)
        if forward and len(behind):
            if most is None or fused < most:
                takes = _grid(ahead[spare[ahead]], behind[spare[behind]])
            if fused > 1 and (most is None or fused <= most + 1):
                gives = _grid(ahead, behind)
        self._from_fused = sum(move.shape[1] for move in moves), takes.shape[1]
        self._stages = np.concatenate([*moves, takes, gives], axis=1)

    def __len__(self) -> int:
        return int(self._stages.shape[1])

    def plans(self, chosen: Sizes | None = None) -> Sizes:
        """Return the sizes of all neighbours, or of those with the ``chosen`` numbers, (plans, stages)."""
        numbers = np.arange(len(self)) if chosen is None else chosen
        one, other = self._stages[:, numbers]
        moved, taken = self._from_fused
        is_move, takes = numbers < moved, numbers < moved + taken
        rows, at = np.repeat(self._sizes[None], len(numbers), axis=0), np.arange(len(numbers))
        rows[at, one] -= np.where(takes, 1, -1)
        rows[at, other] += np.where(takes & ~is_move, -1, 1)
        rows[:, self._forward] += np.where(is_move, 0, np.where(takes, 1, -1))
        return rows


def _grid(one: Sizes, other: Sizes) -> Sizes:
    """Return each of one with each of the other, (2, pairs)."""
    return np.stack([np.tile(one, len(other)), np.repeat(other, len(one))])


@cache
def _pairs(stages: int) -> tuple[Sizes, Sizes]:
    """Return all ordered pairs of stages of a pass."""
    source, target = (grid.ravel() for grid in np.meshgrid(np.arange(stages), np.arange(stages)))
    return source[source != target], target[source != target]


def recuts(shape: PlanShape, sizes: Sizes) -> Iterator[tuple[PlanShape, Sizes]]:
    """Yield all plans in which a stage of a pass merges into another, or a part of one becomes a new stage."""
    ahead, behind = slice(0, shape.forward), slice(shape.forward + 1, len(sizes))
    for is_forward, part in ((True, ahead), (False, behind)):
        before, stages, after = sizes[: part.start], sizes[part], sizes[part.stop :]
        for change, rows in ((-1, _fewer(stages)), (1, _more(stages))):
            if len(rows):
                forward, backward = (change, 0) if is_forward else (0, change)
                near = PlanShape(shape.forward + forward, shape.backward + backward, shape.round_microbatches)
                ends = (np.repeat(end[None], len(rows), axis=0) for end in (before, after))
                yield near, np.concatenate([next(ends), rows, next(ends)], axis=1)


def _fewer(stages: Sizes) -> Sizes:
    source, target = _pairs(len(stages))
    rows = np.repeat(stages[None], len(source), axis=0)
    rows[np.arange(len(rows)), target] += stages[source]
    kept = np.ones(rows.shape, dtype=bool)
    kept[np.arange(len(rows)), source] = False
    return rows[kept].reshape(len(rows), max(len(stages) - 1, 0))


def _more(stages: Sizes) -> Sizes:
    gives = np.repeat(np.arange(len(stages)), stages - 1)
    calls = np.concatenate([np.arange(1, size) for size in stages], dtype=np.int64) if len(stages) else gives
    rows = np.repeat(stages[None], len(gives), axis=0)
    rows[np.arange(len(rows)), gives] -= calls
    return np.concatenate([np.insert(rows, at, calls, axis=1) for at in range(len(stages) + 1)])


def kicked(shape: PlanShape, sizes: Sizes, random: np.random.Generator) -> tuple[PlanShape, Sizes]:
    """Return a random plan nearby: at most one stage more or fewer, and up to three calls moved."""
    choices = [(shape, sizes[None]), *recuts(shape, sizes)]
    shape, rows = choices[int(random.integers(len(choices)))]
    sizes = rows[int(random.integers(len(rows)))]
    for _ in range(int(random.integers(1, 4))):
        near = Neighbours(shape.forward, sizes)
        if len(near):
            sizes = near.plans(random.integers(len(near), size=1))[0]
    return shape, sizes
