"""Gradient clipping as gradients arrive, with the bits of ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``.

torch's functions need all gradients at once. Most of their work is one norm per gradient, which can be computed while
other gradients are still missing. Only the norm of these norms and one multiplication are left for the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_roundpipe.optim.narrow_gradient import AnyGradient, widened


@dataclass(frozen=True)
class Clip:
    """How to clip an optimizer's gradients.

    Args:
        kind: ``"norm"`` clips by the common norm of all gradients, ``"value"`` clips each element.
        value: the largest norm or absolute value that is left.
    """

    kind: Literal["norm", "value"]
    value: float


@torch.no_grad()
def norms(gradients: Sequence[AnyGradient]) -> list[Tensor]:
    """Return the norm of each gradient, a scalar tensor of the gradient's dtype."""
    return [torch.linalg.vector_norm(widened(gradient), 2.0) for gradient in gradients]


@torch.no_grad()
def coefficient(norms_in_parameter_order: Sequence[Tensor], clip: Clip) -> Tensor:
    """Return the factor for all gradients, at most 1; NaN if a norm is NaN.

    Args:
        norms_in_parameter_order: norms of all existing gradients, in the order of the optimizer's groups.
        clip: must be of kind ``"norm"``.
    """
    assert clip.kind == "norm"
    if not norms_in_parameter_order:
        return torch.ones(())
    # torch reduces dtype by dtype, in its own order, and the bits of a sum depend on the order.
    by_dtype = _group_tensors_by_device_and_dtype([list(norms_in_parameter_order)])
    ordered = [norm for (group,), _ in by_dtype.values() for norm in group if norm is not None]
    total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return torch.clamp(float(clip.value) / (total + 1e-6), max=1.0)


@torch.no_grad()
def scale(gradients: Sequence[AnyGradient], coefficient: Tensor) -> None:
    """Multiply each gradient by ``coefficient``, in place."""
    if coefficient.item() == 1.0:
        return  # the same bits, without reading and writing all gradients
    for gradient in gradients:
        gradient.mul_(coefficient)


@torch.no_grad()
def clamp(gradients: Sequence[AnyGradient], clip: Clip) -> None:
    """Clip each element of the gradients by its value, in place."""
    assert clip.kind == "value"
    value = float(clip.value)
    for gradient in gradients:
        gradient.clamp_(-value, value)
