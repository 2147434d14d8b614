"""Copies that lie in memory as what they are copies of.

Products on some CPUs, and kernels on GPUs, have other bits when their operands lie otherwise, as parts of a batch often
do. What a call computes must not depend on whether its inputs were copied, nor on how often.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 64
"""Bytes: torch's own tensors begin at multiples of this many."""


def apart(t: Tensor) -> int:
    """How many elements ``t`` begins behind such a multiple."""
    return t.data_ptr() % ALIGNED // t.element_size()


def reach(t: Tensor) -> int:
    """Elements of memory from the first one of ``t`` to the last."""
    if not t.numel():
        return 0
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1


def empty_alike(t: Tensor, device: torch.device) -> Tensor:
    """Of ``t``'s shape, dtype and strides, and as far behind a multiple of 64 bytes. Uninitialised."""
    before = apart(t)
    if not before:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
    return torch.empty(before + reach(t), dtype=t.dtype, device=device).as_strided(t.size(), t.stride(), before)
