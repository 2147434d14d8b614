"""Copies with the memory layout of their source: the same strides and the same alignment.

Matrix products on some CPUs, and kernels on GPUs, round differently when their operands are laid out or aligned
differently, as slices of a batch often are. The result of a call must not depend on whether, or how often, its inputs
were copied.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.base import filled

ALIGNED = 64
"""Alignment, in bytes, of the tensors that torch allocates."""


def misalignment(t: Tensor) -> int:
    """Return how many elements past a multiple of ``ALIGNED`` bytes ``t`` begins."""
    return t.data_ptr() % ALIGNED // t.itemsize


def reach(t: Tensor) -> int:
    """Return the number of elements from the first to the last one that ``t`` addresses, gaps included."""
    if not t.numel():
        return 0
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1


def empty_alike(t: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor with ``t``'s shape, dtype, strides and offset from a multiple of 64 bytes."""
    before = misalignment(t)
    if not before:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return torch.empty(before + reach(t), dtype=t.dtype, device=device).as_strided(t.shape, t.stride(), before)


def copy_alike(t: Tensor) -> Tensor:
    """Return a copy in ``t``'s memory layout if it has one: `Tensor.clone` closes the gaps of a view."""
    return filled(empty_alike(t, t.device), t) if _has_layout(t) else t.clone()


def clone_alike(t: Tensor) -> Tensor:
    """Return a differentiable `copy_alike`."""
    return cast(Tensor, _CopyAlike.apply(t)) if _has_layout(t) else t.clone()  # type: ignore[no-untyped-call]


class _CopyAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return copy_alike(t)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _has_layout(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
