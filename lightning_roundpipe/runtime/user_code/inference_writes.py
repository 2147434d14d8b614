"""Detects writes to saved tensors in inference mode, where torch keeps no version counters.

Code between layers is observed instead: any function that takes such a tensor may have written to it, and what was
saved of the tensor is not reused then. Masks and tables that are only passed from layer to layer are still saved just
once. The counter is kept on the storage, because a write to a view changes what other views see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

IN_PLACE = re.compile(
    r"[a-z].*[^_]_|__(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
"""Names of tensor methods that write to their first argument."""
_TOUCHED, _WRITTEN = "_roundpipe_touched", "_roundpipe_written"


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes if the tensor may have been written to, or has other memory."""
    if tensor.layout is not torch.strided:
        return 0, 0 if tensor.is_inference() else tensor._version
    count = getattr(tensor.untyped_storage(), _TOUCHED, 0) if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), count


def writes_of(storage: torch.UntypedStorage) -> int:
    """Return how often an operation that writes had an inference tensor of this storage as its target."""
    return int(getattr(storage, _WRITTEN, 0))


def touched(tensor: Tensor, *, written: bool = False) -> None:
    """Count that ``tensor`` may have been written to, or was if ``written``."""
    if tensor.is_inference() and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()  # torch keeps this Python object as long as the storage lives
        setattr(storage, _TOUCHED, getattr(storage, _TOUCHED, 0) + 1)
        if written:
            setattr(storage, _WRITTEN, writes_of(storage) + 1)


def touched_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count the tensors among the arguments of the torch function ``name``, including those in lists."""
    _touch_all((*args, *kwargs.values()))
    target = args[0] if args and (kwargs.get("inplace") or IN_PLACE.fullmatch(name)) else kwargs.get("out")
    if isinstance(target, Tensor):
        touched(target, written=True)


def _touch_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            touched(value)
        elif isinstance(value, (list, tuple)):
            _touch_all(value)
