"""Calls an operator below a dispatch mode as it is called without the mode: with autocast for operators of packages.

PyTorch calls ``__torch_dispatch__`` below autocast, which has cast the arguments of its own operators by then, and
turns autocast off there. An operator of a package (``torch.library``) has kernels that may call operators of PyTorch,
as bitsandbytes' product with a packed weight does. Without a mode these run under autocast. Below one they would
compute in fp32, so a batch that is watched would give other numbers than the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import enable_reentrant_dispatch


def call_below(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what the operator ``func`` gives, which a mode's ``__torch_dispatch__`` was called with."""
    if func.__module__ == "torch._ops.aten" or not isinstance(func, OpOverload):
        return func(*args, **kwargs)
    device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    if device is None or not torch.amp.is_autocast_available(device):
        return func(*args, **kwargs)
    with enable_reentrant_dispatch():  # the thread's state above the mode
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is None:
        return func(*args, **kwargs)
    with torch.autocast(device, dtype=dtype, cache_enabled=False):
        return func(*args, **kwargs)
