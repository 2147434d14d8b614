"""From the sums of a step to ``.grad``: the loss that training_step returns.

Lightning divides the loss, may scale it, calls ``zero_grad`` and only then ``backward``. So the gradients, which are
complete when ``training_step`` returns, wait in host buffers, and the returned loss is a node of which every master is
an input: its backward multiplies the sums by what arrives and hands them to autograd. Accumulation over batches,
parameter hooks and overridden ``backward`` hooks then work as in plain training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.weights import HostGradients


class StepGradients:
    """The gradients of one step, before its loss is differentiated.

    Args:
        sums: per call, in trace order.
        glue: what glue's stand-ins gathered, in microbatch order.
        factor: corrects the provisional total of the loss weights.
    """

    def __init__(
        self, sums: Iterable[HostGradients], glue: Iterable[tuple[nn.Parameter, Tensor]], factor: float
    ) -> None:
        self._sums = list(sums)
        self._glue = list(glue)
        self._factor = factor
        self.masters = self._with_gradient()

    def _with_gradient(self) -> list[nn.Parameter]:
        found: dict[int, nn.Parameter] = {}
        for total in self._sums:
            for position, present in zip(total.layout.positions, total.present, strict=True):
                if present:
                    found[id(total.layer.masters[position])] = total.layer.masters[position]
        found.update({id(master): master for master, _ in self._glue})
        return list(found.values())

    def loss(self, value: Tensor, *, differentiable: bool) -> Tensor:
        """``value`` with a backward that hands the gradients out.

        Args:
            value: the merged loss.
            differentiable: whether a microbatch's loss required grad. If so, and it depends on no parameter, a backward
                pass does nothing; if not, it fails, as it would on the loss itself.
        """
        with torch.enable_grad():
            anchors: list[Tensor] = [*self.masters] or [torch.zeros((), requires_grad=True)]
            loss: Tensor = _StepLoss.apply(self if differentiable else None, value, *anchors)  # type: ignore[no-untyped-call]
        return loss

    def take(self, scale: float) -> list[Tensor]:
        """The gradients of ``masters`` times ``scale``. Once only: they are scaled where they lie."""
        if not self.masters:
            return []
        if not self._sums and not self._glue:
            raise RoundPipeError(
                "backward was called twice on the loss of one training_step: its gradients have been handed out."
            )
        scale *= self._factor
        totals: dict[int, Tensor] = {}
        for total in self._sums:
            for key, grad in total.take(scale).items():
                totals[key] = totals[key].add_(grad) if key in totals else grad
        for master, grad in self._glue:
            grad = grad * scale
            totals[id(master)] = totals[id(master)].add_(grad) if id(master) in totals else grad
        self._sums, self._glue = [], []
        return [totals.pop(id(master)) for master in self.masters]


class _StepLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: StepGradients | None, value: Tensor, *anchors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.anchors = len(anchors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RoundPipeError(
                "training_step returned a loss that does not require grad: it was detached, computed under "
                "torch.no_grad(), or depends on no parameter that is trained. Return the loss as it was computed, or "
                "None to skip the batch."
            )
        taken = ctx.gradients.take(float(grad))
        return None, None, *(taken or [None] * ctx.anchors)
