"""Finds samples that differ in what parts of a batch may take from all of their samples, such as the longest.

Neighbours are often alike: where most texts are cut to one length, the first few are equally long, and a loss that is
divided by the longest of the batch is the same on parts of them as on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_FEW = 2
"""Samples of each part."""
_MOST_PAIRS = 2
_MOST_ELEMENTS = 1 << 24
"""Elements of a tensor that is looked at, at most."""


def unlike_parts(batch: Any, samples: int, compared: Sequence[int], one: int) -> list[tuple[list[int], int]]:
    """Return samples to compare on, and how many of them are the first part.

    Args:
        batch: the batch.
        samples: how many samples it has.
        compared: samples that were compared.
        one: how many of these were in the first part.
    """
    found: list[tuple[list[int], int]] = []
    sides = [[*compared[:one]], [*compared[one:]]]
    for sizes in _sizes(batch, samples):
        if int(sizes.min()) == int(sizes.max()) or _are_unlike(sizes, sides):
            continue
        if any(_are_unlike(sizes, [rows[:first], rows[first:]]) for rows, first in found):
            continue
        order = sizes.argsort(descending=True, stable=True).tolist()
        few = min(_FEW, samples // 2)
        found.append(([*sorted(order[:few]), *sorted(order[-few:])], few))
    return found[:_MOST_PAIRS]


def _are_unlike(sizes: Tensor, sides: Sequence[list[int]]) -> bool:
    """Return whether the largest of one side is another one than that of the other."""
    return len({int(sizes[side].max()) for side in sides if side}) > 1


def _sizes(batch: Any, samples: int) -> Iterator[Tensor]:
    """Yield sizes of the samples: how long they are, how many targets or events they have, and their whole numbers."""

    def is_listed(tree: Any) -> bool:
        return isinstance(tree, list) and len(tree) == samples and all(isinstance(x, Tensor) for x in tree)

    numbers: list[Tensor] = []
    for leaf in tree_leaves(batch, is_leaf=is_listed):
        if is_listed(leaf):
            yield torch.tensor([x.numel() for x in leaf])
        elif not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested:
            continue
        elif leaf.dim() and len(leaf) == samples and leaf.numel() <= _MOST_ELEMENTS:
            is_whole = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            if leaf.dim() == 1:
                numbers += [leaf.detach().cpu().long()] if is_whole else []
                continue
            rows = leaf.detach().flatten(1)
            yield (rows != 0).sum(1).cpu()
            if is_whole and leaf.dtype is not torch.bool:
                yield (rows >= 0).sum(1).cpu()
    yield from numbers
