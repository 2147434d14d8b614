"""Tensors that cross from call to call of a microbatch.

A stage that keeps graphs holds a tensor once, even if several calls take it: a mask that all blocks share, or an output
that is the next call's input. A microbatch that waits for its next stage holds the outputs of earlier calls that user
code has not dropped yet. `Crossing` identifies tensors by their storages, to which it keeps weak references only.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Crossed:
    """What crosses into one call. For the fields see `CallCost`."""

    input_bytes: int = 0
    waiting_bytes: int = 0
    held_bytes: int = 0
    made_bytes: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    passed: tuple[tuple[int, int], ...] = ()


@dataclass
class _Span:
    """A storage from the call that returned it to the last one that takes it, ``unchanged`` on the way."""

    returned: int
    nbytes: int
    last: int = 0
    unchanged: bool = True


class Crossing:
    """Records the calls of one microbatch, one after another."""

    def __init__(self) -> None:
        self._calls = 0
        self._taken: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The last call that took the storage as an input."""
        self._outputs: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The call that returned the storage."""
        self._of_user_code: list[tuple[int, weakref.WeakSet[torch.UntypedStorage]]] = []
        """What user code has made before each call: bytes that are not inputs of the call, and those that are."""
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """What user code has made, and calls have taken."""
        self._spans: weakref.WeakKeyDictionary[torch.UntypedStorage, _Span] = weakref.WeakKeyDictionary()
        self._begun: list[list[_Span]] = []
        """The spans that begin at each call."""

    def see(
        self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], made_bytes: int = 0, made: Iterable[Tensor] = (),
        unchanged: Iterable[Tensor] = (),
    ) -> Crossed:  # fmt: skip
        """Record the next call, after it returns and before user code continues.

        Args:
            inputs: its inputs.
            outputs: what it returned.
            made_bytes: bytes of workers that user code itself has made and holds.
            made: the inputs that may be among these; outputs of earlier calls are not.
            unchanged: the inputs that are differentiable outputs of earlier calls, not changed since.
        """
        inputs = list(inputs)
        waiting = self.held_bytes() + made_bytes
        taken = {tensor.untyped_storage(): tensor_bytes(tensor) for tensor in inputs}
        own = weakref.WeakSet(tensor.untyped_storage() for tensor in made)
        own -= set(self._outputs)
        self._of_user_code.append((max(0, made_bytes - sum(storage.nbytes() for storage in own)), own))
        self._made |= own
        untaken = max(0, made_bytes - sum(storage.nbytes() for storage in self._made))
        held = sum(storage.nbytes() for storage in self._outputs if storage not in taken) + self._of_user_code[-1][0]
        shared, passed = Counter[int](), Counter[int]()
        for storage, size in taken.items():
            if (before := self._taken.get(storage)) is not None:
                shared[self._calls - before] += size
            elif (before := self._outputs.get(storage)) is not None:
                passed[self._calls - before] += size
            self._taken[storage] = self._calls
        self._span(taken, {id(tensor) for tensor in unchanged}, inputs)
        for tensor in outputs:
            self._outputs.setdefault(tensor.untyped_storage(), self._calls)
        self._calls += 1
        return Crossed(sum(taken.values()), waiting, held, untaken, tuple(shared.items()), tuple(passed.items()))

    def _span(self, taken: Mapping[torch.UntypedStorage, int], unchanged: set[int], inputs: Iterable[Tensor]) -> None:
        begun, others = list[_Span](), {t.untyped_storage() for t in inputs if id(t) not in unchanged}
        for storage, size in taken.items():
            if (returned := self._outputs.get(storage)) is not None:
                if (span := self._spans.get(storage)) is None:
                    span = self._spans[storage] = _Span(returned, size)
                    begun.append(span)
                span.last, span.unchanged = self._calls, span.unchanged and storage not in others
        self._begun.append(begun)

    def recomputable(self, call: int) -> tuple[tuple[int, int, int], ...]:
        """Return `CallCost.recomputable` of a call, when all calls have been recorded."""
        return tuple((call - s.returned, s.last - call, s.nbytes) for s in self._begun[call] if s.unchanged)

    def alive(self) -> list[torch.UntypedStorage]:
        """Return what the calls have taken and returned and is alive now."""
        return [*self._taken, *self._outputs]

    def held_bytes(self) -> int:
        """Return the bytes of what the calls have returned and user code, or autograd for it, holds now."""
        return sum(storage.nbytes() for storage in self._outputs)

    def backward_held_bytes(self, call: int) -> int:
        """Return the bytes that user code, or autograd for it, holds at the backward of ``call``."""
        made, inputs = self._of_user_code[call]
        return self.held_bytes() + made + sum(storage.nbytes() for storage in inputs)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a copy of ``tensor``. Expanded dimensions count once."""
    if tensor.is_contiguous():  # so is an empty one
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in strided})
