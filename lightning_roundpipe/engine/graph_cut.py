"""Where a layer call is cut out of the autograd graph.

    user code's graph ── InputEdge ╎ inlet ── the layer's graph, on a worker ── outputs ╎ Boundary ── user code's graph

User code gets a call's outputs from `Boundary`, a node whose backward only keeps the gradients. The inputs of the call
are remembered as gradient edges. So no graph spans two workers, no backward function waits, and nothing keeps device
memory alive. The engine walks the calls of a microbatch, deepest first: that is a topological order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event

_ANCHOR = torch.empty(0, requires_grad=True)


class Part(NamedTuple):
    """A part of a gradient, the device that it is on, and the point of the device's work behind which it is there."""

    tensor: Tensor
    home: Device | None
    made: Event | None


class Gradients:
    """The gradients of one call's outputs, or of its inputs.

    Args:
        count: number of tensors.
        layer: name of the layer, for errors.
        home: device on which autograd makes these gradients; None for the host.

    Attributes:
        parts: by position, what has come so far.
        closed: whether the call's backward has begun, or nobody will read more.
    """

    __slots__ = ("closed", "home", "layer", "parts")

    def __init__(self, count: int, layer: str, home: Device | None) -> None:
        self.parts: list[list[Part]] = [[] for _ in range(count)]
        self.layer, self.home = layer, home
        self.closed = False

    def __bool__(self) -> bool:
        """Whether any gradient has come."""
        return any(self.parts)

    def add(self, index: int, gradient: Tensor, home: Device | None) -> None:
        """Add a part of one gradient, which is on ``home``.

        Raises:
            RoundPipeError: the backward of the call is over.
        """
        if self.closed:
            raise RoundPipeError(
                f"a gradient entered layer {self.layer!r} past its outputs: a tensor computed inside, or in another "
                "microbatch, was kept by a hook, a list or an object that the strategy does not see. Return it from "
                "the layer, or detach it."
            )
        # Behind this point of the device's work, other microbatches may follow: whoever takes it waits for no more.
        self.parts[index].append(Part(gradient, home, home.compute.record() if home is not None else None))


class Boundary(torch.autograd.Function):
    """The outputs of a call, as user code sees them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: Gradients, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(o.detach() for o in outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[None, None, None]:
        for index, gradient in enumerate(incoming):
            if gradient is not None:
                ctx.gradients.add(index, gradient, ctx.gradients.home)
        return None, None, None


class _Inlet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: Gradients, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    backward = Boundary.backward


_cut: Any = super(torch.autograd.Function, Boundary).apply
_open: Any = super(torch.autograd.Function, _Inlet).apply
"""The C++ ``apply``, without the work of ``Function.apply`` for ``torch.func``."""
_Node: Any = Boundary._backward_cls


def inlet(tensors: Sequence[Tensor], needs: Sequence[bool], layer: str, home: Device) -> tuple[list[Tensor], Gradients]:
    """Return a layer's inputs, and where the gradients of those that ``needs`` marks will be, in order.

    Those are no leaves, so that the layer may write to them. All share memory and version with ``tensors``.
    """
    aliases = [t.detach() for t in tensors]
    chosen = [a for a, n in zip(aliases, needs, strict=True) if n]
    gradients = Gradients(len(chosen), layer, home)
    if not chosen:
        return aliases, gradients
    opened = iter(_open(_ANCHOR, gradients, chosen))
    return [next(opened) if n else a for a, n in zip(aliases, needs, strict=True)], gradients


def cut(outputs: list[Tensor], layer: str, home: Device) -> tuple[tuple[Tensor, ...], Gradients]:
    """Return a layer's outputs as user code sees them, and where their gradients will be."""
    gradients = Gradients(len(outputs), layer, home)
    return _cut(_ANCHOR, gradients, outputs), gradients


def run_backward(roots: Sequence[Any], gradients: Sequence[Tensor], *, retain_graph: bool = False) -> None:
    """Run ``torch.autograd.backward`` without its checks, which take 10 us."""
    _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


class InputEdge:
    """Where the gradient of a call's input goes on."""

    __slots__ = ("_direct", "edge")

    def __init__(self, tensor: Tensor) -> None:
        self.edge: GradientEdge = get_gradient_edge(tensor)
        self._direct = isinstance(self.edge.node, _Node) and not tensor._backward_hooks and not tensor.retains_grad

    def hand_over(self, gradient: Tensor, home: Device) -> bool:
        """Give the gradient to the call whose output the input is. False if user code is in between."""
        if self._direct:
            self.edge.node.gradients.add(self.edge.output_nr, gradient, home)  # type: ignore[attr-defined]
        return self._direct
