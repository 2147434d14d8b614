"""What torch functions do beside computing: which write to a tensor, and which make the host wait for a device."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.utils._pytree import tree_iter

IN_PLACE = re.compile(
    r"[a-z].*[^_]_|__(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
"""Names of tensor methods that write to their first argument."""


T = TypeVar("T")


class WatchedTensors(Generic[T]):
    """Tensors that are watched for writes, by their version counters. Each has a label. Keeps none of their memory."""

    def __init__(self) -> None:
        self._seen: list[tuple[T, Tensor, int]] = []

    def __iter__(self) -> Iterator[T]:
        return (label for label, _, _ in self._seen)

    def add(self, label: T, tensor: Tensor) -> None:
        counter = tensor.detach()  # shares the version counter
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._seen.append((label, counter, counter._version))

    def written(self) -> list[T]:
        """Return the labels of those that were written to since they were added, or since the last `forget_writes`."""
        return [label for label, counter, version in self._seen if counter._version != version]

    def forget_writes(self) -> None:
        self._seen = [(label, counter, counter._version) for label, counter, _ in self._seen]


_CONVERSIONS = {
    "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__repr__",
    "__str__", "__format__", "__array__", "cpu", "unique",
}  # fmt: skip
"""Functions that give values to Python or the host, and have no operator of their name that torch tags."""

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def _depends_on_values(name: str) -> bool:
    """Return whether torch says of its operator ``name`` that the host needs values for the output or its shape."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()  # type: ignore[no-untyped-call]
    return any(_TAGS.intersection(getattr(packet, overload).tags) for overload in overloads)


def waits(name: str, args: Any, kwargs: Any, accelerator: str) -> bool:
    """Return whether the torch function ``name`` blocks the host until a device is ready, judging by its arguments."""

    def is_there(value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == accelerator

    if name in _CONVERSIONS or (name == "where" and len(args) == 1) or _depends_on_values(name):
        return any(is_there(leaf) for leaf in tree_iter((args, kwargs)))
    if name in ("__getitem__", "__setitem__"):
        return any(is_there(leaf) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_iter(args[1:2]))
    if name == "copy_":
        return is_there(args[0]) != is_there(args[1] if len(args) > 1 else kwargs.get("src"))
    if name == "to":
        return is_there(args[0]) and any(_is_host(value) for value in (*args[1:], *kwargs.values()))
    return False


def _is_host(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return (isinstance(value, torch.device) and value.type == "cpu") or (type(value) is str and value == "cpu")
