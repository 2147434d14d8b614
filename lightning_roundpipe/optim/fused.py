"""Decides where to use a fused kernel although the user did not ask for one.

On the CPU, torch's optimizers pass over a parameter's memory ten times where their fused kernels pass once, but use the
kernels only on request. The results agree up to rounding and the state is the same, so a run can continue with either.
Fused kernels are not used where more than rounding would differ:

- In half precision, the ordinary code rounds after each operation, or overflows; the kernels do not.
- The kernels walk through memory and ignore strides. A gradient with another layout than its parameter gives wrong
  results, and a parameter that is part of a larger tensor overwrites its neighbours (torch 2.13).
- They lack ``capturable`` and ``differentiable``, and read tensors given as hyperparameters in another precision.
- The state's step counter is float32; with a default dtype of float64 it would be float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
DTYPES = (torch.float32, torch.float64)
"""The dtypes in which the kernels compute as the ordinary code does."""
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "lr_decay")


def is_open(cls: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Return whether the user left the choice of kernel open, and a fused one computes the same."""
    return (
        cls in _CLASSES
        and group.get("fused") is None
        and group.get("foreach") is None
        and not group.get("capturable")
        and not group.get("differentiable")
        and torch.get_default_dtype() != torch.float64
        and all(_is_plain(group[name]) for name in _NUMBERS if name in group)
    )


def is_direct(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether the fused kernel may be called without ``step()``, which would use it too (or we would)."""
    cls = type(optimizer)
    return (
        cls in (torch.optim.Adam, torch.optim.AdamW)
        and (is_open(cls, group) or bool(group.get("fused")))
        and not group.get("differentiable")
        and all(_is_plain(group[name]) for name in _NUMBERS if name in group)
        and getattr(optimizer, "grad_scale", None) is getattr(optimizer, "found_inf", None) is None
    )


def fits(parameter: Tensor, gradient: Tensor | None, state: Mapping[str, Any]) -> bool:
    """Return whether a fused kernel can walk through a parameter, its gradient and its state side by side.

    torch makes sure that a gradient has its parameter's dtype, shape and device. A state may come from any file.
    """
    dtype, shape = parameter.dtype, parameter.shape
    if dtype not in DTYPES or not lies_plain(parameter, dtype, shape):
        return False
    if gradient is not None and not gradient.is_contiguous():
        return False
    averages = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return all(lies_plain(value, dtype, shape) for value in averages)


def lies_plain(tensor: Tensor, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Return whether ``tensor`` lies on the CPU as the kernels expect it."""
    lies_here = tensor.dtype is dtype and tensor.shape == shape and tensor.is_cpu and tensor.layout is torch.strided
    return lies_here and tensor.is_contiguous()


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float))
