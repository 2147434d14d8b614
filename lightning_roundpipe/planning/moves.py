"""Neighbours of a plan in the search: all plans that differ by one call, and random ones that differ by more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import numpy as np

from lightning_roundpipe.planning.batch import Sizes
from lightning_roundpipe.planning.shapes import PlanShape

_CHANGES: tuple[Literal[-1, 1], ...] = (-1, 1)


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


class Recuts:
    """All plans in which a stage of one pass merges into another, or a part of one becomes a new stage.

    As of `Neighbours`, `plans` makes only those that are wanted.

    Args:
        shape: shape of the plan.
        sizes: calls in each stage of the plan.
        is_forward: the pass.
        change: -1: a stage fewer; 1: a stage more.

    Attributes:
        shape: shape of the plans.
    """

    def __init__(self, shape: PlanShape, sizes: Sizes, *, is_forward: bool, change: Literal[-1, 1]) -> None:
        forward, backward = (change, 0) if is_forward else (0, change)
        self.shape = PlanShape(shape.forward + forward, shape.backward + backward, shape.round_microbatches)
        part = slice(0, shape.forward) if is_forward else slice(shape.forward + 1, len(sizes))
        self._before, self._stages, self._after = sizes[: part.start], sizes[part], sizes[part.stop :]
        self._change = change
        stages = len(self._stages)
        if change < 0:
            self._source, self._other = _pairs(stages)  # which stage merges, and into which
        else:
            gives = np.repeat(np.arange(stages), self._stages - 1)
            parts = [np.arange(1, size) for size in self._stages]
            self._source, self._other = gives, np.concatenate(parts, dtype=np.int64) if parts else gives
            # which stage gives calls, and how many

    def __len__(self) -> int:
        return len(self._source) * (1 if self._change < 0 else len(self._stages) + 1)

    def plans(self, chosen: Sizes | None = None) -> Sizes:
        """Return the sizes of all plans, or of those with the ``chosen`` numbers, (plans, stages)."""
        numbers = np.arange(len(self)) if chosen is None else chosen
        rows = self._fewer(numbers) if self._change < 0 else self._more(numbers)
        before, after = (np.repeat(end[None], len(numbers), axis=0) for end in (self._before, self._after))
        return np.concatenate([before, rows, after], axis=1)

    def _fewer(self, numbers: Sizes) -> Sizes:
        source, target = self._source[numbers], self._other[numbers]
        rows = np.repeat(self._stages[None], len(numbers), axis=0)
        rows[np.arange(len(numbers)), target] += self._stages[source]
        columns = np.arange(len(self._stages) - 1)
        return np.take_along_axis(rows, columns + (columns >= source[:, None]), axis=1)

    def _more(self, numbers: Sizes) -> Sizes:
        at, chosen = np.divmod(numbers, len(self._source))
        each, calls, stages = np.arange(len(numbers)), self._other[chosen], len(self._stages)
        rows = np.repeat(self._stages[None], len(numbers), axis=0)
        rows[each, self._source[chosen]] -= calls
        columns = np.arange(stages + 1)
        rows = np.take_along_axis(rows, np.minimum(columns - (columns > at[:, None]), stages - 1), axis=1)
        rows[each, at] = calls
        return rows


def recuts(shape: PlanShape, sizes: Sizes) -> Iterator[Recuts]:
    """Yield the plans with a forward stage fewer, with one more, and likewise backward, where there are any."""
    for is_forward in (True, False):
        for change in _CHANGES:
            if len(near := Recuts(shape, sizes, is_forward=is_forward, change=change)):
                yield near


def kicked(shape: PlanShape, sizes: Sizes, random: np.random.Generator) -> tuple[PlanShape, Sizes]:
    """Return a random plan nearby: at most one stage more or fewer, and up to three calls moved."""
    choices = [None, *recuts(shape, sizes)]
    if (near := choices[int(random.integers(len(choices)))]) is not None:
        shape, sizes = near.shape, near.plans(random.integers(len(near), size=1))[0]
    for _ in range(int(random.integers(1, 4))):
        neighbours = Neighbours(shape.forward, sizes)
        if len(neighbours):
            sizes = neighbours.plans(random.integers(len(neighbours), size=1))[0]
    return shape, sizes
