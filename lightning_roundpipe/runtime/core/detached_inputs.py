"""Where a layer's graph begins on its worker, and what its gradients end up in; the other end is `tape.boundary`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError


class DetachedInputs:
    """A layer's inputs on the worker, as non-leaf aliases whose gradients end up in ``grads`` (one per tensor).

    A context in which gradients may arrive.

    Attributes:
        within: another one, for all of the layer's backward.
    """

    def __init__(self, layer: str) -> None:
        self.grads: list[Tensor | None] = []
        self._layer = layer
        self._expected = False
        self.within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> None:
        self.within.__enter__()
        self._expected = True

    def __exit__(self, *error: Any) -> None:
        self._expected = False
        self.within.__exit__(*error)

    def arrive(self, grads: list[Tensor | None]) -> None:
        """Take the inputs' gradients."""
        if not self._expected:
            raise RoundPipeError(
                f"a gradient entered layer {self._layer!r} past its outputs: a tensor computed inside was kept by a "
                "hook, a list or an object that the strategy does not see. Return it from the layer."
            )
        self.grads = grads

    def open(self, tensors: list[Tensor], flags: list[bool]) -> list[Tensor]:
        self.grads = [None] * len(tensors)
        if not any(flags):
            return [t.data for t in tensors]
        anchor = torch.empty((), requires_grad=True)
        return list(_InletFunction.apply(anchor, self, tensors, flags))  # type: ignore[no-untyped-call]


class _InletFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, inlet: DetachedInputs, tensors: list[Tensor], flags: list[bool]
    ) -> tuple[Tensor, ...]:
        ctx.inlet = inlet
        ctx.set_materialize_grads(False)
        aliases = tuple(t.data for t in tensors)
        ctx.mark_non_differentiable(*(a for a, flag in zip(aliases, flags, strict=True) if not flag))
        return aliases

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        ctx.inlet.arrive(list(grads))
        return None, None, None, None
