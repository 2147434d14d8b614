"""Gradient clipping as gradients arrive, with the bits of ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``.

torch's functions want all gradients at once. Most of their work is a norm for each gradient, which can be done while
others are still computed; what is left for the end is the norm of these norms and one multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@dataclass(frozen=True)
class Clip:
    """How an optimizer's gradients are clipped.

    Args:
        kind: all of them by their common norm, or each element by its value.
        value: the most that is left.
    """

    kind: Literal["norm", "value"]
    value: float


@torch.no_grad()
def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each of them, without dimensions and in its dtype."""
    return [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients]


@torch.no_grad()
def coefficient(norms_in_parameter_order: Sequence[Tensor], clip: Clip) -> Tensor:
    """What all gradients are to be multiplied by, at most 1; NaN if a norm is.

    Args:
        norms_in_parameter_order: of all gradients that there are, in the order of the optimizer's groups.
        clip: by norm.
    """
    assert clip.kind == "norm"
    if not norms_in_parameter_order:
        return torch.ones(())
    # torch sums dtype by dtype, in an order of its own, and a sum's bits depend on the order.
    by_dtype = _group_tensors_by_device_and_dtype([list(norms_in_parameter_order)])
    ordered = [norm for (group,), _ in by_dtype.values() for norm in group if norm is not None]
    total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return torch.clamp(float(clip.value) / (total + 1e-6), max=1.0)


@torch.no_grad()
def scale(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply each of them, in place."""
    if coefficient.item() == 1.0:
        return  # the same bits, without two passes over memory
    for gradient in gradients:
        gradient.mul_(coefficient)


@torch.no_grad()
def clamp(gradients: Sequence[Tensor], clip: Clip) -> None:
    """Clip each element by its value, in place."""
    assert clip.kind == "value"
    value = float(clip.value)
    for gradient in gradients:
        gradient.clamp_(-value, value)
