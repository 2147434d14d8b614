"""`DetachedInputs`: the start of a layer's graph on a worker. User code sees the other side, `graph_cuts.boundary`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.user_code.graph_cuts import ANCHOR


class DetachedInputs:
    """A layer's inputs on the worker, as non-leaf aliases that are cut off from user code's graph.

    The layer's backward runs with this object entered as a context manager; a gradient that arrives at any other time
    is an error.

    Args:
        layer: name of the layer, for errors.

    Attributes:
        grads: gradient of each input tensor; None where there is none.
        saved: counts what the graph has saved, if the device does not; released when the backward has run.
        within: context manager that is entered around the layer's backward too; None for none.
    """

    def __init__(self, layer: str) -> None:
        self.grads: list[Tensor | None] = []
        self._positions: list[int] = []
        self._layer = layer
        self._expected = False
        self.saved: object = None
        self.within: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.within is not None:
            self.within.__enter__()
        self._expected = True

    def __exit__(self, *error: Any) -> None:
        self._expected = False
        if self.within is not None:
            self.within.__exit__(*error)

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients of those inputs that require grad."""
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
        """Return aliases of ``tensors`` for the layer; those whose flag is set require grad."""
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
"""The C++ ``apply``, without the work of ``Function.apply`` for ``torch.func``: layers are not called under it."""
