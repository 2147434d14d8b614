"""Whether a tensor is still what it was when it was saved, where torch does not count: in inference mode.

Tensors that are made there have no version. So code between layers is followed: whatever computes with such a tensor
may have written to it, and what was saved of it is not relied on any more. Masks and tables that are only handed from
layer to layer are saved once all the same. The count stands at the storage, for views write to what others see.
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
"""Names of tensors' methods that write to the first argument."""
_TOUCHED, _WRITTEN = "_roundpipe_touched", "_roundpipe_written"


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Something else when the tensor may have been written to meanwhile, or been given other memory."""
    if tensor.layout is not torch.strided:
        return 0, 0 if tensor.is_inference() else tensor._version
    count = getattr(tensor.untyped_storage(), _TOUCHED, 0) if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), count


def writes_of(storage: torch.UntypedStorage) -> int:
    """How often an inference tensor of that memory was the target of an operation that writes."""
    return int(getattr(storage, _WRITTEN, 0))


def touched(tensor: Tensor, *, written: bool = False) -> None:
    """It may have been written to, or was."""
    if tensor.is_inference() and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()  # torch keeps the Python object for as long as there is the storage
        setattr(storage, _TOUCHED, getattr(storage, _TOUCHED, 0) + 1)
        if written:
            setattr(storage, _WRITTEN, writes_of(storage) + 1)


def touched_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The same of the arguments of the torch function ``name``, and of what stands in lists among them."""
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
