"""Whether a tensor is still what it was when it was saved, where torch does not count: in inference mode.

Tensors that are made there have no version. So code between layers is followed: whatever computes with such a tensor
may have written to it, and what was saved of it is not relied on any more. Masks and tables that are only handed from
layer to layer are saved once all the same. The count stands at the storage, for views write to what others see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_COUNT = "_roundpipe_writes"


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Something else when the tensor may have been written to meanwhile, or been given other memory."""
    if tensor.layout is not torch.strided:
        return 0, 0 if tensor.is_inference() else tensor._version
    count = getattr(tensor.untyped_storage(), _COUNT, 0) if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), count


def touched(tensor: Tensor) -> None:
    """It may have been written to."""
    if tensor.is_inference() and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()  # torch keeps the Python object for as long as there is the storage
        setattr(storage, _COUNT, getattr(storage, _COUNT, 0) + 1)


def touched_by(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """The same of a torch function's arguments, and of what stands in lists among them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            touched(value)
        elif isinstance(value, (list, tuple)):
            touched_by(value, {})
