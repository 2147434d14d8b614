"""Dynamic loss scaling with the bits of ``torch.amp.GradScaler``, for gradients that arrive one after another.

Small gradients underflow in fp16, so losses are multiplied by a large scale, and gradients divided by it. If a gradient
is not finite, the scale was too large: the whole step is skipped and the scale reduced. torch's own class needs all
gradients at once, in ``.grad``. This module uses its numbers and its saved state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.amp import GradScaler

from lightning_roundpipe.optim.narrow_gradient import AnyGradient, widened


class LossScale:
    """The loss scale, kept in a ``GradScaler`` that other code may read, save and load.

    Args:
        scaler: a scaler on the CPU.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._example = torch.optim.SGD([torch.zeros((), dtype=torch.float32, device="cpu")])
        """Its gradient tells the scaler whether those of a step were finite."""

    def now(self) -> float:
        """Return the present scale of losses."""
        return float(self._scaler.get_scale())

    def update(self, *, finite: bool) -> None:
        """Update the scale after a step as ``GradScaler.update`` does. The step was skipped if not ``finite``."""
        self._example.param_groups[0]["params"][0].grad = torch.full(
            (), 0.0 if finite else math.inf, dtype=torch.float32, device="cpu"
        )
        self._scaler.unscale_(self._example)
        self._scaler.update()


@torch.no_grad()
def unscale(gradients: Iterable[AnyGradient], scale: float) -> bool:
    """Divide each gradient by ``scale``, in place.

    Returns:
        Whether all gradients are finite.

    Raises:
        ValueError: a gradient is in fp16, because the weights themselves are. torch raises there too.
    """
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
    found = torch.zeros((), dtype=torch.float32)
    for gradient in gradients:
        if gradient.dtype is torch.float16:
            raise ValueError(
                "precision='16-mixed' trains fp32 weights, and the optimizer has some in float16: build the model "
                "in float32, or set precision='16-true', which keeps fp32 masters of them."
            )
        wide = widened(gradient)
        torch._amp_foreach_non_finite_check_and_unscale_([wide], found, inverse)
        if wide is not gradient:
            gradient.mul_(inverse)
    return not found.item()
