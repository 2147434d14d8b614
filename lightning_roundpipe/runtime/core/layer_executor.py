"""Execution of a layer call on a worker: forward, recomputation and backward. Runs on the worker's thread."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.cast_weights import CastWatcher
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.planning.crossing import storage_bytes
from lightning_roundpipe.planning.meter import Counter
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call, Forward, LayerExecution
from lightning_roundpipe.runtime.core.computing import Computing
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.core.graph_leaks import reaches_out
from lightning_roundpipe.runtime.core.plain_executor import PlainExecutor, profile_of
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.layer_calls.arguments import (
    FlatValue,
    refuse_caches,
    refuse_filled,
    refuse_hidden,
    unflatten_call,
)
from lightning_roundpipe.runtime.layer_calls.compiling import LayerCompiler
from lightning_roundpipe.runtime.layer_calls.discrete_ops import DiscreteOpRecorder, DiscreteOpReplayer
from lightning_roundpipe.runtime.layer_calls.output_collectors import collecting
from lightning_roundpipe.runtime.layer_calls.shared_memory import apart_from_lent, overlapping, private
from lightning_roundpipe.runtime.layer_calls.side_outputs import SideOutputCollector, again, refuse_new_gradients
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import parametrizing
from lightning_roundpipe.runtime.layer_calls.tile_check import refuse_random
from lightning_roundpipe.runtime.layer_calls.tiled_call import CallSurroundings
from lightning_roundpipe.runtime.layer_calls.token_tiles import TokenTiles
from lightning_roundpipe.runtime.layer_calls.value_watch import ValueWatch
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.memory.module_buffers import BufferValue
from lightning_roundpipe.runtime.memory.peak_memory import GRADIENTS, INPUTS, OUTPUTS, PeakMemoryMeter
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Borrowing, Lender
from lightning_roundpipe.runtime.user_code.inference_writes import counting_writes, is_written
from lightning_roundpipe.runtime.user_code.interception import Inside
from lightning_roundpipe.runtime.user_code.process_state import alone
from lightning_roundpipe.runtime.user_code.rng import Randomness

_NOTHING = contextlib.nullcontext()
_Root = Tensor | GradientEdge
"""Where a backward begins."""


class LayerExecutor:
    """Runs layer calls on one worker.

    The class uses many modules because everything that must surround a layer's code meets here: the replica and its
    buffers, the caller's modes and seed, compiled code, hooks, and what the first batch looks for. `_run` enters them
    for forward and recomputation alike, so that both run under the same conditions.

    Args:
        worker: the worker on whose thread this runs.
        randomness: returns the object that seeds calls in training; calls without a seed use the caller's generators.
        formats: number formats that layers compute in.
        watched: returns whether to record what layers do with their weights.
        forwards: returns the function that runs a layer, as written or compiled.
        masters: ids of all master parameters.
        counter: returns a counter for the operations of a call, or None if the plan is not made from shapes.
        tiles: runs modules inside layers in tiles of tokens; None runs them whole.
    """

    def __init__(
        self,
        worker: Worker,
        randomness: Callable[[], Randomness],
        formats: Formats,
        watched: Callable[[], bool],
        forwards: LayerCompiler,
        masters: Container[int] = (),
        counter: Callable[[], Counter | None] = lambda: None,
        tiles: TokenTiles | None = None,
    ) -> None:
        self._worker = worker
        self._device = worker.device
        self._randomness = randomness
        self._formats = formats
        self._watched = watched
        self._forwards = forwards
        self._masters = masters
        self._counter = counter
        self._plain = PlainExecutor(worker, randomness)
        self._all_tiles = tiles

    @property
    def _tiles(self) -> TokenTiles | None:
        """Runs modules in tiles; None if they run whole."""
        return self._all_tiles if self._all_tiles is not None and self._all_tiles.on else None

    def forward(self, slot: Slot, call: Call, activations: ActivationStore) -> Forward:
        """Run a call's forward.

        Args:
            slot: the slot whose turn it is.
            call: the call, whose fields say how to run it.
            activations: uploads inputs that are on the host, and downloads recorded choices.

        Returns:
            The outputs, on the worker, and what else the forward has shown.

        Raises:
            RoundPipeError: if the layer does something that a call on a worker cannot reproduce.
        """
        worker, device = self._worker, self._device
        replica, buffers = worker.copy_of(call.layer)
        if call.profile is not None and not buffers:  # user code may have registered some
            return self._plain_forward(slot, call, replica, activations)
        if call.measure:
            activations.leave()  # measure as if the microbatch came from another worker
        leaves = self._leaves(slot, call.layer, call.leaves, activations.on)
        thorough = call.learning or call.layer.is_new_state(call.state)
        snapshot = buffers.snapshot() if call.recomputed else None
        buffers.load()
        if call.measure and self._forwards.compiled:
            self._count_as_written(slot, call, leaves)
        if call.learning and self._all_tiles is not None and call.thread_state.grad:
            self._turn_tiles_on(self._all_tiles, slot, call, leaves)
        if call.measure and self._tiles is not None and self._tiles.unknown(call.layer, call.state):
            self._compare_tiles(slot, call, leaves)
        inputs = _tensors(leaves)
        with device.track(inputs, INPUTS):
            meter = PeakMemoryMeter(device, inputs) if call.measure else None
            ran = self._run(slot, call, leaves, "recompute" if call.repeated else "forward")
            refuse_hidden(ran.output.leaves, call.layer.name)
            device.track_until_freed(ran.tensors(), OUTPUTS)  # user code holds them longer than this block
            activation = meter.read() if meter is not None else 0
        if call.walk and ran.detached_inputs is not None:
            if call.bare and any(t.requires_grad for t in ran.tensors()):
                refuse_caches(leaves, call.layer.name)
            new = call.bare and not call.tentative
            found = reaches_out(ran.tensors(), ran.detached_inputs, replica.parameters, call.layer.name, new=new)
            call.layer.reaches_out = call.layer.reaches_out or found
        mutated = self._mutated(call, ran.given)
        if call.repeated:
            buffers.discard()
        else:
            buffers.write_back(snapshot, thorough, call.microbatch)
        result = self._finished(call, leaves, ran, mutated, activations)
        result.buffers, result.activation_bytes = snapshot, activation
        if not (call.learning or self._forwards.compiled or self._watched() or self._tiles):
            result.profile = profile_of(call, ran, result, replica, buffers)
        if call.graph and not call.kept:
            result.drop_graph()
        worker.keep_until_computed(leaves, ran.tensors())
        return result

    def _finished(
        self,
        call: Call,
        leaves: list[Any],
        ran: LayerExecution,
        mutated: dict[int, Tensor],
        activations: ActivationStore,
    ) -> Forward:
        """Return the results of a forward, apart from the memory that the next call or slot will overwrite."""
        flats = [ran.output, *ran.side_outputs.values()]
        with self._watching(call.layer):
            for flat in flats:
                flat.leaves = self._safe(flat.leaves)
        shared = overlapping(ran.output.tensors(), ran.given)
        mutated, own = apart_from_lent(leaves, call.leaves, flats, mutated)
        self._device.track_until_freed(own, OUTPUTS)
        result = Forward(ran.output, ran.side_outputs, ran.detached_inputs, mutated, overlapping=shared)
        if ran.recording is not None and ran.recording.made:
            result.truths = ran.recording.truths()
            call.layer.asks |= bool(result.truths)
            if call.recomputed:
                call.layer.seen_to_choose()
                saved = ran.recording.saved(lambda packed: activations.save(packed, self._device))
                result.chosen, result.choices = saved
                self._device.track_until_freed(_tensors([result.chosen]), OUTPUTS)
        return result

    def _plain_forward(self, slot: Slot, call: Call, replica: Replica, activations: ActivationStore) -> Forward:
        """Run the forward of a call that has a profile; see `plain_executor`."""
        device, profile = self._device, call.profile
        absent: dict[int, BufferValue] | None = {} if call.recomputed else None  # a plain layer has no buffers
        leaves = self._leaves(slot, call.layer, call.leaves, activations.on)
        with device.track(_tensors(leaves), INPUTS):
            ran = self._plain.run(slot, call, call.index, replica, leaves, "forward", graph=call.graph)
            if ran.surprises:
                profile = None
                self._refuse_surprises(call.layer, leaves, ran)
                self._worker.buffers(call.layer).write_back(absent, thorough=False, microbatch=call.microbatch)
            outputs = ran.tensors()
            device.track_until_freed(outputs, OUTPUTS)
        if profile is not None:
            result = Forward(ran.output, ran.side_outputs, ran.detached_inputs)
        else:
            result = self._finished(call, leaves, ran, self._mutated(call, ran.given), activations)
            result.buffers = absent
        result.profile = profile
        if call.graph and not call.kept:
            result.drop_graph()
            outputs = ran.tensors()
        # Whatever looks at surprises may have enqueued more.
        self._worker.keep_until_computed(leaves, outputs, end=None if ran.surprises else ran.end)
        return result

    def _leaves(
        self, slot: Slot, layer: HostLayer, leaves: list[Any], bring: Callable[[Device, HostTensor], Tensor], *,
        ahead: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Wait for the layer's weights and return the call's arguments on the worker, uploaded by ``bring``."""
        device = self._device
        could = self._worker.ready(slot, layer, leaves)
        there = [bring(device, leaf) if isinstance(leaf, HostTensor) else leaf for leaf in leaves]
        if could is not None and not ahead:
            slot.recorder.waited(self._worker.index, could, device.compute.record(timed=True))
        return there

    def _refuse_surprises(self, layer: HostLayer, leaves: list[Any], ran: LayerExecution) -> None:
        """Raise if a call that was expected to be plain did something that no call may do."""
        if ran.written:
            self._refuse_written(layer, ran.written)
        refuse_filled([leaf for leaf in leaves if not isinstance(leaf, Tensor)], layer.name)
        refuse_hidden(ran.output.leaves, layer.name)
        self._refuse_registered(layer)

    def _run(
        self,
        slot: Slot,
        call: Call,
        leaves: list[Any],
        kind: str,
        replay: DiscreteOpReplayer | None = None,
        as_written: Counter | None = None,
        watch: ValueWatch | None = None,
        valueless: bool = False,
    ) -> LayerExecution:
        """Run the layer's code under the modes, context variables and random state that were active at the call.

        Args:
            slot: the slot whose turn it is.
            call: the call.
            leaves: its arguments on the worker.
            kind: kind of event to record; empty records none.
            replay: repeats the discrete choices of the forward.
            as_written: counts the operations; the layer then runs uncompiled.
            watch: follows the values that tiled modules return.
            valueless: whether only the graph is wanted, so that values which nobody reads may be left out.
        """
        forwards = self._forwards if as_written is None else LayerCompiler()
        counter = as_written or (self._counter() if kind == "forward" and not forwards.compiled else None)
        name = call.layer.name
        replica = self._worker.replica(call.layer)
        if self._tiles is not None:
            self._tiles.of(call.layer, replica)  # wraps modules, which is nothing that the layer's code has set
        replica.apply(call.state)
        replica.train(call.trainable)
        grad = call.thread_state.grad and call.graph
        detached_inputs = None
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        versions = [p._version for p in replica.parameters]
        undisturbed = self._forwards.alone(self._device)
        with undisturbed, parametrizing(call.layer), call.thread_state.entered(grad=grad), self._seeded(call, kind):
            tensors = [leaves[i] for i in positions]
            if grad:
                detached_inputs = DetachedInputs(name)
                tensors = detached_inputs.open(tensors, [call.requires_grad[i] for i in positions])
            else:
                tensors = counting_writes(tensors, inference=call.thread_state.inference)
            given = dict(zip(positions, tensors, strict=True))
            all_given = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs, carried = unflatten_call(all_given, call.spec)
            replica.set(carried)
            side_collector = SideOutputCollector(replica, (args, kwargs), immutable=call.spec.is_immutable)
            saved = self._device.saved_for_backward() if grad else _NOTHING
            recording = self._recording(call, leaves) if kind == "forward" else None
            choosing, watching = recording or replay or _NOTHING, self._watching(call.layer)
            seen = watch or _NOTHING  # the innermost mode, which does not see what the others do
            computing = Computing(
                self._worker, slot, kind, call.index, call.layer, call.microbatch, Inside(name), counter
            )
            borrowing = self._borrowing(call.layer, call.lender)
            observed = self._observed(call.layer, again=kind != "forward")
            tiled = self._tiled(
                call, carried=bool(carried), choosing=recording is not None, valueless=valueless, watch=watch
            )
            with computing, saved, watching, choosing, seen, borrowing, observed, tiled:
                output = call.context.run(collecting, forwards.of(call.layer, replica), *args, **kwargs)
        written = {i for i, p in enumerate(replica.parameters) if p._version != versions[i]}
        if isinstance(borrowing, Borrowing):
            call.layer.borrows = borrowing.found
            call.layer.reads_data |= borrowing.reads_data
            written |= borrowing.written_by_data()
        if written:
            self._refuse_written(call.layer, written)
        self._refuse_registered(call.layer)
        if call.thread_state.grad and any(
            p.requires_grad and not trained for p, trained in zip(replica.parameters, call.trainable, strict=True)
        ):
            raise RoundPipeError(
                f"layer {name!r} switches on requires_grad of its own parameters while it runs; on a worker that is "
                "lost. Set requires_grad between steps, for example in on_train_batch_start."
            )
        refuse_filled([leaf for leaf in leaves if not isinstance(leaf, Tensor)], name)
        ran = LayerExecution(
            detached_inputs, FlatValue.of(output, given), side_collector.collect(given, name), given, recording
        )
        if ran.side_outputs or output[1]:
            call.layer.observers.act()
        if carried:
            replica.drop_written()
        return ran

    def _tiled(
        self, call: Call, *, carried: bool, choosing: bool, valueless: bool, watch: ValueWatch | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which modules inside the layer run in tiles.

        Not where a tile's backward would find other values than its forward: in buffers that the layer writes to, and
        in attributes that came with the call (``carried``).
        """
        layer, device = call.layer, self._device
        if self._tiles is None or carried or layer.mutable_buffers or layer.borrows:
            return _NOTHING
        replica = self._worker.replica(layer)
        draws = call.seed is None or self._randomness().may_draw(layer.index)
        chooses = layer.chooses is not None and (layer.chooses or choosing)
        surroundings = CallSurroundings(
            thread_state=call.thread_state,
            context=call.context,
            saving=device.saved_for_backward,
            track=lambda tensors: device.track_until_freed(tensors, GRADIENTS),
            guard=refuse_random if draws else contextlib.nullcontext,
            choosing=chooses,
            valueless=valueless and not chooses,
            adding=self._tiles.of(layer, replica).adding,
        )
        return self._tiles.around(layer, replica, call.state, surroundings, watch)

    def _turn_tiles_on(self, tiles: TokenTiles, slot: Slot, call: Call, leaves: list[Any]) -> None:
        """Find out whether a call fits without tiles, in a run of its own, and turn them on if not."""
        given = storage_bytes(_tensors(leaves))
        if not tiles.may_need(call.layer, given):
            return
        meter, needed = PeakMemoryMeter(self._device, _tensors(leaves)), None
        with contextlib.suppress(torch.OutOfMemoryError):  # tiles take less
            ran = self._trial(slot, call, leaves, graph=True)
            self._device.track_until_freed(ran.tensors(), OUTPUTS)
            needed = given + storage_bytes(ran.tensors())  # for their gradients
            del ran
        found = meter.read()
        tiles.turn_on_unless(call.layer, given, None if needed is None else found + needed)
        self._restore(call.layer)

    def _compare_tiles(self, slot: Slot, call: Call, leaves: list[Any]) -> None:
        """Find out which modules may run in tiles, in a run of its own, so that the call's time does not contain it."""
        self._trial(slot, call, leaves, graph=False)
        self._restore(call.layer)

    def _trial(
        self, slot: Slot, call: Call, leaves: list[Any], *, graph: bool, as_written: Counter | None = None
    ) -> LayerExecution:
        """Run the layer once more to find something out, on copies of ``leaves``; then call `_restore`."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the layer may write to them
        return self._run(slot, dataclasses.replace(call, graph=graph), copies, "", as_written=as_written)

    def _restore(self, layer: HostLayer) -> None:
        """Restore the replica and its buffers to their state before a run whose effects must not last."""
        replica, buffers = self._worker.copy_of(layer)
        replica.drop_written()
        buffers.discard(thorough=True)
        buffers.load()

    def _borrowing(self, layer: HostLayer, lender: Lender | None) -> contextlib.AbstractContextManager[Any]:
        """Return the mode that lends stand-ins for parameters of other modules.

        Not needed for compiled layers, and for those that were seen to use none and to leave ``.data`` alone.
        """
        if lender is None or self._forwards.compiled or (layer.borrows == [] and not layer.reads_data):
            return _NOTHING
        own = self._worker.replica(layer).parameters
        return Borrowing(self._masters, lender, self._device.torch_device, layer.borrows or [], own)

    def _observed(self, layer: HostLayer, *, again: bool) -> contextlib.AbstractContextManager[None]:
        """Watch the forward hooks inside the layer. If it runs ``again``, leave out those that only observe.

        Compiled code contains its hooks, so there is nothing to leave out.
        """
        if self._forwards.compiled:
            return _NOTHING
        return layer.observers.watched(self._worker.replica(layer).modules, again=again)

    def _recording(self, call: Call, leaves: list[Any]) -> DiscreteOpRecorder | None:
        """Return a recorder of discrete choices if the layer may make any that are repeated, or that are compared."""
        may = call.layer.asks or (call.recomputed and call.layer.may_choose(call.state, relearn=call.measure))
        return DiscreteOpRecorder(self._device.torch_device, _tensors(leaves)) if may else None

    def _refuse_written(self, layer: HostLayer, positions: Collection[int]) -> None:
        """Raise if the layer changed its own parameters, as a write to the replica is lost.

        A write that leaves the same values is allowed: registering and removing a parametrization does that (PEFT does
        it around fused experts). Comparing takes a download, so it is done after the first write, the second, the
        fourth and so on.
        """
        parameters = self._worker.replica(layer).parameters
        for i in positions:
            writes = layer.rewritten[i] = layer.rewritten.get(i, 0) + 1
            if writes & (writes - 1):
                continue
            master = layer.masters[i]
            if not torch.equal(parameters[i].detach().to(master.device), layer.read(master)):
                raise RoundPipeError(
                    f"layer {layer.name!r} writes to its own parameters while it runs; on a worker that is lost. Write "
                    "to them between steps (in a hook of the LightningModule), or keep what changes in a buffer."
                )

    def _refuse_registered(self, layer: HostLayer) -> None:
        """Raise if the layer registered or removed parameters or modules, which is lost with the replica.

        A parameter that is not trained may be replaced by an equal one, as PEFT does where it unpacks base weights.
        Of one that is trained, the optimizer would go on with the old one.
        """
        replica = self._worker.replica(layer)
        for module, name, before, now in replica.changed_registrations():
            if isinstance(before, Tensor) and isinstance(now, Tensor):
                master = layer.masters[next(i for i, p in enumerate(replica.parameters) if p is before)]
                trains = master.requires_grad or now.requires_grad
                if not trains and torch.equal(now.detach().to(master.device), layer.read(master)):
                    continue
            what = "parameter" if isinstance(before, Tensor) or isinstance(now, Tensor) else "module"
            raise RoundPipeError(
                f"layer {layer.name!r} registers, replaces or removes the {what} {name!r} of its {module} while it "
                "runs; on a worker that is lost. Do it between steps (in a hook of the LightningModule), or keep what "
                "changes in a buffer, which a layer may register."
            )

    def _seeded(self, call: Call, kind: str) -> contextlib.AbstractContextManager[None]:
        if call.seed is None:
            return _NOTHING
        randomness, layer = self._randomness(), call.layer
        return randomness.segment(layer.index, call.seed, self._device, layer.title, backward=kind == "recompute")

    def _count_as_written(self, slot: Slot, call: Call, leaves: list[Any]) -> None:
        """Count a compiled layer's operations for a static plan, by running the code as it is written once more.

        The counter does not see operations inside compiled code, and what these are depends on the compiler.
        """
        forward, backward = self._counter(), self._counter()
        if forward is None or backward is None:
            return
        ran = self._trial(slot, call, leaves, graph=True, as_written=forward)
        parameters = self._worker.replica(call.layer).parameters
        roots = [t for t in ran.tensors() if t.requires_grad]
        ends = [t for t in (*ran.given.values(), *parameters) if t.requires_grad]
        if roots and ends:
            with backward, self._device.acquire_core():
                torch.autograd.grad(roots, ends, [torch.zeros_like(t) for t in roots], allow_unused=True)
        for kind, counter in (("forward", forward), ("backward", backward)):
            slot.recorder.count(kind, call.microbatch, call.index, counter.work.seconds)
        self._restore(call.layer)

    def _watching(self, layer: HostLayer) -> contextlib.AbstractContextManager[Any]:
        """Return a mode that records each use of the layer's weights, if the first batch asks for it."""
        if not self._watched():
            return _NOTHING
        return CastWatcher(layer.uses, self._worker.replica(layer).parameters)

    def _safe(self, leaves: list[Any]) -> list[Any]:
        """Clone outputs that lie in an arena, such as a returned weight: the next slot would overwrite them."""
        return [leaf.clone() if isinstance(leaf, Tensor) and self._worker.owns(leaf) else leaf for leaf in leaves]

    def _mutated(self, call: Call, given: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the inputs that the layer wrote to, by position."""
        found = {i: t for i, t in given.items() if is_written(t, inference=call.thread_state.inference)}
        if call.may_mutate is not None and not call.evaluates and (new := set(found) - call.may_mutate):
            raise RoundPipeError(
                f"layer {call.layer.name!r} wrote to its argument {min(new)} in place, which it did not do in the "
                "first batch; what is recomputed from may be damaged. Make the layer work out of place."
            )
        return found

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self,
        slot: Slot,
        recorded: RecordedCall,
        activations: ActivationStore,
        factor: float,
        lender: Lender,
        measured: TracedCall | None = None,
    ) -> list[Tensor | None]:
        """Recompute a call, unless its graph exists already, and run its backward.

        Args:
            slot: the slot whose turn it is.
            recorded: the call, with its output gradients.
            activations: uploads saved inputs and gradients.
            factor: factor by which the parameters' gradients are multiplied before they are added to the sums.
            lender: the microbatch, which lends stand-ins for parameters of other modules.
            measured: traced call to which measured memory is written; None measures nothing.

        Returns:
            The gradient of each tensor argument, on this worker's device; None where there is none.

        Raises:
            Exception: what an earlier recomputation ahead of this call raised.
        """
        worker = self._worker
        recorded.raise_failed()
        kept = recorded.graph or recorded.recomputed
        meter, parts = None, None
        if measured is not None and not kept:
            # Before the recomputation, during which they are there when they are brought ahead.
            parts = self._bring_grads(slot, recorded, activations)
            meter = PeakMemoryMeter(self._device, [part for found in parts for part in found])
        detached_inputs, outputs = kept or self._recompute(slot, recorded, activations, lender)
        recorded.graph = recorded.recomputed = kept = None
        parts = self._bring_grads(slot, recorded, activations) if parts is None else parts
        grads = [functools.reduce(torch.add, found) if found else None for found in parts]
        recorded.grads = []
        given = self._device.track(_tensors([*(part for found in parts for part in found), *grads]), GRADIENTS)
        pairs = [(_root(o), g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        recorded.found = tuple(o.requires_grad for o in outputs)
        # From here on the graph alone keeps what it needs of the outputs. Their memory may be used again at once: it
        # was allocated for the compute stream, on which all that follows runs.
        del outputs
        sums = worker.gradients_of(recorded.call)
        replica, buffers = worker.copy_of(recorded.layer)
        parameters = replica.parameters
        replica.train(recorded.trainable)  # a later call may have run with other parameters frozen
        adding = end = None
        if self._tiles is not None:
            replica.apply(recorded.state)  # tiles run the layer's code
            adding = self._tiles.of(recorded.layer, replica).adding
        if sums is not None:
            sums.attach(parameters, factor)
        if pairs:
            name, counter = recorded.layer.name, None if self._forwards.compiled else self._counter()
            inside = Inside(name, lender.passed_by)
            computing = Computing(
                worker, slot, "backward", recorded.call, recorded.layer, recorded.microbatch, inside, counter
            )
            held = buffers.written() if buffers else {}
            with given, alone(name, self._device), computing, detached_inputs:
                self._differentiate(recorded, lender, adding, *zip(*pairs, strict=True))
                detached_inputs.saved = None
                self._device.track_until_freed(_tensors(detached_inputs.grads), GRADIENTS)
            end = computing.end
            if buffers:
                buffers.refuse_written(held)
        if meter is not None and measured is not None:
            measured.activation_bytes = max(measured.activation_bytes, meter.read())
            measured.returning_bytes = storage_bytes(_tensors(grads))
        if sums is not None:
            sums.detach(parameters, factor)
        worker.keep_until_computed(parts, grads, detached_inputs.grads, end=end)
        return detached_inputs.grads

    def repeated_backward(
        self, slot: Slot, recorded: RecordedCall, activations: ActivationStore, lender: Lender
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Recompute a repeated call and run its backward. Arguments as for `backward`.

        Returns:
            The gradient of each tensor argument, and those of the layer's parameters by position, on this worker.
        """
        grads = self.backward(slot, recorded, activations, 1.0, lender)
        parameters = self._worker.replica(recorded.layer).parameters
        found = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        for parameter in parameters:
            parameter.grad = None
        return grads, found

    def _bring_grads(self, slot: Slot, recorded: RecordedCall, activations: ActivationStore) -> list[list[Tensor]]:
        """Return the parts of each output gradient, on this worker."""
        elsewhere = any(home is not self._device for found in recorded.grads for _, home in found)
        could = self._device.compute.record(timed=True) if elsewhere else None
        parts = [[activations.transfer(part, home, self._device) for part, home in found] for found in recorded.grads]
        if could is not None:
            slot.recorder.waited(self._worker.index, could, self._device.compute.record(timed=True))
        return parts

    def _differentiate(
        self,
        recorded: RecordedCall,
        lender: Lender,
        adding: contextlib.AbstractContextManager[Any] | None,
        roots: tuple[_Root, ...],
        grads: tuple[Tensor, ...],
    ) -> None:
        """Run the backward of a call's graph from ``roots``, tiles in the context ``adding``."""
        if recorded.is_plain and not recorded.hooks and adding is None:
            # Autograd itself has made these gradients, so they need none of the checks of `torch.autograd.backward`.
            _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
            return
        retain = bool(recorded.layer.reaches_out)  # other calls may reach the same stand-in's graph
        watching, borrowing = self._watching(recorded.layer), self._borrowing(recorded.layer, lender)
        with watching, borrowing, _NOTHING if adding is None else adding:
            torch.autograd.backward(roots, grads, retain_graph=retain)  # type: ignore[arg-type]  # roots of both kinds

    def recompute_ahead(self, slot: Slot, recorded: RecordedCall, activations: ActivationStore, lender: Lender) -> None:
        """Recompute a call whose gradient has not arrived yet, and keep the graph; see the module `recompute_ahead`."""
        recomputed = self._recompute(slot, recorded, activations, lender, ahead=True)
        if not recorded.done or recorded.wants_backward():  # else the microbatch has found that no gradient reaches it
            recorded.recomputed = recomputed

    def _recompute(
        self, slot: Slot, recorded: RecordedCall, activations: ActivationStore, lender: Lender, *, ahead: bool = False
    ) -> tuple[DetachedInputs, list[Tensor]]:
        worker, device = self._worker, self._device
        bring = activations.ahead_on if ahead else activations.on
        leaves = self._leaves(slot, recorded.layer, recorded.leaves, bring, ahead=ahead)
        if recorded.is_plain:
            return self._recompute_plain(slot, recorded, leaves)
        replica, buffers = worker.copy_of(recorded.layer)
        buffers.load(recorded.buffers)
        chosen = recorded.choices if recorded.layer.chooses else None
        there = functools.partial(bring, device)
        replay = DiscreteOpReplayer(device.torch_device, _tensors(leaves), chosen, there) if chosen else None
        call = Call(
            recorded.call, recorded.layer, recorded.microbatch, recorded.spec, leaves, recorded.requires_grad,
            recorded.trainable, recorded.thread_state, recorded.state, recorded.seed, recorded.context, graph=True,
            lender=lender,
        )  # fmt: skip
        with device.track(_tensors(leaves), INPUTS):

            def place() -> FaultPlace:
                return FaultPlace(recorded.layer.title, "recomputation", recorded.microbatch, slot, device)

            tiles = self._tiles
            watch = ValueWatch() if tiles is not None and tiles.unwatched(recorded.layer, recorded.state) else None
            valueless = tiles is not None and watch is None
            with noted(place), replica.unregistered_tensors.unmoved(recorded.layer.name):
                inputs = private(leaves, recorded.mutates)
                ran = self._run(slot, call, inputs, "recompute", replay, watch=watch, valueless=valueless)
                if replay is not None and not replay.ended():
                    recorded.layer.chooses = None
                    replica.drop_written()
                    buffers.discard()
                    buffers.load(recorded.buffers)
                    ran = self._run(slot, call, private(leaves, recorded.mutates), "recompute")
        if watch is not None and tiles is not None:
            watch.finish([*ran.tensors(), *(t for t in ran.given.values() if t.grad_fn is not None)])
            tiles.watched(recorded.layer, recorded.state, watch)
        buffers.discard()
        assert ran.detached_inputs is not None
        if replay is not None and replay.agrees:
            ran.detached_inputs.within = replay
        refuse_new_gradients(ran.side_outputs, recorded.side_outputs, recorded.layer.name)
        outputs = ran.output.tensors() + [ran.given[i] for i in sorted(recorded.mutates)]
        for key, count in recorded.side_outputs.items():
            outputs += again(ran.side_outputs, key, count, recorded.layer.name)
        recorded.check_kinds(outputs)
        device.track_until_freed(outputs, OUTPUTS)
        worker.keep_until_computed(leaves)
        return ran.detached_inputs, outputs

    def _recompute_plain(
        self, slot: Slot, recorded: RecordedCall, leaves: list[Any]
    ) -> tuple[DetachedInputs, list[Tensor]]:
        device, layer = self._device, recorded.layer
        with device.track(_tensors(leaves), INPUTS):
            with noted(lambda: FaultPlace(layer.title, "recomputation", recorded.microbatch, slot, device)):
                replica = self._worker.replica(layer)
                ran = self._plain.run(slot, recorded, recorded.call, replica, leaves, "recompute", graph=True)
            if ran.surprises:
                self._refuse_surprises(layer, leaves, ran)
                refuse_new_gradients(ran.side_outputs, recorded.side_outputs, layer.name)
            outputs = ran.output.tensors()
        recorded.check_kinds(outputs)
        assert ran.detached_inputs is not None
        device.track_until_freed(outputs, OUTPUTS)
        self._worker.keep_until_computed(leaves, end=None if ran.surprises else ran.end)
        return ran.detached_inputs, outputs


def _root(output: Tensor) -> _Root:
    """Return where the backward of ``output`` begins, which does not keep the memory of ``output``.

    That of a sparse or nested tensor, or of a subclass, is the tensor itself: an edge is made by an operation that may
    not be known to these.
    """
    plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided and not output.is_nested
    return get_gradient_edge(output) if plain else output


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
