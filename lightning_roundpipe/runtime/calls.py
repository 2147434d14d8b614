"""One call of one layer on a worker: forward, or recomputation and backward. Runs on the worker's thread."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.replica import StateDiff
from lightning_roundpipe.runtime.arguments import flatten, refuse_changed, unflatten
from lightning_roundpipe.runtime.boundary import Boundaries, HostCopy
from lightning_roundpipe.runtime.collector import collecting
from lightning_roundpipe.runtime.context import Ambient
from lightning_roundpipe.runtime.events import Where
from lightning_roundpipe.runtime.notes import noted
from lightning_roundpipe.runtime.rng import Randomness
from lightning_roundpipe.runtime.slots import Slot
from lightning_roundpipe.runtime.tape import Entry, Inlet
from lightning_roundpipe.runtime.weights import HostLayer
from lightning_roundpipe.runtime.worker import Worker


@dataclass
class Call:
    """A layer call as the glue made it.

    Attributes:
        seed: of its random numbers; None draws from the caller's state.
        leaves: flattened arguments; a tensor stands as itself if it is on the worker already, else as its `HostCopy`.
        requires_grad: per leaf.
        graph: whether to run with grad: to keep the graph (fused), to learn what requires grad (first batch), or
            because the layer computes other bits without.
        probe: whether to find out if it does.
        kept: whether the graph is kept for the backward.
        recomputed: whether the layer may be run again for its backward, so that its inputs have to be saved.
        learning: whether this is the first batch.
        may_mutate: positions of inputs that the layer is known to write to; None while learning.
    """

    index: int
    layer: HostLayer
    microbatch: int
    spec: TreeSpec
    leaves: list[Any]
    requires_grad: list[bool]
    ambient: Ambient
    state: StateDiff | None
    seed: int | None
    context: contextvars.Context
    graph: bool = False
    probe: bool = False
    kept: bool = False
    recomputed: bool = False
    learning: bool = False
    may_mutate: frozenset[int] | None = None


@dataclass
class Forward:
    """What a forward gave: the layer's output and what it collected, flattened (with its graph if there is one)."""

    leaves: list[Any]
    spec: TreeSpec
    inlet: Inlet | None
    mutated: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    activation_bytes: int = 0
    differs_without_grad: bool = False

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """The output with other tensors in place of its own."""
        others = iter(tensors)
        return unflatten([next(others) if isinstance(x, Tensor) else x for x in self.leaves], self.spec)


class Runner:
    """Runs calls on one worker.

    Args:
        worker: whose thread this runs on.
        randomness: seeds calls that draw, in training; evaluation draws from the caller's generator.
    """

    def __init__(self, worker: Worker, randomness: Callable[[], Randomness]) -> None:
        self._worker = worker
        self._device = worker.device
        self._randomness = randomness

    def forward(self, slot: Slot, call: Call, boundaries: Boundaries) -> Forward:
        """Run the layer once; see `Call` for how."""
        worker, device = self._worker, self._device
        replica = worker.replica(call.layer)
        buffers = worker.buffers(call.layer)
        worker.ready(slot, call.layer)
        leaves = [boundaries.on(device, leaf) if isinstance(leaf, HostCopy) else leaf for leaf in call.leaves]
        thorough = bool(buffers.places) and (call.learning or call.layer.is_new_state(call.state))
        snapshot = buffers.snapshot(thorough) if call.recomputed else None
        buffers.load()
        replica.apply(call.state)
        before = device.resident_bytes() if call.learning else 0
        if call.learning:
            device.reset_peak()
        attributes = replica.attributes()
        with device.hold([t for t in leaves if isinstance(t, Tensor)], "inputs of the running call"):
            inlet, output, given = self._run(slot, call, leaves, "forward")
            out_leaves, spec = flatten(output)
            _refuse_hidden_tensors(out_leaves, call.layer.name)
            with device.hold([t for t in out_leaves if isinstance(t, Tensor)], "outputs of the running call"):
                activation = device.peak_bytes() - before if call.learning else 0
        differs = call.probe and self._differs_without_grad(slot, call, leaves, out_leaves, given)
        self._write_back_attributes(call, attributes)
        buffers.write_back(snapshot, thorough)
        result = Forward(self._safe(out_leaves), spec, inlet, buffers=snapshot or {}, activation_bytes=activation)
        result.differs_without_grad = differs
        result.mutated = self._mutated(call, given)
        worker.retire(leaves, out_leaves)
        return result

    def _run(self, slot: Slot, call: Call, leaves: list[Any], kind: str) -> tuple[Inlet | None, Any, dict[int, Tensor]]:
        """The layer's own code, in everything that was around it when glue called it."""
        replica = self._worker.replica(call.layer)
        where = Where(slot.index, slot.phase, call.index, call.layer.name)
        grad = call.ambient.grad and call.graph
        inlet = None
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        with call.ambient.entered(grad=grad), self._seeded(call):
            tensors = [leaves[i] for i in positions]
            if grad:
                inlet = Inlet()
                tensors = inlet.open(tensors, [call.requires_grad[i] for i in positions])
            elif not call.ambient.inference:
                tensors = [t.data for t in tensors]
            given = dict(zip(positions, tensors, strict=True))
            all_given = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = unflatten(all_given, call.spec)
            saved = self._device.saved_for_backward() if grad else contextlib.nullcontext()
            with self._computing(kind, where, call.microbatch), saved:
                output = call.context.run(collecting, replica.module.forward, *args, **kwargs)
        refuse_changed((all_given, call.spec), (args, kwargs), call.layer.name)
        return inlet, output, given

    def _differs_without_grad(
        self, slot: Slot, call: Call, leaves: list[Any], outputs: list[Any], given: dict[int, Tensor]
    ) -> bool:
        """Whether the layer computes other bits in no-grad mode, where torch may choose another kernel.

        Attention is such a case. The forward of such a layer has to run with grad as its recomputation does, or the
        result would depend on which stage it is in. A layer with side effects is not run a second time to find out.
        """
        if self._worker.buffers(call.layer).changed(thorough=True) or any(t._version for t in given.values()):
            return True
        quiet = dataclasses.replace(call, graph=False)
        _, output, _ = self._run(slot, quiet, leaves, "")
        again = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        first = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
        return not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @contextlib.contextmanager
    def _seeded(self, call: Call) -> Iterator[None]:
        if call.seed is None:
            yield
            return
        what = f"layer {call.layer.name!r}"
        with self._randomness().segment(("call", call.index), call.seed, self._device, what):
            yield

    @contextlib.contextmanager
    def _computing(self, kind: str, where: Where, microbatch: int) -> Iterator[None]:
        with self._device.permit():
            start = self._device.compute.record(timed=True)
            yield
            end = self._device.compute.record(timed=True)
        if kind:
            self._worker.recorder.add(kind, self._worker.index, start, end, microbatch, 0, where)

    def _safe(self, leaves: list[Any]) -> list[Any]:
        """Outputs that lie in an arena (a layer that returns its weight) must not change with the next slot."""
        return [leaf.clone() if isinstance(leaf, Tensor) and self._worker.owns(leaf) else leaf for leaf in leaves]

    def _mutated(self, call: Call, given: dict[int, Tensor]) -> dict[int, Tensor]:
        """Inputs that the layer has written to. The aliases that it was given started at version 0."""
        if call.ambient.inference:
            return {}
        found = {i: t for i, t in given.items() if not t.is_inference() and t._version > 0}
        if call.may_mutate is not None and (new := set(found) - call.may_mutate):
            raise RoundPipeError(
                f"layer {call.layer.name!r} wrote to its argument {min(new)} in place, which it did not do in the "
                "first batch; what is recomputed from may be damaged. Make the layer work out of place."
            )
        return found

    def _write_back_attributes(self, call: Call, before: list[dict[str, Any]]) -> None:
        replica = self._worker.replica(call.layer)
        changes = replica.written(before)
        for module, name, value in changes:
            if isinstance(value, Tensor) and value.requires_grad:
                raise RoundPipeError(
                    f"layer {call.layer.name!r} sets attribute {name!r} to a tensor that requires grad: gradients can "
                    "leave a layer only through its outputs. Return the tensor instead."
                )
            replica.originals[module].__dict__[name] = value
        if changes:
            replica.drop_written()

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, slot: Slot, entry: Entry, boundaries: Boundaries) -> list[Tensor | None]:
        """Recompute the call unless its graph was kept, and run its backward.

        Args:
            slot: the slot whose turn it is.
            entry: the call, with its output gradients.
            boundaries: brings saved inputs and gradients here.

        Returns:
            Per tensor argument, its gradient on this worker's device.
        """
        worker = self._worker
        if entry.graph is None:
            inlet, outputs = self._recompute(slot, entry, boundaries)
        else:
            inlet, outputs = entry.graph
            entry.graph = None
        grads = [self._sum(parts, boundaries) for parts in entry.grads]
        entry.grads = []
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        sums = worker.gradients_of(entry.call)
        parameters = worker.replica(entry.layer).parameters
        if sums is not None:
            sums.attach(parameters)
        where = Where(slot.index, slot.phase, entry.call, entry.layer.name)
        if pairs:
            with self._computing("backward", where, entry.microbatch):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if sums is not None:
            sums.detach(parameters)
        worker.retire(outputs, grads, inlet.grads)
        return inlet.grads

    def _sum(self, parts: list[tuple[Tensor, Device | None]], boundaries: Boundaries) -> Tensor | None:
        total: Tensor | None = None
        for part, device in parts:
            here = boundaries.transfer(part, device, self._device)
            total = here if total is None else total + here
        return total

    def _recompute(self, slot: Slot, entry: Entry, boundaries: Boundaries) -> tuple[Inlet, list[Tensor]]:
        worker, device = self._worker, self._device
        worker.ready(slot, entry.layer)
        replica = worker.replica(entry.layer)
        buffers = worker.buffers(entry.layer)
        leaves = [boundaries.on(device, leaf) if isinstance(leaf, HostCopy) else leaf for leaf in entry.leaves]
        buffers.load(entry.buffers)
        replica.apply(entry.state)
        attributes = replica.attributes()
        call = Call(
            entry.call, entry.layer, entry.microbatch, entry.spec, leaves, entry.requires_grad, entry.ambient,
            entry.state, entry.seed, entry.context, graph=True,
        )  # fmt: skip
        with device.hold([t for t in leaves if isinstance(t, Tensor)], "inputs of the running call"):
            # A layer that writes to its inputs must not write to what other calls share.
            private = [t.clone() if i in entry.mutates and isinstance(t, Tensor) else t for i, t in enumerate(leaves)]
            with noted(f"layer {entry.layer.name!r}", "recomputation", entry.microbatch, slot, device):
                inlet, output, given = self._run(slot, call, private, "recompute")
        if replica.written(attributes):
            replica.drop_written()
        buffers.discard()
        assert inlet is not None
        outputs = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        outputs += [given[i] for i in sorted(entry.mutates)]
        worker.retire(leaves)
        return inlet, outputs


def _refuse_hidden_tensors(leaves: list[Any], layer: str) -> None:
    """An output object that torch cannot look into would carry tensors past the boundary unseen."""
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and any(
            isinstance(getattr(leaf, f.name), Tensor) for f in dataclasses.fields(leaf)
        ):
            raise RoundPipeError(
                f"layer {layer!r} returns a {type(leaf).__name__}, a dataclass that holds tensors and that torch's "
                "pytree does not know. Register it with torch.utils._pytree.register_dataclass, or return a dict."
            )
