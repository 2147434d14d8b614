"""Outputs of a layer that share memory with each other or with its inputs, and must not be written to.

In plain training a write to one of them changes the others, and autograd knows. Behind the boundary between devices
they are tensors of their own, which may share memory or not, and autograd does not know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.writes import writes_of


def overlapping(outputs: list[Tensor], given: dict[int, Tensor]) -> tuple[list[int], list[int]]:
    """Which of ``outputs``, and which positions of ``given``, share a storage with another one that is returned."""
    inputs = {i: t.untyped_storage().data_ptr() for i, t in given.items()}
    storages = [t.untyped_storage().data_ptr() for t in outputs]
    known = set(inputs.values())
    shared = [i for i, s in enumerate(storages) if s and (s in known or storages.count(s) > 1)]
    return shared, [i for i, s in inputs.items() if s and s in storages]


class Watched:
    """Tensors that nobody may write to until the microbatch's glue is done. Keeps none of their memory."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, str]] = []
        self._storages: list[tuple[weakref.ref[torch.UntypedStorage], int, str]] = []
        """Those of inference tensors, which count nothing themselves."""

    def add(self, tensors: Iterable[Tensor], layer: str) -> None:
        for tensor in tensors:
            if tensor.is_inference():
                storage = tensor.untyped_storage()
                self._storages.append((weakref.ref(storage), writes_of(storage), layer))
            else:
                counter = tensor.detach()  # counts the same writes ...
                counter.data = tensor.new_empty(0)  # ... and holds nothing
                self._counters.append((counter, counter._version, layer))

    def check(self) -> None:
        """Raise if one of them has been written to."""
        now = [(counter._version, version, layer) for counter, version, layer in self._counters]
        now += [(writes_of(s), writes, layer) for ref, writes, layer in self._storages if (s := ref()) is not None]
        for count, before, layer in now:
            if count != before:
                raise RoundPipeError(
                    f"layer {layer!r} returned tensors that share memory with each other or with its input, and code "
                    "behind it wrote to one of them in place: the others would not follow. Write out of place, or "
                    "clone what the layer returns."
                )
