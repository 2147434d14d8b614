"""Cuts in the autograd graph: how a layer call is cut out of the user code's graph and connected to it again.

One autograd graph must never span two workers: a backward function that waits would block its device's only autograd
thread, and with it the step. So each call is an autograd node of its own between two sections of user code:

    user code ─► InputGradSink ┆ saved inputs ─► layer (later, on any worker) ─► gradients ┆ boundary ─► user code
              ▲                ┆                                                           ┆    │
              └────────────────┼── input gradients ◄── recompute, backward ◄── graph cut ◄─┼────┘

* `boundary` makes the call's outputs. Their node hangs on a dummy leaf, so that autograd walks from the loss to it and
  no further. Its backward never waits; it only adds what arrives to the graph cut. The outputs are fresh aliases
  without view history: as plain detached leaves, ``h += layer(h)`` would silently give wrong gradients.
* `InputGradSink` remembers where the inputs came from without keeping them. Calling backward on it pushes the input
  gradients into the user code in front. If an input is directly another call's output, its gradient goes to that graph
  cut instead, and no graph is walked.
* `detached_inputs.DetachedInputs` is the counterpart of `boundary` on the worker: the layer's inputs are non-leaf
  aliases, so a layer may write to its input as in plain training.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.graph_nodes import nodes_of
from lightning_roundpipe.runtime.memory.peak_memory import GRADIENTS


class _Driven:
    """Counts the backward passes that the engine runs now. While there are none, only user code can reach a boundary.

    They run on the calling thread alone, without autograd's threads: user code in them may call layers, and waits for a
    worker then. User code and these backward passes both run under the user-code lock, so they never overlap.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.root: Any = None
        """Root node of the last backward that began."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, root: Tensor) -> Iterator[None]:
        """Let gradients reach the tape from ``root`` within this context."""
        with self._lock:
            self.depth += 1
            self.root = root.grad_fn
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            with self._lock:
                self.depth -= 1
                self.root = None


ANCHOR = torch.empty((), requires_grad=True)
"""Leaf that makes aliases require grad. It never gets a gradient."""

driven_backward = _Driven()
"""Tells when gradients may reach the tape. Enter it while holding the user-code lock."""


@dataclass(eq=False, kw_only=True)
class GraphCut:
    """A gap between two graphs that no autograd node connects: gradients are collected here and passed on.

    Attributes:
        targets: per input tensor, the cut and index of the output that it is; gradients of the others go to ``sink``.
        tensor_flags: per input tensor, whether it requires grad.
        grads: per output tensor, the gradient so far, as parts on different devices.
        home: device of the outputs and their gradients.
        input_home: device of the inputs.
        hooks: the user's gradient hooks, by output.
        grad_arrivals: how often a backward through user code has delivered gradients.
        done: whether the gradients have been passed on.
    """

    home: Device | None = None
    input_home: Device | None = None
    grads: list[list[tuple[Tensor, Device | None]]] = field(default_factory=list)
    tensor_flags: list[bool] = field(default_factory=list)
    targets: list[tuple[GraphCut, int] | None] = field(default_factory=list)
    sink: InputGradSink | None = None
    hooks: dict[int, dict[int, Callable[[Tensor], Tensor | None]]] = field(default_factory=dict)
    grad_arrivals: int = 0
    done: bool = False

    @property
    def what(self) -> str:
        """Description for error messages."""
        raise NotImplementedError  # each kind of cut has a name of its own

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that the outputs may be computed with."""
        return ()

    def connect(self, tensors: list[Tensor]) -> None:
        """Remember where the gradients of the inputs ``tensors`` go."""
        self.tensor_flags = [t.requires_grad for t in tensors]
        self.targets = [source_of(t) if t.requires_grad else None for t in tensors]
        pushed = [t for t, target in zip(tensors, self.targets, strict=True) if t.requires_grad and target is None]
        self.sink = InputGradSink(pushed) if pushed else None

    def add_grad(self, index: int, grad: Tensor | None, device: Device | None) -> None:
        """Add to the gradient of output ``index``, never in place: autograd may share ``grad`` with other nodes.

        Parts are summed from first to last, on whatever device they are, so the plan does not affect the bits.
        """
        if grad is None:
            return
        if self.done:
            raise RoundPipeError(
                f"a gradient reached {self.what} after its backward: a tensor of an earlier batch, or of another "
                "microbatch, was used again. Detach what is kept from one training_step to the next. (Under "
                "manual optimization a first backward of several through the same calls needs retain_graph=True.)"
            )
        parts = self.grads[index]
        if len(parts) == 1 and parts[0][1] is device:
            parts[0] = (parts[0][0] + grad, device)
        else:
            parts.append((grad, device))
        if device is not None:
            device.track_until_freed([parts[-1][0]], GRADIENTS)

    def run_hooks(
        self,
        transfer: Callable[[Tensor, Device | None, Device | None], Tensor],
        mode: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Call the user's hooks with the complete gradients.

        Args:
            transfer: the ``transfer`` of the microbatch's `ActivationStore`.
            mode: the context that user code runs in.
        """
        for index, hooks in self.hooks.items():
            parts = [transfer(grad, device, self.home) for grad, device in self.grads[index]]
            if not parts:
                continue
            total = functools.reduce(torch.add, parts)
            for hook in list(hooks.values()):
                with mode:
                    changed = hook(total)
                total = total if changed is None else changed
            self.grads[index] = [(total, self.home)]

    def wants_backward(self) -> bool:
        return any(self.grads)


class _BoundaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, graph_cut: GraphCut, outputs: list[Tensor], flags: list[bool]
    ) -> tuple[Tensor, ...]:
        ctx.graph_cut = graph_cut
        ctx.set_materialize_grads(False)
        aliases = tuple(t.data for t in outputs)
        if not all(flags):
            ctx.mark_non_differentiable(*(a for a, flag in zip(aliases, flags, strict=True) if not flag))
        return aliases

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        graph_cut: GraphCut = ctx.graph_cut
        if not driven_backward.depth:
            _refuse(graph_cut)
        graph_cut.grad_arrivals += 1
        with torch._C.DisableTorchFunction():
            for index, grad in enumerate(grads):
                graph_cut.add_grad(index, grad, graph_cut.home)
        return None, None, None, None


_apply_boundary: Any = super(torch.autograd.Function, _BoundaryFunction).apply
"""Skips what ``Function.apply`` does for transforms of ``torch.func``, under which no layer is called."""


def _refuse(graph_cut: GraphCut) -> NoReturn:
    raise RoundPipeError(
        f"a backward pass inside training_step reached {graph_cut.what}: gradients across layers (torch.autograd.grad, "
        "loss.backward(), create_graph) are not supported. For a loss in chunks, pass the weight of the last layer, "
        "such as lm_head.weight, into the code that computes a chunk. Under manual optimization "
        "self.manual_backward(loss) and loss.backward() are supported."
    )


def refuse_layers_between(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], parameters: Iterable[nn.Parameter] = ()
) -> None:
    """Refuse user code that differentiates ``outputs`` by ``inputs`` across a layer: gradients would stop there.

    An input may be reached without a layer, too, as what a head and a second term of the loss are computed from. What
    comes through the layer would be missing in its gradient.

    Args:
        outputs, inputs: the arguments of `torch.autograd.grad`.
        parameters: those that inputs stand for.
    """
    wanted = {t.grad_fn or t for t in ([inputs] if isinstance(inputs, Tensor) else inputs)}
    nodes = nodes_of(t.grad_fn for t in ([outputs] if isinstance(outputs, Tensor) else outputs))
    cuts = [node.graph_cut for node in nodes if getattr(node, "graph_cut", None) is not None]
    if not cuts:
        return
    if wanted.difference(nodes, (getattr(node, "variable", node) for node in nodes)):
        _refuse(cuts[0])
    ids = {id(parameter) for parameter in parameters}
    seen, waiting = set(cuts), list(cuts)
    while waiting:
        cut = waiting.pop()
        behind = nodes_of([cut.sink.root.grad_fn]) if cut.sink is not None else []
        sources = [target[0] for target in cut.targets if target is not None]
        sources += [node.graph_cut for node in behind if getattr(node, "graph_cut", None) is not None]
        if (
            not wanted.isdisjoint(behind)
            or not wanted.isdisjoint(getattr(node, "variable", node) for node in behind)
            or any(getattr(node, "graph_cut", None) in sources for node in wanted if not isinstance(node, Tensor))
            or any(id(parameter) in ids for parameter in cut.parameters)
        ):
            _refuse(cut)
        waiting += [source for source in dict.fromkeys(sources) if source not in seen]
        seen.update(sources)


def witness(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of ``tensor`` but not its memory."""
    same = tensor.detach()
    same.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return same


def boundary(graph_cut: GraphCut, outputs: list[Tensor], flags: list[bool]) -> list[Tensor]:
    """Return the call's outputs for user code.

    Args:
        graph_cut: receives the gradients.
        outputs: what the layer returned, detached or not; not copied.
        flags: which of them require grad in the layer's graph.
    """
    graph_cut.grads = [[] for _ in outputs]
    if not any(flags):
        return [t.data for t in outputs]
    if torch.is_grad_enabled():  # nearly always; the context takes as long as the rest
        return list(_apply_boundary(ANCHOR, graph_cut, outputs, flags))
    with torch.enable_grad():
        return list(_apply_boundary(ANCHOR, graph_cut, outputs, flags))


def source_of(tensor: Tensor) -> tuple[GraphCut, int] | None:
    """Return the graph cut and index of the output that ``tensor`` is; None after user code, or with a hook on it."""
    node = tensor.grad_fn
    graph_cut = getattr(node, "graph_cut", None)
    if graph_cut is None or tensor._backward_hooks or tensor.retains_grad:
        return None
    return graph_cut, tensor.output_nr


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register ``hook`` as ``tensor.register_hook(hook)`` does, for user code.

    A gradient may arrive in parts, one for each layer that takes ``tensor``, and a hook must see their sum. On a
    layer's output it therefore runs when the call's backward is due. On any other tensor a second part is refused.
    """
    graph_cut, index = getattr(tensor.grad_fn, "graph_cut", None), tensor.output_nr
    if graph_cut is not None:
        hooks = graph_cut.hooks.setdefault(index, OrderedDict())
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


def keep_gradient(tensor: Tensor) -> None:
    """Do what ``tensor.retain_grad()`` does, for user code."""
    alive = weakref.ref(tensor)

    def keep(grad: Tensor) -> None:
        if (kept := alive()) is not None:
            kept.grad = grad.detach().clone()

    if getattr(tensor.grad_fn, "graph_cut", None) is not None:
        hook_gradient(tensor, keep)
    else:
        tensor.retain_grad()


class _SinkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sink: InputGradSink, *inputs: Tensor) -> Tensor:
        ctx.sink = weakref.ref(sink)  # the sink holds this node; a cycle would keep the graph in front until a gc run
        # On the inputs' device, so that on a GPU autograd runs this node on the stream that the user code ran on.
        return inputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.sink().grads


class InputGradSink:
    """The point where input gradients enter the user code in front of a call. Keeps no input alive.

    Args:
        inputs: tensors that require grad; their graphs are those in front.

    Attributes:
        root: a tensor whose graph they are.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.grads: Sequence[Tensor | None] = ()
        self._homes = [t.device for t in inputs]
        with torch.enable_grad():
            self.root: Tensor = _SinkFunction.apply(self, *inputs)  # type: ignore[no-untyped-call]

    def push(self, grads: Sequence[Tensor | None], mode: contextlib.AbstractContextManager[Any]) -> None:
        """Run a backward through the user code with ``grads``, one per input. The graph is retained for other calls.

        Args:
            grads: gradients, moved to the device of their input: a layer also takes inputs from the host and other
                devices.
            mode: the context that user code runs in; checkpoints, autograd functions and hooks run in backward.
        """
        self.grads = [g if g is None else g.to(home) for g, home in zip(grads, self._homes, strict=True)]
        try:
            with driven_backward.of(self.root), torch._C._EnableTorchFunction(), mode:
                torch.autograd.backward(self.root, retain_graph=True)
        finally:
            self.grads = ()
