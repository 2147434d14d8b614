"""Neighbours of a plan in the search: all plans that differ by one call, and random ones that differ by more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from lightning_roundpipe.planning.batch import Sizes
from lightning_roundpipe.planning.shapes import PlanShape


def neighbours(forward: int, sizes: Sizes) -> Sizes:
    """Return all plans of the same shape that differ by one call, (plans, stages).

    A call moves between any two stages of a pass, or the fused stage takes a call from each pass or gives one to each.
    The fused stage may exceed the limits.
    """
    ahead, behind = np.arange(forward), np.arange(forward + 1, len(sizes))
    rows = []
    for stages in (ahead, behind):
        if len(stages) < 2:
            continue
        source, target = (stages[at] for at in _pairs(len(stages)))
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
        near = neighbours(shape.forward, sizes)
        if len(near):
            sizes = near[int(random.integers(len(near)))]
    return shape, sizes
