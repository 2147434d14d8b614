"""What crosses from call to call of one microbatch, seen as the calls are made one after another.

A stage that keeps graphs holds a tensor once, whoever takes it: a mask that all blocks share, or an output that is the
next call's input. And a microbatch that waits for its next stage holds what earlier calls gave and user code has not
dropped yet. Both are told by storages, of which only weak references are kept here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Crossed:
    """One call's part of it; see `CallCost`."""

    input_bytes: int = 0
    waiting_bytes: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    passed: tuple[tuple[int, int], ...] = ()


class Crossing:
    """Of one microbatch."""

    def __init__(self) -> None:
        self._calls = 0
        self._taken: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The last call that had it as an input."""
        self._given: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The call that gave it."""

    def see(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Crossed:
        """The next call, when it has returned and user code has not gone on."""
        waiting = sum(storage.nbytes() for storage in self._given)
        taken = {tensor.untyped_storage(): tensor_bytes(tensor) for tensor in inputs}
        shared, passed = Counter[int](), Counter[int]()
        for storage, size in taken.items():
            if (before := self._taken.get(storage)) is not None:
                shared[self._calls - before] += size
            elif (before := self._given.get(storage)) is not None:
                passed[self._calls - before] += size
            self._taken[storage] = self._calls
        for tensor in outputs:
            self._given.setdefault(tensor.untyped_storage(), self._calls)
        self._calls += 1
        return Crossed(sum(taken.values()), waiting, tuple(shared.items()), tuple(passed.items()))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a copy of ``tensor``; expanded dimensions take none."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in strided})
