"""Estimates the costs of a model from its shapes, on the meta device, and from the rates of a machine.

The model runs forward once. As in the engine, each call is cut out of the graph: the estimate runs its forward and
backward alone, and passes new tensors on. Operations between two calls count for the first of them. After the last call
these are the loss, and its backward counts, too. Calls that cannot differ (same class, shapes of weights, and shapes of
inputs) are estimated once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from lightning_roundpipe.estimates.crossing import Crossed, Crossing
from lightning_roundpipe.estimates.meter import Meter, Work
from lightning_roundpipe.estimates.packing import Packed
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.profile import Hardware

ALIGNMENT = 256
"""Alignment of a weight in a flat buffer, in bytes."""

GRADIENT_BYTES = 4
"""Bytes of a gradient: gradients are summed in fp32."""

_PLAIN = (bool, int, float, str, type(None))


def estimate_costs(
    model: nn.Module, layers: Mapping[str, nn.Module], batch: Mapping[str, Tensor], hardware: Hardware, *,
    packed: Mapping[nn.Parameter, Packed] | None = None, fp8: bool = False,
) -> Costs:  # fmt: skip
    """Return the costs of one microbatch.

    Args:
        model: the model on the meta device, in its compute dtype. It returns an object with ``loss``.
        layers: the layers by name.
        batch: keyword arguments of the model on the meta device, with the shapes of a microbatch.
        hardware: the machine.
        packed: weights in few bits, which travel and lie on a worker packed.
        fp8: whether linear layers multiply in fp8 (``torchao.float8``), except for the output layer.

    Raises:
        ValueError: the model cannot run without data, or calls no layer.
    """
    with _autocast_knows_meta(), Meter(hardware) as meter:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        in_fp8 = [layer for layer in layers.values() if fp8 and layer is not head]
        walk = _Walk(meter, hardware, packed or {}, in_fp8)
        meter.pack(packed or {})
        meter.ignore([*model.parameters(), *model.buffers(), *batch.values()])
        try:
            for name, layer in layers.items():
                walk.intercept(name, layer)
            with meter.scope(walk.user_code):
                loss = model(**batch, use_cache=False).loss
            after = walk.calls[-1].after if walk.calls else Work()
            if isinstance(loss, Tensor) and loss.requires_grad:
                forward_s = after.seconds
                with meter.scope(after):
                    loss.backward()  # type: ignore[no-untyped-call]
                walk.loss_backward_s = after.seconds - forward_s
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            # What a model does with values (.item(), branches on them) fails on the meta device in any of these ways.
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{type(model).__name__} cannot be estimated, as it does not run without data: {line} Measure it "
                "instead: a few steps of training leave costs.json, which planning.Costs.from_dict reads."
            ) from error
        finally:
            walk.restore()
    return walk.costs()


def layer_bytes(layer: nn.Module, packed: Mapping[nn.Parameter, Packed] | None = None) -> tuple[int, int]:
    """Return the bytes of a layer's weights and of its gradients on a worker.

    The weights have the dtype in which they travel, or are in ``packed``.
    """
    held = packed or {}
    sizes = ((p.nbytes,) if p not in held else held[p].parts for p in layer.parameters())
    weights = sum(_aligned(nbytes) for parts in sizes for nbytes in parts)
    return weights, sum(_aligned(p.numel() * GRADIENT_BYTES) for p in layer.parameters() if p.requires_grad)


@contextmanager
def _autocast_knows_meta() -> Iterator[None]:
    """Let ``torch.autocast`` take the meta device, which PEFT names when it disables autocast around experts."""
    original = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else original(device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]


class _Measured(NamedTuple):
    """A call without its weights and without what crosses, and its peak in a recomputation.

    That is the peak of a forward beside the gradients that wait for its backward. The last call is not recomputed.
    """

    cost: CallCost
    recomputing: int


@dataclass
class _Called:
    name: str
    layer: nn.Module
    measured: _Measured
    boundary: int
    handed: int
    """Bytes of gradients that go on through user code in front of it."""
    crossed: Crossed
    after: Work = field(default_factory=Work)


class _Walk:
    """The calls of a forward. Linear layers of the layers ``in_fp8`` multiply in fp8."""

    def __init__(
        self, meter: Meter, hardware: Hardware, packed: Mapping[nn.Parameter, Packed], in_fp8: Sequence[nn.Module],
    ) -> None:  # fmt: skip
        self.meter, self.packed, self.in_fp8 = meter, packed, in_fp8
        self.emulated, self.issue_s = hardware.emulated, hardware.issue_s
        self.calls, self.user_code, self.loss_backward_s = list[_Called](), Work(), 0.0
        self._known: dict[Any, tuple[_Measured, Any]] = {}
        self._saved: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages saved on the host, by weak references: the worker holds them no longer than user code does."""
        self._intercepted: list[nn.Module] = []
        self._crossing = Crossing()
        self._outputs: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """Differentiable outputs of calls, by their ids."""

    def intercept(self, name: str, layer: nn.Module) -> None:
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, layer, original, args, kwargs)

        layer.forward = forward
        self._intercepted.append(layer)

    def restore(self) -> None:
        for layer in self._intercepted:
            del layer.forward

    def costs(self) -> Costs:
        return Costs(tuple(self._cost(number, call) for number, call in enumerate(self.calls)))

    def _cost(self, number: int, call: _Called) -> CallCost:
        (cost, again), after, is_last = call.measured, call.after, call is self.calls[-1]
        again, loss_backward_s = (0, self.loss_backward_s) if is_last else (again, 0.0)
        weights, gradients = layer_bytes(call.layer, self.packed)
        copied = (p.nbytes for p in call.layer.parameters() if p in self.packed and self.packed[p].kept)
        # The loss begins when the head's forward has ended, and ends before the head's backward begins.
        with_loss = (cost.kept_bytes or 0) + after.memory.peak
        return replace(
            cost, layer=call.name, forward_s=cost.forward_s + after.seconds - loss_backward_s,
            backward_s=cost.backward_s + loss_backward_s, weight_bytes=weights, gradient_bytes=gradients,
            boundary_bytes=call.boundary, activation_bytes=max(cost.activation_bytes, with_loss, again),
            unpacked_bytes=sum(map(_aligned, copied)), recomputable=self._crossing.recomputable(number),
            handing_bytes=call.handed, **asdict(call.crossed),
        )  # fmt: skip

    def _call(self, name: str, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        fp8 = layer in self.in_fp8
        key = (fp8, _likeness(layer, self.packed), str(form), *(_shape(leaf) for leaf in leaves))
        if key not in self._known:
            self.meter.fp8 = fp8
            self._known[key] = self._measure(layer, run, args, kwargs)
            self.meter.fp8 = False
        found, outputs = self._known[key]
        with self.meter.scope():  # outputs, which the call has counted already
            given = tree_map(_fresh, outputs)
        taken, returned = _tensors(leaves), _tensors(tree_flatten(given)[0])
        unchanged = [t for t in taken if id(t) in self._outputs]
        crossed = self._crossing.see(taken, returned, unchanged=unchanged)
        handed = sum(t.nbytes for t in taken if t.requires_grad and id(t) not in self._outputs)
        self._outputs.update((id(t), t) for t in returned if t.requires_grad)
        boundary = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._saved:
                self._saved.add(storage)
                boundary += leaf.numel() * leaf.element_size()
        self.calls.append(_Called(name, layer, found, boundary, handed, crossed))
        self.meter.go_on_with(self.calls[-1].after)
        return given

    def _measure(self, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[_Measured, Any]:
        inputs: dict[int, int] = {}
        """Bytes of each storage."""

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            inputs[leaf.untyped_storage()._cdata] = leaf.numel() * leaf.element_size()
            return leaf.detach().requires_grad_(leaf.requires_grad)

        hooks = [  # as the engine does, which moves each gradient into its arena
            p.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
            for p in layer.parameters()
            if p.requires_grad
        ]
        work = Work()
        backward = Work(memory=work.memory)  # which frees what the forward has kept
        with self.meter.scope(work):
            args, kwargs = tree_map(cut, (args, kwargs))
            out = run(*args, **kwargs)
        issued = work.operations + work.unpackings
        leaves = _tensors(tree_flatten(out)[0])
        roots = [leaf for leaf in leaves if leaf.requires_grad]
        kept, outputs = work.memory.live, tree_map(_described, out)
        needs_backward, returning = bool(roots), sum(root.nbytes for root in roots)
        taken = sum(inputs.values())
        recomputing = 0 if self.emulated else taken + work.memory.peak + returning
        if roots:
            with self.meter.scope(backward):
                gradients = [torch.empty_like(root) for root in roots]
                edges = [get_gradient_edge(root) for root in roots]
                del out, leaves, roots  # as the engine does, when the gradients are there
                torch.autograd.backward(edges, gradients)
                del gradients, edges
        for hook in hooks:
            hook.remove()
        cost = CallCost(
            "", work.seconds, backward.seconds, 0, 0, 0, needs_backward=needs_backward, kept_bytes=taken + kept,
            activation_bytes=taken + (kept + returning if self.emulated else work.memory.peak),
            forward_bytes=taken + kept if self.emulated else None, returning_bytes=returning,
            issue_s=issued * self.issue_s, backward_issue_s=backward.unpackings * self.issue_s,
            unpack_s=work.unpack_s, backward_unpack_s=backward.unpack_s,
            products=tuple((flops, *made) for flops, made in sorted(work.products.items()) if needs_backward),
        )  # fmt: skip
        return _Measured(cost, recomputing), outputs


@dataclass(frozen=True)
class _Described:
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


def _described(leaf: Any) -> Any:
    return _Described(leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, _Described):
        return leaf
    made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
    return made.view_as(made) if leaf.requires_grad else made  # user code may write to it, as it may not to a leaf


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _likeness(layer: nn.Module, packed: Mapping[nn.Parameter, Packed]) -> Any:
    """Return a key that is equal for layers that differ in weights and ``layer_idx`` only."""
    weights = tuple((name, p.shape, p.dtype, p.requires_grad, packed.get(p)) for name, p in layer.named_parameters())
    settings = tuple(
        (type(module), *((k, v) for k, v in vars(module).items() if isinstance(v, _PLAIN) and k != "layer_idx"))
        for module in layer.modules()
    )
    return weights, settings
