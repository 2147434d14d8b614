"""Outputs of a layer that share memory with each other or with its inputs, and so must not be written to.

In plain training a write to one of them changes the others, and autograd knows. Behind the boundary they are separate
tensors that may or may not share memory, and autograd does not know.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.layer_calls.arguments import FlatValue
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.user_code.graph_cuts import witness
from lightning_roundpipe.runtime.user_code.inference_writes import writes_of


def overlapping(outputs: list[Tensor], given: dict[int, Tensor]) -> tuple[list[int], list[int]]:
    """Return which ``outputs``, and which positions of ``given``, share a storage with another output."""
    inputs = {i: t.untyped_storage().data_ptr() for i, t in given.items()}
    storages = [t.untyped_storage().data_ptr() for t in outputs]
    known = set(inputs.values())
    shared = [i for i, s in enumerate(storages) if s and (s in known or storages.count(s) > 1)]
    return shared, [i for i, s in inputs.items() if s and s in storages]


def private(leaves: list[Any], mutates: Collection[int]) -> list[Any]:
    """Return ``leaves`` with copies of those that the layer writes to, because other calls share them."""
    return [leaf.clone() if i in mutates and isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]


def apart_from_lent(
    inputs: list[Any], brought: list[Any], flats: Sequence[FlatValue], mutated: dict[int, Tensor]
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Clone returned tensors whose memory belongs to inputs that are lent for the call and given back after it.

    Args:
        inputs: leaves that the layer was given.
        brought: the same leaves as the call has them; each `HostTensor` was lent a device copy.
        flats: what the layer returned. Updated.
        mutated: inputs that the layer wrote to, by position.

    Returns:
        ``mutated`` with clones where needed, and all clones.
    """
    lent = {_memory(t) for t, leaf in zip(inputs, brought, strict=True) if isinstance(leaf, HostTensor)} - {0}
    own: list[Tensor] = []
    if not lent:
        return mutated, own

    def parted(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _memory(leaf) not in lent:
            return leaf
        own.append(leaf.clone())
        return own[-1]

    for flat in flats:
        flat.leaves = [parted(leaf) for leaf in flat.leaves]
    return {i: parted(t) for i, t in mutated.items()}, own


def _memory(tensor: Tensor) -> int:
    """Return a value that tensors sharing memory have in common; 0 without memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class SharedOutputs:
    """Tensors that must not be written to until the microbatch's user code is done. Keeps none of their memory."""

    def __init__(self) -> None:
        self._counters: list[tuple[Tensor, int, str]] = []
        self._storages: list[tuple[weakref.ref[torch.UntypedStorage], int, str]] = []
        """Storages of inference tensors, which have no version counter."""

    def add(self, tensors: Iterable[Tensor], layer: str) -> None:
        for tensor in tensors:
            if tensor.is_inference():
                storage = tensor.untyped_storage()
                self._storages.append((weakref.ref(storage), writes_of(storage), layer))
            else:
                counter = witness(tensor)
                self._counters.append((counter, counter._version, layer))

    def assert_unmodified(self) -> None:
        """Raise if one of the tensors has been written to."""
        now = [(counter._version, version, layer) for counter, version, layer in self._counters]
        now += [(writes_of(s), writes, layer) for ref, writes, layer in self._storages if (s := ref()) is not None]
        for count, before, layer in now:
            if count != before:
                raise RoundPipeError(
                    f"layer {layer!r} returned tensors that share memory with each other or with its input, and code "
                    "behind it wrote to one of them in place: the others would not follow. Write out of place, or "
                    "clone what the layer returns."
                )
