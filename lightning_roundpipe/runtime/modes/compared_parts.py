"""Which two parts of a call are compared with their samples as one: those that differ most.

Code that couples samples (padding cut to the longest one, a division by the largest length) may do nothing in parts
that are alike. What tells samples apart are their sizes (`sample_sizes`).

    some sizes differ ── the two parts whose sizes differ most ── [1]
    no size differs ── the last part, and another one each time ── [2]
    a size differs more than twice as much as in any comparison before ── a further comparison ── [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from lightning_roundpipe.runtime.batch.microbatches import rows_of
from lightning_roundpipe.runtime.batch.sample_sizes import Key, sizes_of

Numbers = dict[Key, list[tuple[int, int]]]
"""By the place of an argument and the kind of size, the least and the largest size of the samples of each part."""

MOST_ELEMENTS = 1 << 20
"""Elements of a tensor that is looked at, at most: each evaluated call does so. Images are no lengths."""
GROWTH = 2
"""How many times as much numbers must differ as in comparisons before to be compared at once."""


class Pairs:
    """Chooses the parts for the comparisons of one kind of call."""

    def __init__(self) -> None:
        self._made = 0
        self._compared: dict[Key, int] = {}
        """By the kind of size, the largest difference between parts that were compared."""

    def is_new(self, numbers: Numbers) -> bool:
        """Return whether parts differ more than any compared ones did [3]."""
        return bool(self._new(numbers))

    def _new(self, numbers: Numbers) -> list[Key]:
        return [key for key, parts in numbers.items() if _range(parts) > GROWTH * self._compared.get(key, 0)]

    def next(self, numbers: Numbers, parts: int) -> tuple[int, int]:
        """Return the parts to compare next."""
        scales = {key: scale for key, of_parts in numbers.items() if (scale := _range(of_parts))}
        if not scales:
            return self._made % (parts - 1), parts - 1  # [2]
        first = self._new(numbers)[:1]

        def differ(pair: tuple[int, int]) -> tuple[float, float]:
            apart = {key: _difference(numbers[key], pair) / scale for key, scale in scales.items()}
            return sum(apart[key] for key in first), sum(apart.values())

        return max(combinations(range(parts), 2), key=differ)  # [1]

    def note(self, numbers: Numbers, pair: tuple[int, ...]) -> None:
        """Note that the parts ``pair`` were compared."""
        self._made += 1
        for key, parts in numbers.items():
            self._compared[key] = max(self._compared.get(key, 0), _difference(parts, pair))


def numbers_of(leaves: Sequence[Any], sizes: list[int]) -> Numbers:
    """Return the sizes of the samples in a call's arguments, of those on the host alone.

    Args:
        leaves: the arguments.
        sizes: how many samples each part has.
    """
    found: Numbers = {}
    for key, of_samples in sizes_of(leaves, sum(sizes), MOST_ELEMENTS).items():
        listed = of_samples.tolist()
        found[key] = [(min(listed[part]), max(listed[part])) for part in rows_of(sizes)]
    return found


def _range(parts: list[tuple[int, int]]) -> int:
    """Return the largest difference between any two parts."""
    least, largest = [a for a, _ in parts], [b for _, b in parts]
    return max(max(least) - min(least), max(largest) - min(largest))


def _difference(parts: list[tuple[int, int]], pair: tuple[int, ...]) -> int:
    return _range([parts[part] for part in pair])
