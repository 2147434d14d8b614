"""Finds samples that differ in what parts of a batch may take from all of their samples, such as the longest.

Neighbours are often alike: where most texts are cut to one length, the first few are equally long, and a loss that is
divided by the longest of the batch is the same on parts of them as on all. All samples of a batch may be alike, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.runtime.batch.sample_sizes import Key, is_listed, sizes_of

_FEW = 2
"""Samples of each part."""
_MOST_PAIRS = 2
"""Comparisons at most."""
_MOST_ELEMENTS, _MOST_ELEMENTS_LATER = 1 << 24, 1 << 20
"""Elements of a tensor that is looked at, at most: once, and in each batch."""


def unlike_parts(
    batch: Any, samples: int, compared: Sequence[int], one: int, most: int = _MOST_PAIRS
) -> list[tuple[list[int], int]]:
    """Return samples to compare on, and how many of them are the first part.

    Args:
        batch: the batch.
        samples: how many samples it has.
        compared: samples that were compared.
        one: how many of these were in the first part.
        most: how many comparisons there may be.
    """
    found: list[tuple[list[int], int]] = []
    sides = [[*compared[:one]], [*compared[one:]]]
    for sizes in sizes_of(_leaves(batch, samples), samples, _MOST_ELEMENTS, waits=True).values():
        if _are_alike(sizes) or _are_unlike(sizes, sides):
            continue
        if any(_are_unlike(sizes, [rows[:first], rows[first:]]) for rows, first in found):
            continue
        order = sizes.argsort(descending=True, stable=True).tolist()
        few = min(_FEW, samples // 2)
        found.append(([*sorted(order[:few]), *sorted(order[-few:])], few))
    return found[:most]


class AlikeSamples:
    """The sizes of samples that were the same within each batch so far, so that no comparison shows what they do.

    Looking for them takes microseconds a batch, and nothing once each has differed.
    """

    def __init__(self) -> None:
        self._alike: set[Key] | None = None
        """None before the first batch."""

    def begin(self, batch: Any, samples: int) -> None:
        """Note the first batch that is compared."""
        if self._alike is None:
            sizes = sizes_of(_leaves(batch, samples), samples, _MOST_ELEMENTS_LATER)
            self._alike = {key for key, of_samples in sizes.items() if _are_alike(of_samples)}

    def begin_to_differ_in(self, batch: Any, samples: int) -> bool:
        """Return whether samples of ``batch`` differ in a size in which those of earlier batches never have."""
        if not self._alike or samples < 2:
            return False
        sizes = sizes_of(_leaves(batch, samples), samples, _MOST_ELEMENTS_LATER, self._alike)
        differ = {key for key, of_samples in sizes.items() if not _are_alike(of_samples)}
        self._alike -= differ
        return bool(differ)


def _leaves(batch: Any, samples: int) -> list[Any]:
    return tree_leaves(batch, is_leaf=lambda tree: is_listed(tree, samples))


def _are_alike(sizes: Tensor) -> bool:
    return int(sizes.min()) == int(sizes.max())


def _are_unlike(sizes: Tensor, sides: Sequence[list[int]]) -> bool:
    """Return whether the largest of one side is another one than that of the other, and the smallest, and the mean."""
    of_sides = [sizes[side] for side in sides if side]
    found = {(int(side.max()), int(side.min()), int(side.sum()) / len(side)) for side in of_sides}
    return len(found) > 1 and all(len(set(values)) > 1 for values in zip(*found, strict=True))
