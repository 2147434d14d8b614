"""Tells outputs with a value for each pair of samples from those with as many features as a microbatch has samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class OutputColumns:
    """How many rows and columns outputs of the model had in rehearsals, which cut calls into parts of several sizes.

    An output that has as many columns as a microbatch has samples holds a value for each pair of samples, or as many
    features by chance.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], dict[int, set[int]]] = {}

    def see(self, name: str, leaves: Sequence[Any], samples: int) -> None:
        """Note what the model ``name`` has returned for ``samples``."""
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and len(leaf) == samples:
                self._seen.setdefault((name, place), {}).setdefault(samples, set()).add(leaf.shape[1])

    def are_features(self, name: str, place: int) -> bool:
        """Return whether an output never has a column for each sample, as some number of samples shows."""
        return any(rows not in columns for rows, columns in self._seen.get((name, place), {}).items())
