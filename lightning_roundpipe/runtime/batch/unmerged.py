"""What stands for an output of the model that its parts cannot give.

A model may return more than user code needs: CLIP returns a value for each pair of samples beside the embeddings that a
loss is made of. If such an output ended the step as it came, nothing could be computed from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor


class Unmerged(Tensor):
    """A tensor that raises ``error`` as soon as anything is computed from it, or asked of it."""

    error: Exception

    @staticmethod
    def of(error: Exception) -> Unmerged:
        # On the meta device, it has no value where torch functions are off either.
        made: Unmerged = torch.empty(0, device="meta").as_subclass(Unmerged)
        made.error = error
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise next(found.error for found in _within((args, kwargs)))


def refuse_unmerged(values: Iterable[Any]) -> None:
    """Raise the error of the first `Unmerged` among ``values``, which code takes where torch functions are off."""
    for value in values:
        if type(value) is Unmerged:
            raise value.error


def _within(value: Any) -> Iterator[Unmerged]:
    """Yield each `Unmerged` in ``value``, in any nesting of collections."""
    if isinstance(value, Unmerged):
        yield value
    elif isinstance(value, dict):
        yield from _within(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _within(item)
