"""The losses that a step returns to Lightning, whose backward hands out the gradients of the window.

Lightning divides each loss, may scale it, calls ``zero_grad`` and only then ``backward``. Until then the gradients wait
in host buffers. Each returned loss is an autograd node, and the gradient that reaches the nodes, which is the same for
all, is the factor to scale them by. Then there are two ways:

* The last node's inputs are the masters that have a gradient. It returns the gradients, and autograd adds them to
  ``.grad``. Hooks, overridden parts of the step and any optimizer work as in plain training, but the step's backward
  must have ended.
* All nodes' input is a dummy, and `async_optimizer` takes the gradients from the buffers, bucket by bucket. It may
  begin while the step's backward is still running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, NarrowGradient, together, widened
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.user_code.stand_ins import Proxies


class StepGradients:
    """The gradients of one window, until an optimizer or ``.grad`` has taken them.

    Args:
        sums: the host sums, per call, in an order that no plan changes.
        proxies: the stand-ins that user code has read, in microbatch order.
        factor: corrects the provisional total of the loss weights that the microbatches computed with.
        readiness: reports when the gradients of a bucket are complete, if they are taken bucket by bucket and ``.grad``
            stays untouched. None: all are complete, or will be once their downloads are waited for.
        share: returns the factor of the window beside those of other machines, with which it exchanges theirs; None if
            there are none.

    Attributes:
        scale: the factor to multiply the gradients by; None until a loss has been differentiated.
        handed_out: whether an optimizer or ``.grad`` takes the gradients.
        masters: those that have a gradient; empty if gradients are taken bucket by bucket.
    """

    def __init__(
        self, sums: Sequence[HostGradSums], proxies: Sequence[Proxies], factor: float,
        readiness: GradReadiness | None = None, share: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._share = share
        self.sums = list(sums)
        """The host sums per call; empty once all have been released."""
        self._of: dict[ParamBucket, list[HostGradSums]] = defaultdict(list)
        for total in sums:
            self._of[total.layer.bucket].append(total)
        self._proxies = list(proxies)
        self._factor = factor
        self.readiness = readiness
        self.scale: float | None = None
        self.handed_out = False
        self._losses = 0
        """The number of losses whose backward is to come."""
        self.masters: list[nn.Parameter] = []
        if readiness is None:
            found = {id(master): master for total in sums for master in total.got()}
            found.update({id(master): master for master, _ in self._user_code()})
            self.masters = list(found.values())

    def losses(self, values: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        """Return the losses of the batches, in order, as nodes. The backward of the last one hands out the gradients.

        The masters are inputs of the last one alone: hooks of a parameter run where there is a gradient.

        ``values``: the value of each loss, and whether a microbatch's loss required grad. If not, backward raises, as
        it would on the loss itself. If so and no master has a gradient, backward does nothing.
        """
        last = max((i for i, (_, differentiable) in enumerate(values) if differentiable), default=None)
        self._losses = sum(differentiable for _, differentiable in values)
        found = []
        with torch.enable_grad():
            for i, (value, differentiable) in enumerate(values):
                masters = self.masters if i == last else []
                anchors: list[Tensor] = [*masters] or [torch.zeros((), requires_grad=True)]
                loss: Tensor = _StepLoss.apply(self if differentiable else None, value, *anchors)  # type: ignore[no-untyped-call]
                found.append(loss)
        return found

    def differentiated(self, scale: float) -> list[Tensor]:
        """Set `scale`: backward has reached one of the losses.

        Returns, with the last loss, the gradients of the masters that have one; an empty list before, and if they are
        taken bucket by bucket.
        """
        self._losses -= 1
        if self.scale not in (None, scale * self._factor):
            raise RoundPipeError(
                "the losses of one accumulation window were differentiated with different factors: their gradients are "
                "summed before. Weigh losses in training_step, before it returns them."
            )
        self.scale = scale * self._factor
        if self.readiness is not None:
            self.handed_out = True
            return []
        if self._losses:
            return []
        self.handed_out = True
        if not self.masters and self._share is None:
            return []
        self.weigh()
        for total in self.sums:
            total.handed_out = True
        taken = self._taken(self.sums, self._user_code(), widen=True)
        found = [widened(taken.pop(id(master))) for master in self.masters]
        self.release()
        return found

    def multiply(self, factor: float, *, losses: bool) -> None:
        """Multiply the gradients by a quotient of loss scales; with ``losses``, also for losses yet to come."""
        if losses:
            self._factor *= factor
        if self.scale is not None:
            self.scale *= factor

    def weigh(self) -> None:
        """Multiply `scale` by the share of this batch in those of all machines. Call it once, on each machine."""
        if self._share is not None:
            assert self.scale is not None
            self.scale *= self._share()

    def take(self, bucket: ParamBucket, *, widen: bool) -> dict[int, AnyGradient]:
        """Return the gradients of a ready bucket by id of the master, scaled in place. Call it once per bucket.

        ``widen``: whether all are tensors, and none narrow.
        """
        user_code = self._user_code({id(master) for master in bucket.masters}) if self._proxies else []
        return self._taken(self._of[bucket], user_code, widen=widen)

    def arrive(self) -> None:
        """Wait until all sums are on the host."""
        for total in self.sums:
            total.wait()

    def release(self, bucket: ParamBucket | None = None) -> None:
        """Give back the memory of the gradients of ``bucket``, by default of all buckets."""
        for total in self.sums if bucket is None else self._of[bucket]:
            total.release()
        if bucket is None:
            self.sums, self._proxies = [], []
            self._of.clear()

    def _user_code(self, masters: set[int] | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        return [pair for proxies in self._proxies for pair in proxies.gradients(masters)]

    def _taken(
        self, sums: list[HostGradSums], user_code: list[tuple[nn.Parameter, Tensor]], *, widen: bool
    ) -> dict[int, AnyGradient]:
        assert self.scale is not None
        totals: dict[int, AnyGradient] = {}
        for total in sums:
            taken = total.take(self.scale, widen=widen)
            if not self.scale:  # the batch counts for nothing, and its gradients may be NaN
                for gradient in taken.values():
                    for part in gradient.parts if isinstance(gradient, NarrowGradient) else (gradient,):
                        part.zero_()
            for key in totals.keys() & taken.keys():
                taken[key] = together(totals[key], taken[key])
            totals |= taken
        for master, grad in user_code:
            grad = grad * self.scale if self.scale else torch.zeros_like(grad)
            totals[id(master)] = together(totals[id(master)], grad) if id(master) in totals else grad
        return totals


class _StepLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: StepGradients | None, value: Tensor, *anchors: Tensor) -> Tensor:
        ctx.gradients, ctx.done = gradients, False
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
        if ctx.done:
            raise RoundPipeError(
                "backward was called twice on the loss of one training_step: its gradients have been handed out."
            )
        ctx.done = True
        taken = ctx.gradients.differentiated(float(grad))
        for master, gradient in zip(ctx.gradients.masters, taken, strict=False):
            if not master.requires_grad:  # a later batch of the window has switched it off, and autograd would drop it
                master.grad = gradient if master.grad is None else master.grad + gradient
        return None, None, *(taken or [None] * ctx.anchors)
