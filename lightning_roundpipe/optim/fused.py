"""Where a fused kernel is used although the user did not ask for one.

On the CPU torch's optimizers take ten passes over a parameter's memory where their fused kernels take one, and they use
those only if told to. The numbers agree to rounding and the state is the same, so that a run goes on with either.
They are not used where more than rounding would differ:

- In half precision the ordinary code rounds after each operation, or overflows; the kernels do not.
- The kernels walk through memory and ignore strides: a gradient laid out otherwise than its parameter gives wrong
  numbers, a parameter that is part of a larger tensor destroys its neighbours (torch 2.13).
- They lack ``capturable`` and ``differentiable``, and read tensors given as hyperparameters in another precision.
- The state's counter of steps is float32; with a default dtype of float64 it would be float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
DTYPES = (torch.float32, torch.float64)
"""That the kernels compute in as the ordinary code does."""
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "lr_decay")


def is_open(cls: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether the hyperparameters leave the kernel to us, and a fused one has the same meaning."""
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
    """Whether the kernel may be called without ``step()``: it is the one that ``step()`` takes, or that we take."""
    cls = type(optimizer)
    return (
        cls in (torch.optim.Adam, torch.optim.AdamW)
        and (is_open(cls, group) or bool(group.get("fused")))
        and not group.get("differentiable")
        and all(_is_plain(group[name]) for name in _NUMBERS if name in group)
        and getattr(optimizer, "grad_scale", None) is getattr(optimizer, "found_inf", None) is None
    )


def fits(parameter: Tensor, gradient: Tensor | None, state: Mapping[str, Any]) -> bool:
    """Whether a fused kernel may walk through a parameter, its gradient and its state side by side.

    A gradient has its parameter's dtype, shape and device; torch sees to that. A state may come from any file.
    """
    dtype, shape = parameter.dtype, parameter.shape
    if dtype not in DTYPES or not parameter.is_cpu or not parameter.is_contiguous():
        return False
    if gradient is not None and not gradient.is_contiguous():
        return False
    for value in state.values():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if value.dtype is not dtype or value.shape != shape or not value.is_cpu or not value.is_contiguous():
            return False
    return True


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float))
