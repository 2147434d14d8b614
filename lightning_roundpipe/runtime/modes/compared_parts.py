"""Which two parts of a call are compared with their samples as one: those that differ most.

Code that couples samples (padding cut to the longest one, a division by the largest length) may do nothing in parts
that are alike. What tells samples apart are their numbers: lengths, the sums of masks, and how often a row repeats the
element before, as padding does.

    some numbers differ ── the two parts whose numbers differ most ── [1]
    no number differs ── the last part, and another one each time ── [2]
    a number differs more than twice as much as in any comparison before ── a further comparison ── [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.runtime.batch.microbatches import rows_of

Numbers = dict[int, list[tuple[float, float]]]
"""By the place of an argument, the least and the largest number of the samples of each part."""

MOST_ELEMENTS = 1 << 20
"""Elements of a tensor that is looked at, at most: each evaluated call does so. Images are no lengths."""
GROWTH = 2
"""How many times as much numbers must differ as in comparisons before to be compared at once."""


class Pairs:
    """Chooses the parts for the comparisons of one kind of call."""

    def __init__(self) -> None:
        self._made = 0
        self._compared: dict[int, float] = {}
        """By the place of an argument, the largest difference between parts that were compared."""

    def is_new(self, numbers: Numbers) -> bool:
        """Return whether parts differ more than any compared ones did [3]."""
        return bool(self._new(numbers))

    def _new(self, numbers: Numbers) -> list[int]:
        return [place for place, parts in numbers.items() if _range(parts) > GROWTH * self._compared.get(place, 0.0)]

    def next(self, numbers: Numbers, parts: int) -> tuple[int, int]:
        """Return the parts to compare next."""
        scales = {place: scale for place, of_parts in numbers.items() if (scale := _range(of_parts))}
        if not scales:
            return self._made % (parts - 1), parts - 1  # [2]
        first = self._new(numbers)[:1]

        def differ(pair: tuple[int, int]) -> tuple[float, float]:
            apart = {place: _difference(numbers[place], pair) / scale for place, scale in scales.items()}
            return sum(apart[place] for place in first), sum(apart.values())

        return max(combinations(range(parts), 2), key=differ)  # [1]

    def note(self, numbers: Numbers, pair: tuple[int, ...]) -> None:
        """Note that the parts ``pair`` were compared."""
        self._made += 1
        for place, parts in numbers.items():
            self._compared[place] = max(self._compared.get(place, 0.0), _difference(parts, pair))


def numbers_of(leaves: Sequence[Any], sizes: list[int]) -> Numbers:
    """Return the numbers of a call's arguments, of those on the host alone: a device would have to be waited for.

    Args:
        leaves: the arguments.
        sizes: samples of each part.
    """
    found: Numbers = {}
    rows = rows_of(sizes)
    for place, leaf in enumerate(leaves):
        numbers = _of_samples(leaf) if isinstance(leaf, Tensor) else None
        if numbers is not None and len(numbers) == sum(sizes):
            found[place] = [(min(numbers[part]), max(numbers[part])) for part in rows]
    return found


def _of_samples(tensor: Tensor) -> list[float] | None:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
    if not plain or not tensor.dim() or not 0 < tensor.numel() <= MOST_ELEMENTS:
        return None
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if whole and (tensor.dim() == 1 or tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())):
        found: list[float] = tensor.flatten(1).sum(1).tolist() if tensor.dim() > 1 else tensor.tolist()
        return found
    if tensor.dim() == 1:
        return None
    steps = tensor.flatten(2)[..., 0] if tensor.dim() > 2 else tensor
    found = (steps[:, 1:] == steps[:, :-1]).sum(1).tolist()
    return found


def _range(parts: list[tuple[float, float]]) -> float:
    """Return the largest difference between any two parts."""
    least, largest = zip(*parts, strict=True)
    return float(max(max(least) - min(least), max(largest) - min(largest)))


def _difference(parts: list[tuple[float, float]], pair: tuple[int, ...]) -> float:
    return _range([parts[part] for part in pair])
