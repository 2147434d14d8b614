"""The losses of a part of a batch, as far as it is known how those of all parts give that of the batch.

In evaluation there is no autograd graph that shows where a loss comes from (`losses`). The functions that compute it
show it instead:

    F.cross_entropy, F.mse_loss, ... ── their result is a mean over so many targets, or a sum ── [1]
    casts, numeric factors, sums of such results that weigh the same ── weigh the same, too ── [2]
    a result that is written to (``loss += auxiliary``) ── is no longer known ── [3]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_roundpipe.runtime.batch.losses import COUNTED, reduction_of
from lightning_roundpipe.runtime.batch.microbatches import weighted_mean

Weight = float | Tensor | Literal["sum"]
"""By how many targets a mean counts, or ``"sum"`` for what is added."""

_ELEMENTWISE = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
}  # fmt: skip
"""Losses whose mean is over the elements of their first argument."""
_SCALED = {
    "mul",
    "__mul__",
    "__rmul__",
    "div",
    "__truediv__",
    "true_divide",
    "to",
    "float",
    "double",
    "clone",
    "detach",
}
_ADDED = {"add", "__add__", "__radd__", "sub", "__sub__"}


class KnownLosses:
    """What the loss functions that user code has called returned."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, Weight]] = []  # holds the tensors, so that their addresses stay theirs

    def clear(self) -> None:
        self._known.clear()

    def weight_of(self, value: Tensor) -> Weight | None:
        """Return how ``value`` counts beside those of other parts; None if that is not known."""
        for known, weight in self._known:
            if known.data_ptr() == value.data_ptr() and known.shape == value.shape and known.dtype is value.dtype:
                return weight
        return None

    def note(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any,
        targets: Callable[[], float | Tensor],
    ) -> None:  # fmt: skip
        """Record a call of a loss function [1].

        Args:
            function: one of `losses.WITH_REDUCTION`.
            args, kwargs: its arguments.
            result: what it returned.
            targets: returns the number of targets of a cross entropy.
        """
        reduction = reduction_of(function, args, kwargs)
        if not isinstance(result, Tensor) or result.dim():
            return
        if reduction == "sum":
            self._known.append((result, "sum"))
        elif reduction == "mean" and function in COUNTED:
            self._known.append((result, targets()))
        elif reduction == "mean" and function in _ELEMENTWISE and len(args) > 1:
            predicted, target = args[:2]
            if predicted.shape == target.shape and len(args) == 2 and kwargs.get("weight") is None:
                self._known.append((result, float(predicted.numel())))

    def follow(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record what the torch function ``name`` makes of losses [2]."""
        if not self._known or not isinstance(result, Tensor) or result.dim() or name not in _SCALED | _ADDED:
            return
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        weights = [self.weight_of(tensor) for tensor in tensors]
        if name in _SCALED and len(tensors) == 1 and weights[0] is not None:
            self._known.append((result, weights[0]))
        elif name in _ADDED and len(tensors) == len(args) == 2:
            one, other = weights
            if one is not None and other is not None and _same(one, other):
                self._known.append((result, one))

    def forget(self, written: Any) -> None:
        """Drop what is written to [3]: everything, if ``written`` is not a tensor, but a list of them, say."""
        if not isinstance(written, Tensor):
            self.clear()
        elif self._known:
            storage = written.untyped_storage().data_ptr()
            self._known = [known for known in self._known if known[0].untyped_storage().data_ptr() != storage]


def combined_losses(losses: Sequence[Tensor], weights: Sequence[Weight | None]) -> Tensor | None:
    """Return the loss of the batch from those of its parts; None if they combine in different ways."""
    sums = [isinstance(weight, str) for weight in weights]
    if all(sums):
        return torch.stack([loss.double() for loss in losses]).sum().to(losses[0])
    if any(sums):
        return None
    numbers = [float(weight) for weight in weights if weight is not None]
    home = losses[0]
    if not sum(numbers):  # a mean over no targets is not a number, and so is that of the batch
        return home.clone()
    return weighted_mean(list(losses), numbers).to(home)


def _same(one: Weight, other: Weight) -> bool:
    if one == "sum" or other == "sum":
        return one is other or (isinstance(one, str) and isinstance(other, str))
    return float(one) == float(other)
