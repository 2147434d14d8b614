"""One layer call on a worker: its forward, and later its recomputation and backward.

Forward and recomputation are one piece of code, always with a graph where the caller has grad mode on. Unless the stage
is the fused one, the graph of the forward is dropped at once, and the call is repeated from what the tape keeps.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.alike import clone_alike, copy_alike
from lightning_roundpipe.devices.base import NOTHING
from lightning_roundpipe.engine.activations import Arriving
from lightning_roundpipe.engine.arguments import Arguments, Built, Substitution, collect
from lightning_roundpipe.engine.carrying import NOTHING_CARRIED, Carried, Gathering, Measuring, Returning
from lightning_roundpipe.engine.compiling import LayerCompiler
from lightning_roundpipe.engine.output_collectors import collecting
from lightning_roundpipe.engine.randomness import Randomness, Seed
from lightning_roundpipe.engine.shared_memory import sharing
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.trace import TracedCall
from lightning_roundpipe.engine.worker import LayerCopy, Worker
from lightning_roundpipe.estimates.crossing import storage_bytes
from lightning_roundpipe.estimates.meter import Counter
from lightning_roundpipe.faults.notes import FaultPlace, noted
from lightning_roundpipe.memory.arenas import address_of
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.memory.module_buffers import BufferValue
from lightning_roundpipe.memory.peak_memory import GRADIENTS, INPUTS, OUTPUTS, PeakMemoryMeter
from lightning_roundpipe.model.attributes import Contents, StateDiff
from lightning_roundpipe.model.cast_weights import CastWatcher, RoundedWeight
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.user_code.bypassed_gradients import Lender
from lightning_roundpipe.user_code.graph_cut import Gradients, InputEdge, cut, inlet, reaches_out, run_backward
from lightning_roundpipe.user_code.layer_attributes import LayerWrites
from lightning_roundpipe.user_code.thread_state import TorchThreadState

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(slots=True, eq=False)
class CallEnvironment:
    """What a call's code depends on besides its arguments. The recomputation finds the same.

    Attributes:
        seed: from which its random numbers derive.
        state: how attributes of the layer's modules differ from those of its copies.
        contents: what containers of plain values hold that are attributes.
        lender: provides stand-ins for parameters of other modules.
    """

    seed: Seed
    state: StateDiff | None
    contents: Contents
    thread_state: TorchThreadState
    lender: Lender
    trained: tuple[bool, ...]
    variables: contextvars.Context = field(default_factory=contextvars.copy_context)


@dataclass(slots=True, eq=False)
class CallInputs:
    """What a call is made with.

    Attributes:
        needs: for each tensor among them, whether it needs a gradient.
        edges: where the gradients of those go.
        saved: the tensors on the host, without those ``recomputed``; empty if the graph is kept.
        recomputed: by position, the earlier call whose recomputation gives a tensor, and which of its outputs that is.
        mutated: positions of the tensors that the layer writes to.
        buffers: the layer's buffers in front of the forward.
        carried: products of the forward that the recomputation gets.
    """

    arguments: Arguments
    needs: tuple[bool, ...]
    edges: list[InputEdge]
    saved: Sequence[HostTensor] = ()
    mutated: Sequence[int] = ()
    recomputed: Mapping[int, tuple[LayerCall, int]] = field(default_factory=dict)
    buffers: dict[int, BufferValue] | None = None
    carried: Carried = NOTHING_CARRIED

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], attributes: dict[tuple[int, str], Any],
        own: Callable[[nn.Parameter], Tensor], home_of: Callable[[Tensor], Device | None], *, grad: bool,
    ) -> CallInputs:  # fmt: skip
        """Take a call's arguments apart; see `Arguments`. ``home_of`` returns the device that a tensor is on."""
        arguments = Arguments(args, kwargs, attributes, own)
        needs = tuple([grad and t.requires_grad for t in arguments.tensors])
        edges = [InputEdge(t, home_of(t)) for t, n in zip(arguments.tensors, needs, strict=True) if n]
        return cls(arguments, needs, edges)

    @property
    def brought(self) -> list[HostTensor]:
        """What a recomputation needs on the worker."""
        return [*self.saved, *self.carried.block]

    def whole(self, saved: Iterable[Tensor]) -> list[Tensor]:
        """Return all tensors on a worker, of which ``saved`` have come from the host."""
        come, recomputed = iter(saved), self.recomputed
        return [
            recomputed[i][0].recomputed_output(recomputed[i][1]) if i in recomputed else next(come)
            for i in range(len(self.needs))
        ]


@dataclass(slots=True, eq=False)
class LayerCall:
    """A call of a layer, and what the tape keeps of it: all that the forward depended on, for the recomputation.

    Attributes:
        index: its position in the trace; of a call that the trace has not, a number behind all of it.
        environment: what its code depends on besides ``inputs``.
        home: device that user code is on at the call.
        output_kinds: shape and dtype of each of these outputs.
        graph: the outputs with their graph, and the gradients of the inputs; None if the graph was dropped.
        slot: the slot of its backward, if the plan has none.
        traced: what the first window learns about the call; None after it.
        reconnect: returns the outputs of a repeated call as user code gets them; None for other calls.
    """

    layer: HostLayer
    index: int
    microbatch: int
    environment: CallEnvironment
    inputs: CallInputs
    home: Device | None
    gradients: Gradients = field(init=False)
    output_kinds: tuple[Kind, ...] = ()
    graph: tuple[list[Tensor], Gradients] | None = None
    slot: Slot | None = None
    planned: bool = False
    traced: TracedCall | None = None
    reconnect: Callable[[list[Tensor], Device], list[Tensor]] | None = None

    def recomputed_output(self, output: int) -> Tensor:
        """Return an output of its recomputation."""
        assert self.graph is not None
        return self.graph[0][output].detach()

    @property
    def use(self) -> int:
        """How often the microbatch has called the layer before."""
        return self.environment.seed[-1]

    def place(self, phase: str, slot: Slot, device: Device) -> FaultPlace:
        """Return the call's place, for errors."""
        return FaultPlace(self.layer.title, phase, self.microbatch, slot, device)

    def as_traced(self) -> TracedCall:
        """Return the call as a trace has it."""
        return TracedCall(self.layer, self.use, self.is_taped)

    @property
    def is_taped(self) -> bool:
        """Whether a backward follows, as far as that is known before."""
        around = self.environment
        return around.thread_state.grad and (
            any(self.inputs.needs) or any(around.trained) or bool(self.layer.seen.borrows)
        )


@dataclass(slots=True)
class Outcome:
    """What a run of a layer's code has given, and what user code gets of that.

    Attributes:
        result: what the layer returned, and what output collectors have gathered.
        copies: for each list, dict or object that it was given, the caller's and the copy.
        written: attributes that it has set, with values as the layer has them.
        mutated: tensors that it was given and has written to, by position.
        sets_attributes: whether it has set attributes, or may have filled containers that are attributes.
        tensors: the tensors in all of these, without those that it was given.
        differentiable: those of them that require grad.
        shared: tensors, given and returned, that share memory.
        caller: translates values of the layer to what user code sees.
    """

    result: Any
    copies: list[tuple[Any, Any]]
    written: list[tuple[int, str, Any]]
    mutated: list[tuple[int, Tensor]]
    sets_attributes: bool
    tensors: list[Tensor] = field(default_factory=list)
    differentiable: list[Tensor] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    caller: Substitution = field(init=False)

    def find_tensors(self, known: set[int], *, grad: bool) -> None:
        """Find the tensors that are not ``known``, by their ids; with ``grad`` also those that require grad."""
        found = self.tensors
        for value in (*self.result, *(copy for _, copy in self.copies), *(value for *_, value in self.written)):
            collect(value, known, found)
        found += [t for _, t in self.mutated if id(t) not in known]
        if grad:
            self.differentiable = [t for t in found if t.requires_grad]

    def hand_out(self, originals: dict[int, Any]) -> None:
        """Replace the layer's objects by those that user code has for them: ``originals``, by the ids of the former."""
        for original, copy in self.copies:
            originals[id(copy)] = original
        self.mutated = [(i, originals[id(t)] if t.requires_grad else t) for i, t in self.mutated]
        self.shared = [originals.get(id(t), t) for t in self.shared]
        self.caller = Substitution(originals)
        self.result = self.caller(self.result)
        self.tensors, self.differentiable = [], []  # which have the graph

    def deliver(self, layer: HostLayer, inputs: Sequence[Tensor]) -> None:
        """Let user code, which goes on, find what the layer has written: to its arguments, and to its modules.

        ``inputs``: the tensors that the call was made with.
        """
        for original, copy in self.copies:
            self.caller.write(original, copy)
        for number, name, value in self.written:
            setattr(layer.state.modules[number], name, self.caller(value))
        for position, value in self.mutated:
            own = inputs[position]
            if value.data_ptr() != own.data_ptr():
                own.copy_(value)
            elif value.requires_grad:  # the values are there: only the history is missing
                with torch.autograd._unsafe_preserve_version_counter(own):  # type: ignore[attr-defined]
                    own.copy_(value)


class FirstWindow:
    """What the first window looks at while layers run: their memory, operations, products and uses of weights.

    Args:
        rates: rates by which operations are counted, for a static plan; None: they are not.
        casts: whether it looks for weights that autocast casts wherever they are used.
        carries: whether it measures products, which a plan may carry.
    """

    def __init__(self, rates: Hardware | None, *, casts: bool, carries: bool) -> None:
        self._rates, self._casts, self._carries = rates, casts, carries

    @staticmethod
    def meter(call: LayerCall, worker: Worker, inputs: Iterable[Tensor]) -> PeakMemoryMeter | None:
        """Return what measures the call's memory; None after the first window."""
        if call.traced is None:
            return None
        worker.in_flight.wait_until_idle()
        return PeakMemoryMeter(worker.device, inputs)

    @contextlib.contextmanager
    def watching(self, call: LayerCall, slot: Slot, kind: str, replica: Replica, device: Device) -> Iterator[None]:
        """See how weights are used, and count operations if the plan is made from them."""
        counter = None
        with contextlib.ExitStack() as around:
            if self._casts:
                around.enter_context(CastWatcher(call.layer.seen.uses, replica.parameters))
            if self._rates is not None and kind != "recompute":
                counter = around.enter_context(Counter(self._rates))
            if self._carries and kind == "forward" and call.is_taped and call.traced is not None:
                record = functools.partial(device.compute.record, timed=True)
                clock = record if counter is None else lambda: counter.work.seconds
                call.traced.seen = around.enter_context(Measuring(device, clock))
            yield
        if counter is not None:
            slot.spec.recorder.count(kind, call.microbatch, call.index, counter.work.seconds)


class Executor:
    """Runs calls on one worker.

    Args:
        compiler: how a layer's code runs.
        masters: ids of all parameters of the model.
    """

    def __init__(
        self, worker: Worker, randomness: Randomness, compiler: LayerCompiler, masters: Container[int],
        first_window: FirstWindow,
    ) -> None:  # fmt: skip
        self.worker, self.device, self._masters = worker, worker.device, masters
        self._randomness, self._compiler, self._first_window = randomness, compiler, first_window

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, call: LayerCall, slot: Slot, inputs: Sequence[Arriving], *, keep_graph: bool, carries: int | None = None
    ) -> Outcome:
        """Run a call.

        Args:
            slot: an open slot that has the layer's weights.
            keep_graph: whether the graph is kept for the backward.
            carries: least FLOPs a byte of products that go to the host for the recomputation; None: none does.
                Compiled code has none.
        """
        layer, worker = call.layer, self.worker
        tensors = worker.bring_in(slot, layer, inputs)
        copy = worker.copies.of(slot, layer)
        replica, buffers = copy.replica, copy.buffers
        grad = call.environment.thread_state.grad
        has_buffers = bool(buffers)
        before = buffers.snapshot() if has_buffers and grad and not keep_graph else None
        if has_buffers:
            buffers.load()
        with self.device.track(tensors, INPUTS):
            meter = self._first_window.meter(call, worker, tensors)
            gathering = None
            if carries is not None and not self._compiler.compiled:
                gathering = Gathering(self.device, draws=layer.index in self._randomness.draws, least=carries)
            run, aliases, sink = self._run(call, slot, tensors, copy, "forward", gathering, grad=grad)
            found = run.tensors
            if gathering is not None and run.differentiable:
                call.inputs.carried = carried = gathering.send(slot.spec.recorder, call.microbatch)
                worker.in_flight.carrying += [host.ready for host in carried.block if host.ready is not None]
            self.device.track_until_freed(found, OUTPUTS)
            if meter is not None and call.traced is not None:
                call.traced.memory.kept_bytes = meter.read()
        if buffers:
            learning = self._randomness.learning or layer.seen.is_new_state(call.environment.state)
            buffers.write_back(before, learning, call.microbatch)
            call.inputs.buffers = before
        originals: dict[int, Any] = dict(replica.sources)
        originals.update(zip(map(id, aliases), call.inputs.arguments.tensors, strict=True))
        run.shared = sharing(found, aliases)
        lent = worker.arena_addresses()
        if not keep_graph:
            lent.update([address_of(tensor) for tensor, event in inputs if event is not None])
        clones = self._part_from_lent(run, found, lent, originals)
        call.inputs.mutated = [position for position, _ in run.mutated]
        if run.differentiable:
            outputs, call.gradients = cut(run.differentiable, layer.name, self.device)
            call.gradients.edges, call.gradients.masters = call.inputs.edges, layer.masters
            call.output_kinds = _kinds(run.differentiable)
            copied = set(map(id, clones.values()))
            call.gradients.versions = [
                -1 if id(t) in copied else o._version for t, o in zip(run.differentiable, outputs, strict=True)
            ]
            originals.update((id(t), o) for t, o in zip(run.differentiable, outputs, strict=True))
            if keep_graph and sink is not None:
                call.graph = run.differentiable, sink
        worker.in_flight.keep(tensors, run.differentiable)
        if call.reconnect is not None:
            self._reconnect(call, run, originals)
        for known, clone in clones.items():
            originals[known] = originals.get(id(clone), clone)
        run.hand_out(originals)
        return run

    def _run(
        self, call: LayerCall, slot: Slot, tensors: list[Tensor], copy: LayerCopy, kind: str,
        carrying: Gathering | Returning | None = None, *, grad: bool,
    ) -> tuple[Outcome, list[Tensor], Gradients | None]:  # fmt: skip
        """Run the layer's code; the caller has waited for all that it reads.

        Returns the outcome, the tensors that the layer got, and with ``grad`` the node that collects their gradients.
        """
        around, layer, replica = call.environment, call.layer, copy.replica
        replica.attributes.apply(around.state)
        replica.train(around.trained)
        replica.attributes.fill(around.contents)
        if grad:
            aliases, sink = inlet(tensors, call.inputs.needs, layer.name, self.device)
        else:
            aliases, sink = list(tensors), None
        built = call.inputs.arguments.build(aliases)
        if built.attributes:
            replica.attributes.hold(built.attributes)
        before = [0 if t.is_inference() else t._version for t in aliases]
        own = [p._version for p in replica.parameters]
        writes = LayerWrites(replica)
        # Compiled code has no modes inside.
        borrowing = NOTHING if self._compiler.compiled else copy.borrowing(around.lender, self._masters)
        output = self._called(call, slot, replica, kind, built, writes, borrowing, carrying or NOTHING, grad=grad)
        copy.check(own, borrowing, around.trained if grad else None)
        mutated = [(i, t) for i, t in enumerate(aliases) if not t.is_inference() and t._version != before[i]]
        (result, collected), written = output, writes.found()
        filled = copy.release(built.attributes, written)
        fills = bool(filled or [v for v in built.attributes.values() if not isinstance(v, (Tensor, tuple))])
        if written or collected:
            layer.observers.act()
        sets = bool(written) or fills
        run = Outcome((result, collected or None), [*built.copies, *filled], written, mutated, sets)
        seen = {*map(id, aliases), *map(id, replica.parameters)}
        run.find_tensors(seen.difference([id(t) for _, t in mutated]), grad=grad)
        if grad and self._randomness.learning and reaches_out(run.differentiable, layer.name):
            layer.seen.reaches_out = True
        return run, aliases, sink

    def _called(
        self, call: LayerCall, slot: Slot, replica: Replica, kind: str, built: Built, writes: LayerWrites,
        borrowing: AbstractContextManager[Any], carrying: AbstractContextManager[Any], *, grad: bool,
    ) -> tuple[Any, dict[str, list[Any]]]:  # fmt: skip
        """Return what the layer's code returns, and what it collects, under the modes that it needs."""
        layer, device, again = call.layer, self.device, kind == "recompute"
        draws = self._randomness.begin(layer.index, device, call.environment.seed)
        forward = self._compiler.of(layer, replica)
        saved = device.saved_for_backward() if grad else NOTHING
        unregistered = replica.unregistered_tensors
        unmoved = unregistered.unmoved(layer.name) if again and unregistered else NOTHING
        compiled, cache = self._compiler.compiled, parametrize._cache  # compiled code contains its hooks
        observed = (None if compiled else layer.observers.watched(replica.modules, again=again)) or NOTHING
        began = time.perf_counter()
        watched = NOTHING if call.traced is None else self._first_window.watching(call, slot, kind, replica, device)

        def code() -> tuple[Any, dict[str, list[Any]]]:
            with saved, unmoved, writes, watched, borrowing, observed, carrying:
                return collecting(forward, *built.args, **built.kwargs)

        try:
            keeps_baton = draws or compiled
            output = self.worker.compute(slot, layer, call.index, call.microbatch, kind, code, keeps_baton=keeps_baton)
        finally:  # user code may catch what the layer raises
            if draws:
                self._randomness.end(layer.index)
        torch.set_grad_enabled(grad)  # the layer may have left it otherwise
        layer.seen.launched(time.perf_counter() - began, alone=call.traced is not None)
        layer.seen.caches_parametrizations |= parametrize._cache is not cache  # leaving ``cached()`` makes a new dict
        return output

    def _part_from_lent(
        self, run: Outcome, found: list[Tensor], lent: set[int], originals: dict[int, Any]
    ) -> dict[int, Tensor]:
        """Clone outputs in memory that other calls get next, for user code: views of weights, and of inputs.

        Returns the clones, by the ids of these outputs.
        """
        clones = {
            id(t): clone_alike(t)
            for t in found
            if t.layout is torch.strided
            and id(t) not in originals
            and (address_of(t) in lent or isinstance(t, RoundedWeight))
        }
        if clones:
            run.differentiable = [clones.get(id(t), t) for t in run.differentiable]
            originals.update(clones)
        return clones

    def _reconnect(self, call: LayerCall, run: Outcome, originals: dict[int, Any]) -> None:
        """Bring the outputs of a repeated call to the device of the first one's, and into the graph of user code."""
        assert call.reconnect is not None
        found = list(run.differentiable)
        collect([run.result, [c for _, c in run.copies], run.written], {*originals, *map(id, found)}, found)
        seen = [originals.get(id(t), t) for t in found]
        originals.update(zip(map(id, found), call.reconnect(seen, self.device), strict=True))

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, call: LayerCall, slot: Slot, inputs: Sequence[Arriving], gradients: Sequence[Sequence[Arriving]],
        factor: float,
    ) -> list[Tensor | None]:  # fmt: skip
        """Run a call's backward, after its recomputation unless its graph was kept.

        Args:
            slot: an open slot that has the layer's weights.
            inputs: its saved tensors on this worker, and its carried products behind them.
            gradients: of each of its outputs, in parts.
            factor: by which gradients of parameters are multiplied before they are added to the sums.

        Returns:
            The gradient of each of the inputs that need one.
        """
        worker, layer, device = self.worker, call.layer, self.device
        arrived = (*inputs, *(part for parts in gradients for part in parts))
        meter = self._first_window.meter(call, worker, [a.tensor for a in arrived])
        del arrived
        copy = worker.copies.of(slot, layer) if call.graph is not None else self.recompute(call, slot, inputs)
        replica, buffers = copy.replica, copy.buffers
        assert call.graph is not None
        (outputs, sink), call.graph = call.graph, None
        roots = [_root(output) for output, parts in zip(outputs, gradients, strict=True) if parts]
        del outputs
        values = [self._sum(worker.arrived(parts)) for parts in gradients if parts]
        sums = worker.gradients_of(slot, call.index)
        replica.train(call.environment.trained)
        if sums is not None:
            sums.attach(replica.parameters, factor)
        sink.closed = False
        held = buffers.written() if buffers else {}
        if roots:
            first = call.traced is not None
            watched = self._first_window.watching(call, slot, "backward", replica, device) if first else NOTHING
            keeps_baton = layer.index in self._randomness.draws or self._compiler.compiled
            # Other calls may reach the same stand-in's graph.
            code = functools.partial(run_backward, roots, values, retain_graph=bool(layer.seen.reaches_out))
            with watched:
                worker.compute(slot, layer, call.index, call.microbatch, "backward", code, keeps_baton=keeps_baton)
        if buffers:
            buffers.refuse_written(held)
        if sums is not None:
            sums.detach(replica.parameters, factor)
        sink.closed = True
        lent = {address_of(a.tensor) for a in inputs}  # memory that others get next
        lent.update([address_of(p.tensor) for parts in gradients for p in parts if p.event is not None])
        found = [parts[0].tensor if parts else None for parts in sink.parts]
        found = [self._copied(g) if g is not None and address_of(g) in lent else g for g in found]
        present = [g for g in found if g is not None]
        if meter is not None and call.traced is not None:
            call.traced.memory.activation_bytes = max(call.traced.memory.activation_bytes, meter.read())
            call.traced.memory.returning_bytes = storage_bytes(values)
        worker.in_flight.keep(values, present)
        return found

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of the parts of a gradient, which count on the device already."""
        if len(parts) == 1:
            return parts[0]
        total = functools.reduce(torch.add, parts)
        self.device.track_until_freed([total], GRADIENTS)
        return total

    def _copied(self, gradient: Tensor) -> Tensor:
        copied = copy_alike(gradient)
        self.device.track_until_freed([copied], GRADIENTS)
        return copied

    def recompute(self, call: LayerCall, slot: Slot, inputs: Sequence[Arriving]) -> LayerCopy:
        """Repeat the forward of a call, now for its graph. Arguments as for `backward`. Returns the layer's copy."""
        there, count = self.worker.bring_in(slot, call.layer, inputs), len(call.inputs.saved)
        copy = self.worker.copies.of(slot, call.layer)
        returning = call.inputs.carried.returning(there[count:], self.device.generator)
        outputs, sink = self._recompute(call, slot, copy, there[:count], returning)
        if returning is not None and not returning.has_fitted():
            outputs, sink = self._recompute(call, slot, copy, there[:count])
        self._check(call, outputs)
        self.device.track_until_freed(outputs, OUTPUTS)
        call.graph = outputs, sink
        return copy

    def _recompute(
        self, call: LayerCall, slot: Slot, copy: LayerCopy, saved: Sequence[Tensor], returning: Returning | None = None
    ) -> tuple[list[Tensor], Gradients]:
        device = self.device
        if buffers := copy.buffers:
            buffers.load(call.inputs.buffers)
        inputs = call.inputs.whole(saved)
        if mutated := call.inputs.mutated:
            inputs = [copy_alike(t) if i in mutated else t for i, t in enumerate(inputs)]
            device.track_until_freed([inputs[i] for i in mutated], INPUTS)
        again = noted(functools.partial(call.place, "recomputation", slot, device))
        with again, call.environment.thread_state.entered():
            run, _, sink = call.environment.variables.run(
                functools.partial(self._run, grad=True), call, slot, inputs, copy, "recompute", returning
            )
        if buffers:
            buffers.discard()
        assert sink is not None
        return run.differentiable, sink

    @staticmethod
    def _check(call: LayerCall, outputs: Sequence[Tensor]) -> None:
        if (kinds := _kinds(outputs)) != call.output_kinds:
            raise RoundPipeError(
                f"layer {call.layer.name!r} returned {_named(call.output_kinds)} with gradients, and "
                f"{_named(kinds)} when it was recomputed for its backward: what it "
                "does must depend on its arguments, weights, buffers and random numbers alone."
            )


def _kinds(tensors: Sequence[Tensor]) -> tuple[Kind, ...]:
    return tuple([(tuple(t.shape), t.dtype) for t in tensors])


def _named(kinds: Sequence[Kind]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in kinds) or "no tensor"


def _root(output: Tensor) -> Any:
    """Return where the backward of ``output`` begins, without its memory.

    That of a sparse or nested tensor, or of a subclass, is the tensor itself.
    """
    plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided and not output.is_nested
    return get_gradient_edge(output) if plain else output
