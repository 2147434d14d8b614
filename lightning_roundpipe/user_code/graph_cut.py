"""Where a layer call is cut out of the autograd graph.

    user code's graph ── InputEdge ╎ inlet ── the layer's graph, on a worker ── outputs ╎ Boundary ── user code's graph

User code gets a call's outputs from `Boundary`, a node whose backward only keeps the gradients. The inputs of the call
are remembered as gradient edges. So no graph spans two workers, no backward function waits, and nothing keeps device
memory alive. The engine walks the calls of a microbatch, deepest first: that is a topological order.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.memory.peak_memory import GRADIENTS
from lightning_roundpipe.model.graph_nodes import nodes_of
from lightning_roundpipe.user_code.stand_ins import is_stand_in

_ANCHOR = torch.empty(0, requires_grad=True)


class Part(NamedTuple):
    """A part of a gradient, the device that it is on, and the point of the device's work behind which it is there."""

    tensor: Tensor
    home: Device | None
    ready: Event | None


class Gradients:
    """The gradients of one call's outputs, or of its inputs.

    Args:
        layer: name of the layer, for errors.
        home: device on which autograd makes these gradients; None for the host.

    Attributes:
        parts: by position, what has come so far.
        arrivals: how often a backward through user code has brought gradients.
        expected: whether the engine runs the microbatch's backward; before that only user code can.
        closed: whether the call's backward has begun, or nobody will read more.
        hooks: the user's gradient hooks, by position.
        edges: where the gradients of the call's inputs go.
        masters: the parameters that the outputs may be computed with.
        versions: of the outputs as user code got them; -1 if that is a copy, or user code has read its ``.data``,
            through which it may write without a new version.
    """

    __slots__ = ("arrivals", "closed", "edges", "expected", "home", "hooks", "layer", "masters", "parts", "versions")

    def __init__(self, count: int, layer: str, home: Device | None) -> None:
        self.parts: list[tuple[Part, ...]] = [()] * count
        self.layer, self.home = layer, home
        self.arrivals = 0
        self.expected = self.closed = False
        self.hooks: dict[int, dict[int, Callable[[Tensor], Tensor | None]]] = {}
        self.edges: Sequence[InputEdge] = ()
        self.masters: Sequence[nn.Parameter] = ()
        self.versions = [-1] * count

    def __bool__(self) -> bool:
        """Whether any gradient has come."""
        return any(self.parts)

    def reopen(self, count: int) -> None:
        """Collect the gradients of ``count`` tensors, for another backward of the same call."""
        self.parts, self.arrivals, self.expected, self.closed = [()] * count, 0, False, False

    def add(self, index: int, gradient: Tensor, home: Device | None) -> None:
        """Add a part of one gradient, which counts on ``home``. Parts are summed in order: no plan changes a bit.

        Raises:
            RoundPipeError: the backward of the call is over, or has not begun.
        """
        if not self.expected:
            _refuse_across(self.layer)
        if self.closed:
            raise RoundPipeError(
                f"a gradient entered layer {self.layer!r} past its outputs: a tensor computed inside, or in another "
                "microbatch, was kept by a hook, a list or an object that the strategy does not see. Return it from "
                "the layer, or set overlap=False, and detach what is kept for a later batch. (Of several backwards "
                "under manual optimization, all but the last need retain_graph=True.)"
            )
        mine = self.parts[index]
        if home is not None and len(mine) == 1 and mine[0].home is home:
            with home.compute.running(), torch.no_grad():
                gradient = mine[0].tensor + gradient  # not in place: autograd may share either
            self.parts[index] = mine = ()
            home.track_until_freed([gradient], GRADIENTS)
        # Behind this point of the device's work, other microbatches may follow: whoever takes it waits for no more.
        self.parts[index] = (*mine, Part(gradient, home, home.compute.record() if home is not None else None))

    def arrive(self, index: int, gradient: Tensor) -> None:
        """Add a part that autograd has made."""
        if self.home is not None:
            self.home.track_until_freed([gradient], GRADIENTS)
        self.add(index, gradient, self.home)

    def close(self) -> None:
        """Take no more, and keep nothing alive."""
        self.closed = True
        self.parts, self.edges, self.hooks = [], (), {}


class Boundary(torch.autograd.Function):
    """The outputs of a call, as user code sees them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: Gradients, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple([o.detach() for o in outputs])

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[None, None, None]:
        ctx.gradients.arrivals += 1
        for index, gradient in enumerate(incoming):
            if gradient is not None:
                ctx.gradients.arrive(index, gradient)
        return None, None, None


class _Inlet(Boundary):
    """The inputs of a call, as the layer sees them. Its nodes are of another class than those of `Boundary`."""


_cut: Any = super(torch.autograd.Function, Boundary).apply
_open: Any = super(torch.autograd.Function, _Inlet).apply
"""The C++ ``apply``, without the work of ``Function.apply`` for ``torch.func``."""
_Node: Any = Boundary._backward_cls


def inlet(tensors: Sequence[Tensor], needs: Sequence[bool], layer: str, home: Device) -> tuple[list[Tensor], Gradients]:
    """Return a layer's inputs, and where the gradients of those that ``needs`` marks will be, in order.

    Those are no leaves, so that the layer may write to them. All share memory and version with ``tensors``.
    """
    chosen = [t for t, n in zip(tensors, needs, strict=True) if n]
    gradients = Gradients(len(chosen), layer, home)
    gradients.expected = gradients.closed = True  # until the layer's backward runs
    opened = iter(_open(_ANCHOR, gradients, chosen) if chosen else ())
    return [next(opened) if n else t.detach() for t, n in zip(tensors, needs, strict=True)], gradients


def cut(outputs: list[Tensor], layer: str, home: Device) -> tuple[tuple[Tensor, ...], Gradients]:
    """Return a layer's outputs as user code sees them, and where their gradients will be."""
    gradients = Gradients(len(outputs), layer, home)
    return _cut(_ANCHOR, gradients, outputs), gradients


def run_backward(roots: Sequence[Any], gradients: Sequence[Tensor], *, retain_graph: bool = False) -> None:
    """Run ``torch.autograd.backward`` without its checks, which take 10 us."""
    _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def seed_of(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seed of a loss's backward, and the factor by which its gradients are multiplied when summed.

    Their product is ``scale``. In half precision, of the loss or of the gradients behind it, a seed such as 1/3 would
    be rounded, so the seed is a power of two.
    """
    if not scale or dtype not in (torch.bfloat16, torch.float16):
        return scale, 1.0
    rest, exponent = math.frexp(scale)
    return (math.ldexp(1.0, exponent - 1), 1.0) if rest == 0.5 else (math.ldexp(1.0, exponent), rest)


def filled_like(loss: Tensor, seed: float) -> Tensor:
    """Return a tensor of ``seed`` for the backward of ``loss``; infinity where the format does not reach so far."""
    return torch.full_like(loss, seed, dtype=torch.float64).to(loss.dtype)  # in fp16, CUDA refuses to fill with 2**17


class InputEdge:
    """Where the gradient of a call's input goes on.

    Attributes:
        home: the device that the input is on; None for the host.
        node, output: the node that has made the input, and which of its outputs it is.
        edge: where backward goes on in user code; None if the input is the output of a call as it is.
    """

    __slots__ = ("edge", "home", "node", "output")

    def __init__(self, tensor: Tensor, home: Device | None) -> None:
        self.home, self.output = home, tensor.output_nr
        self.node: Any = tensor.grad_fn
        self.edge: GradientEdge | None = None
        if not isinstance(self.node, _Node) or tensor._backward_hooks or tensor.retains_grad:
            self.edge = get_gradient_edge(tensor)  # which keeps the graph of user code alive
            self.node = self.edge.node

    def hand_over(self, gradient: Tensor, home: Device) -> bool:
        """Give the gradient to the call whose output the input is. False if user code is in between."""
        if self.edge is not None:
            return False
        self.node.gradients.add(self.output, gradient, home)
        return True


def refuse_across(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], masters: Iterable[nn.Parameter] = ()
) -> None:
    """Raise if user code differentiates ``outputs`` by ``inputs``, or the ``masters`` behind these, across a layer."""
    wanted = {t.grad_fn or t for t in ([inputs] if isinstance(inputs, Tensor) else inputs)}
    near = nodes_of(t.grad_fn for t in ([outputs] if isinstance(outputs, Tensor) else outputs))
    waiting = [node.gradients for node in near if isinstance(node, _Node)]
    if waiting and wanted.difference(near, (getattr(node, "variable", node) for node in near)):
        _refuse_across(waiting[0].layer)
    seen = set(map(id, waiting))
    while waiting:
        cut = waiting.pop()
        far = nodes_of((edge.node for edge in cut.edges), lambda node: isinstance(node, _Node))
        if not wanted.isdisjoint(far) or not wanted.isdisjoint(getattr(node, "variable", node) for node in far):
            _refuse_across(cut.layer)
        if any(mine is master for mine in cut.masters for master in masters):
            _refuse_across(cut.layer)
        for node in far:
            if isinstance(node, _Node) and id(node.gradients) not in seen:
                seen.add(id(node.gradients))
                waiting.append(node.gradients)


def reaches_out(outputs: Sequence[Tensor], layer: str) -> bool:
    """Return whether the graph of a layer's outputs ends in a stand-in for a parameter of another module.

    Raises:
        RoundPipeError: it leads into the graph of user code, on another device.
    """
    found = nodes_of(t.grad_fn for t in outputs)
    if any(isinstance(node, _Node) for node in found):
        raise RoundPipeError(
            f"layer {layer!r} uses a tensor that it was not given as an argument (through a closure, a global or an "
            "object), and gradients cannot flow there. Pass it to the layer."
        )
    return any(is_stand_in(getattr(node, "variable", None)) for node in found)


def _refuse_across(layer: str) -> NoReturn:
    raise RoundPipeError(
        f"a backward pass inside training_step reached layer {layer!r}: gradients across layers (torch.autograd.grad, "
        "loss.backward(), create_graph) are not supported. For a loss in chunks, pass the weight of the last layer, "
        "such as lm_head.weight, into the code that computes a chunk. Under manual optimization "
        "self.manual_backward(loss) and loss.backward() are supported. If training_step runs no backward, its loss "
        "depends on a tensor of another microbatch, which a container or an object keeps: set overlap=False."
    )


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Do what ``tensor.register_hook(hook)`` does, for user code.

    A gradient may come in parts, one for each layer that takes ``tensor``, and a hook must see their sum. So on a
    layer's output it runs when the call's backward is due, and on any other tensor a second part is refused.
    """
    if isinstance(tensor.grad_fn, _Node):
        hooks = tensor.grad_fn.gradients.hooks.setdefault(tensor.output_nr, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle
    calls = 0

    def once(grad: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RoundPipeError(
                "a hook on a tensor between layers would be called with parts of its gradient, because the tensor "
                "goes to several layers. Put the hook on what a layer returns, or inside a layer."
            )
        return hook(grad)

    return tensor.register_hook(once)  # type: ignore[no-untyped-call]


def forget_version(tensor: Tensor) -> None:
    """Note that user code may write to ``tensor``, or to what it is a view of, without a new version."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base.grad_fn, _Node):
        base.grad_fn.gradients.versions[base.output_nr] = -1


def keep_gradient(tensor: Tensor) -> None:
    """Do what ``tensor.retain_grad()`` does, for user code."""
    alive = weakref.ref(tensor)

    def keep(grad: Tensor) -> None:
        if (kept := alive()) is not None:
            kept.grad = grad.detach().clone()

    if isinstance(tensor.grad_fn, _Node):
        hook_gradient(tensor, keep)
    else:
        tensor.retain_grad()
