"""Dynamic loss scaling with the bits of ``torch.amp.GradScaler``, for gradients that arrive one after another.

In fp16 small gradients vanish, so the loss is multiplied by a large factor and the gradients are divided by it again.
If any of them is not finite the factor was too large: the whole step is skipped, and the factor halved. torch's own
class wants all gradients at once, in ``.grad``; its numbers, and what it saves, are used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler


class LossScale:
    """The factor, kept in a ``GradScaler`` that others may look at, save and load.

    Args:
        scaler: on the CPU.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def now(self) -> float:
        """What losses are multiplied by."""
        return float(self._scaler.get_scale())

    def update(self, *, finite: bool) -> None:
        """After a step, which was skipped if its gradients were not ``finite``; as ``GradScaler.update`` does."""
        state = self._scaler.state_dict()
        unskipped = state["_growth_tracker"] + 1 if finite else 0
        if not finite:
            state["scale"] *= state["backoff_factor"]
        elif unskipped == state["growth_interval"]:
            unskipped, grown = 0, state["scale"] * state["growth_factor"]
            state["scale"] = grown if math.isfinite(torch.tensor(grown, dtype=torch.float32).item()) else state["scale"]
        state["_growth_tracker"] = unskipped
        self._scaler.load_state_dict(state)


@torch.no_grad()
def unscale(gradients: Iterable[Tensor], scale: float) -> bool:
    """Divide each of them by ``scale``, in place.

    Returns:
        Whether all of them are finite.

    Raises:
        ValueError: for gradients in fp16, as torch does: the weights themselves are.
    """
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
    found = torch.zeros((), dtype=torch.float32)
    for gradient in gradients:
        if gradient.dtype is torch.float16:
            raise ValueError(
                "precision='16-mixed' trains fp32 weights, and the optimizer has some in float16: build the model "
                "in float32, or set precision='16-true', which keeps fp32 masters of them."
            )
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
    return not found.item()
