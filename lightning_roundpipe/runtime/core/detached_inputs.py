"""Where a layer's graph begins on its worker, and what its gradients end up in; the other end is `boundary`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.user_code.graph_cuts import ANCHOR


class DetachedInputs:
    """A layer's inputs on the worker, as non-leaf aliases whose gradients end up in ``grads`` (one per tensor).

    A context in which gradients may arrive.

    Attributes:
        within: another one, for all of the layer's backward.
    """

    def __init__(self, layer: str) -> None:
        self.grads: list[Tensor | None] = []
        self._positions: list[int] = []
        self._layer = layer
        self._expected = False
        self.within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> None:
        self.within.__enter__()
        self._expected = True

    def __exit__(self, *error: Any) -> None:
        self._expected = False
        self.within.__exit__(*error)

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the inputs that require them."""
        if not self._expected:
            raise RoundPipeError(
                f"a gradient entered layer {self._layer!r} past its outputs: a tensor computed inside was kept by a "
                "hook, a list or an object that the strategy does not see. Return it from the layer."
            )
        found: list[Tensor | None] = [None] * len(self.grads)
        for i, grad in zip(self._positions, grads, strict=True):
            found[i] = grad
        self.grads = found

    def open(self, tensors: list[Tensor], flags: list[bool]) -> list[Tensor]:
        """Aliases of ``tensors``; those with a flag require grad."""
        self.grads = [None] * len(tensors)
        self._positions = [i for i, flag in enumerate(flags) if flag]
        aliases = [t.data for t in tensors]
        if self._positions:
            flagged = _apply(ANCHOR, self, [aliases[i] for i in self._positions])
            for i, alias in zip(self._positions, flagged, strict=True):
                aliases[i] = alias
        return aliases


class _DetachedInputsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, detached_inputs: DetachedInputs, aliases: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.detached_inputs = detached_inputs
        ctx.set_materialize_grads(False)
        return tuple(aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.detached_inputs.arrive(grads)
        return None, None, None


_apply: Any = super(torch.autograd.Function, _DetachedInputsFunction).apply
"""Without what ``Function.apply`` does for transforms of ``torch.func``, under which no layer is called."""
