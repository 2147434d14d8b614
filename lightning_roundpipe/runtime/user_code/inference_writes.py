"""Detects writes to tensors in inference mode, where torch keeps no version counters.

A layer is given aliases that have one (`counting_writes`). Code between layers is observed instead: any function that
takes such a tensor may have written to it, and what was saved of the tensor is not reused then. Masks and tables that
are only passed from layer to layer are still saved just once. The counter is kept on the storage, because a write to a
view changes what other views see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

IN_PLACE = re.compile(
    r"[a-z].*[^_]_|__(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
"""Names of tensor methods that write to their first argument."""
_TOUCHED, _WRITTEN = "_roundpipe_touched", "_roundpipe_written"


def counting_writes(tensors: Iterable[Tensor], *, inference: bool) -> list[Tensor]:
    """Return aliases of ``tensors`` that count writes from now on; see `is_written`.

    Args:
        tensors: the tensors.
        inference: whether inference mode is on. There, detached tensors count nothing, as opposed to new ones.
    """
    if not inference:
        return [t.data for t in tensors]
    with torch.inference_mode(False):
        return [_renewed(t) if type(t) is Tensor and t.layout is torch.strided else t for t in tensors]


def _renewed(tensor: Tensor) -> Tensor:
    if tensor.is_conj() or tensor.is_neg():  # which only the tensor itself knows of its memory
        return tensor
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_written(alias: Tensor, *, inference: bool) -> bool:
    """Return whether somebody has written to an alias that `counting_writes` has made."""
    return not alias.is_inference() and alias._version > inference  # making it counts as one


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
    while is_functorch_wrapped_tensor(tensor):  # within vmap, where only the tensor inside has a storage
        tensor = get_unwrapped(tensor)
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
