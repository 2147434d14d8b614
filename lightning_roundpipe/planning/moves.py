"""How the search gets from one plan to others: all that differ by one call, and some that differ by more, at random."""

from __future__ import annotations

import numpy as np

from lightning_roundpipe.planning.batch import Sizes
from lightning_roundpipe.planning.shapes import Shape


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


def kicked(shape: Shape, sizes: Sizes, random: np.random.Generator) -> tuple[Shape, Sizes]:
    """A plan some moves away: a stage cut in two or two made one, as chance has it, and a few calls moved."""
    shape, sizes = _recut(shape, sizes, random)
    for _ in range(int(random.integers(1, 4))):
        near = neighbours(shape.forward, sizes)
        if len(near):
            sizes = near[int(random.integers(len(near)))]
    return shape, sizes


def _recut(shape: Shape, sizes: Sizes, random: np.random.Generator) -> tuple[Shape, Sizes]:
    forward, backward = shape.forward, shape.backward
    choice = random.random()
    if choice < 0.4:
        return shape, sizes
    is_forward = bool(random.random() < 0.5)
    first, count = (0, forward) if is_forward else (forward + 1, backward)
    if not count:
        return shape, sizes
    at = first + int(random.integers(count))
    if choice < 0.7 and sizes[at] > 1:
        part = int(random.integers(1, sizes[at]))
        sizes = np.concatenate([sizes[:at], [part, sizes[at] - part], sizes[at + 1 :]])
        count += 1
    elif choice >= 0.7 and at + 1 < first + count:
        sizes = np.concatenate([sizes[:at], [sizes[at] + sizes[at + 1]], sizes[at + 2 :]])
        count -= 1
    if is_forward:
        return Shape(count, backward, shape.round_microbatches), sizes
    return Shape(forward, count, shape.round_microbatches), sizes
