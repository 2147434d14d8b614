"""The layer calls of one microbatch: their forwards as user code makes them, and their backwards from the tape.

a layer is called ── its arguments are taken apart, and saved ── the turn of its slot ── its forward there ── [1]
user code goes on ── with the outputs, and what the layer has written ── [2]
the tape, deepest call first ── the turn of its slot ── recomputation and backward there ── [3]
gradients go on to the calls and the user code in front ── [4]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.alike import copy_alike
from lightning_roundpipe.engine.caller_modes import without_caller_modes
from lightning_roundpipe.engine.executor import CallEnvironment, CallInputs, Executor, LayerCall, Outcome
from lightning_roundpipe.engine.output_collectors import hand_over
from lightning_roundpipe.engine.shared_memory import SharedOutputs
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.trace import Trace, TracedCall
from lightning_roundpipe.engine.user_sections import UserSections, WeightGuard
from lightning_roundpipe.estimates.crossing import storage_bytes
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.memory.peak_memory import GRADIENTS
from lightning_roundpipe.user_code.graph_cut import Part, run_backward


class LayerCalls:
    """The calls that user code makes.

    Attributes:
        tape: the calls whose backward is still to come, in order.
        trace: the calls so far.
        uses: how often each layer has been called, by its number.
        shared: outputs that share memory.
    """

    def __init__(self, sections: UserSections, weights: WeightGuard) -> None:
        self.context, self.spec, self.turns = sections.context, sections.spec, sections.turns
        self.sections, self.weights, self.tape = sections, weights, weights.tape
        self.trace, self.shared = Trace(), SharedOutputs()
        self.uses: defaultdict[int, int] = defaultdict(int)

    def check(self, layer: HostLayer) -> None:
        """Refuse a call that would not see what user code has done."""
        assert self.sections.surroundings is not None
        self.sections.surroundings.refuse(layer.name)
        self.weights.check(layer)
        self.shared.assert_unmodified()

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call on a worker, between two sections of user code."""
        sections, turns = self.sections, self.turns
        if layer.seen.sets_attributes and (slot := turns.next_slot_of(layer)) is not None:
            sections.exit()
            self._begin_in(slot)
            turns.acquire(slot)  # within its turn, it finds what the call of the microbatch before has set
            sections.enter(sections.number)
        call = self.capture(layer, args, kwargs, self.uses[layer.index])
        traced = self._find(call)
        tensors = call.inputs.arguments.tensors
        unchanged = self.unchanged_outputs(call, reversed(self.tape)) if sections.memory is not None else ()
        sections.exit()
        if turns.predecessor_progress is not None:  # where it leaves layers out that the other one calls
            turns.wait_for(turns.predecessor_progress, turns.next)
        outcome = self.forward(call, taped=traced.taped)
        assert turns.device is not None
        traced.taped, traced.worker = bool(call.output_kinds), turns.device.index
        self.trace.calls.append(traced)
        layer.seen.sets_attributes |= outcome.sets_attributes
        if layer.buffers.mutable:
            turns.publish_progress()
        if sections.memory is not None:
            sections.memory.called(traced, tensors, outcome.result, unchanged)
        sections.enter()
        result = self.deliver(call, outcome, tensors)
        sections.measure()  # when the call's inputs are gone
        if call.output_kinds and call.environment.thread_state.grad:
            self.tape.append(call)
        elif call.slot is not None:
            call.slot.report_closed()
        return result

    def capture(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any], use: int) -> LayerCall:
        """Take a call's arguments apart, within user code."""
        context, spec, turns = self.context, self.spec, self.turns
        state, contents, attributes = context.user.attributes.of(layer)
        thread_state = context.user.thread_state()
        seed = spec.seed_of(turns.microbatch, layer.index, use)
        if state is not None and state.with_tensors:
            attributes = {**state.with_tensors, **attributes}
        own, grad = self.weights.mode.stand_in, thread_state.grad
        inputs = CallInputs.of(args, kwargs, attributes, own, turns.home_of, grad=grad)
        trained = layer.weights.trainable()
        environment = CallEnvironment(seed, state, contents, thread_state, self.weights, trained)
        return LayerCall(layer, -1, turns.microbatch, environment, inputs, turns.device)

    def _find(self, call: LayerCall) -> TracedCall:
        """Find a call in the plan's trace, and set its index."""
        layer, turns, planned = call.layer, self.turns, self.turns.slots.trace
        self.uses[layer.index] += 1
        traced = call.as_traced()
        if self.sections.memory is not None:
            call.traced = traced
        found = planned.find(layer, turns.next, taped=traced.taped) if planned is not None else None
        if found is not None:
            turns.next = found + 1
            call.planned = True
            if not layer.buffers.mutable:  # else behind the call, whose buffers the other one finds
                turns.publish_progress()
        behind = len(self.trace.calls) + (len(planned.calls) if planned is not None else 0)
        call.index = found if found is not None else behind
        return traced

    def forward(self, call: LayerCall, *, taped: bool) -> Outcome:
        """Run a call in its turn [1]. Returns what user code gets."""
        turns, tensors = self.turns, call.inputs.arguments.tensors
        activations, homes = turns.activations, list(map(turns.home_of, tensors))
        slot = turns.slot_of(call, "forward")
        device, keeps = self.context.pool.workers[slot.worker].device, slot.phase == "fused"
        coming = {i: activations.save(tensors[i], home) for i, home in enumerate(homes) if home is not device}
        if taped and slot.position is None and turns.round and call.reconnect is None:
            call.slot = turns.for_backward(call, slot.worker)
        self._begin_in(slot)
        with turns.take(call, slot, self.sections.phase, [*coming.values()], lent=not keeps) as executor:
            self.sections.begun.set()  # only now: one microbatch at most waits in front of the first slot
            worker, bring = executor.worker, activations.on
            worker.wait_for_copies()
            plan = self.spec.plan if taped and slot.position is not None else None
            carries = plan.carry_least if plan is not None and call.index in plan.carry else None
            if carries is not None:
                worker.in_flight.wait_for_products()
            if taped and not keeps:
                call.inputs.recomputed = recomputed = self._recomputed_inputs(call, slot)
                call.inputs.saved = [
                    coming.get(i) or activations.save(t, device) for i, t in enumerate(tensors) if i not in recomputed
                ]
                ends = [saved.ready for saved in call.inputs.saved if saved.ready is not None]
                worker.in_flight.copying = ends
            inputs = [bring(coming.get(i, tensor), device, lent=not keeps) for i, tensor in enumerate(tensors)]
            with without_caller_modes():
                outcome = executor.forward(call, slot, inputs, keep_graph=keeps, carries=carries)
            if self.weights.note_call(call):
                worker.wait_for_upload(slot, call.layer)
            if call.output_kinds and not (taped or keeps):  # it computes with a parameter of another module
                call.inputs.saved = list(map(activations.save, tensors, homes))
            if call.reconnect is None:
                turns.device = device
        return outcome

    def _begin_in(self, slot: Slot) -> None:
        """Let the next microbatch begin if this one goes past the first slot, where that one goes before it."""
        if slot.position:
            self.sections.begun.set()

    def _recomputed_inputs(self, call: LayerCall, slot: Slot) -> Mapping[int, tuple[LayerCall, int]]:
        """Return the inputs that the recomputation of earlier calls gives; see `CallInputs`."""
        if not self.spec.recomputes_ahead or slot.position is None:
            return {}
        backward = self.turns.slots.planned(call.index, "backward", self.turns.round)
        added_to = backward.gradients.sums if backward is not None else {}
        if call.index not in added_to:  # the plan may have no place for it by then
            return {}
        return self.unchanged_outputs(call, itertools.takewhile(lambda c: c.index in added_to, reversed(self.tape)))

    @staticmethod
    def unchanged_outputs(call: LayerCall, before: Iterable[LayerCall]) -> dict[int, tuple[LayerCall, int]]:
        """Return by position the inputs of ``call`` that are outputs of calls ``before`` it, not changed since."""
        edges, found = iter(call.inputs.edges), dict[int, tuple[LayerCall, int]]()
        inputs = zip(call.inputs.arguments.tensors, call.inputs.needs, strict=True)
        ends = [(i, t, edge) for i, (t, needs) in enumerate(inputs) if needs and (edge := next(edges)).edge is None]
        for other in before if ends else ():
            for i, tensor, edge in ends:
                if other.gradients is edge.node.gradients and other.gradients.versions[edge.output] == tensor._version:
                    found[i] = other, edge.output
        return found

    def deliver(self, call: LayerCall, outcome: Outcome, tensors: Sequence[Tensor]) -> Any:
        """Return a call's output to user code, with all else that the layer has done [2]."""
        self.sections.last = f"after layer {call.layer.name!r}"
        outcome.deliver(call.layer, tensors)
        self.shared.add(outcome.shared, call.layer.name)
        self.turns.activations.drop(self.turns.device)
        call.inputs.arguments.forget_originals()
        return hand_over(outcome.result)


class Tape(LayerCalls):
    """Adds the backwards of the calls: it walks the list `tape` from its end."""

    def close(self) -> None:
        """Forget all calls. A gradient that reaches one of them later is an error."""
        for call in self.tape:
            call.gradients.close()
        self.tape.clear()

    def expect_gradients(self) -> None:
        """Let the calls take gradients: a backward begins."""
        for call in self.tape:
            call.gradients.expected = True

    def walk(self) -> None:
        """Run the backward of every call, deepest first."""
        while self.tape:
            call = self.tape.pop()
            if call.gradients:
                self.backward(call)
            elif call.slot is not None:
                call.slot.report_closed()
            call.gradients.close()
            call.graph = call.slot = None

    def backward(self, call: LayerCall) -> None:
        """Run the backward of a call that gradients have reached, and hand those of its inputs on."""
        self._run_hooks(call)
        gradients, device = self.through(call)
        self._hand_on(call, gradients, device)

    def _run_hooks(self, call: LayerCall) -> None:
        """Run the user's hooks on outputs of a call, whose gradients are complete."""
        gradients, module = call.gradients, call.layer.module
        if gradients.arrivals > 1 and (module._backward_hooks or module._backward_pre_hooks):
            raise RoundPipeError(
                f"layer {call.layer.name!r} has backward hooks, which would be called with parts of its gradient, "
                "because what it returns goes to several layers. Put them on a module inside it."
            )
        home = gradients.home
        for index, hooks in gradients.hooks.items():
            if home is None or not hooks or not gradients.parts[index]:
                continue
            parts = [self.moved(part.tensor, part.home or home, home) for part in gradients.parts[index]]
            with self._user_code(home, f"after layer {call.layer.name!r}"):
                total = functools.reduce(torch.add, parts)
                for hook in list(hooks.values()):
                    changed = hook(total)
                    total = total if changed is None else changed
            home.track_until_freed([total], GRADIENTS)
            gradients.parts[index] = (Part(total, home, None),)

    def through(self, call: LayerCall) -> tuple[list[Tensor | None], Device]:
        """Run a call's backward in its turn [3]. Returns the gradients of its inputs, and the device they are on."""
        turns, activations = self.turns, self.turns.activations
        slot = turns.slot_of(call, "backward")
        planned, device = slot.position is not None, self.context.pool.workers[slot.worker].device
        self._refuse_unplaced(call, slot.gradients.sums.get(call.index))
        parts = self._gradients_of(call, device)
        saved = call.inputs.brought if call.graph is None else []
        sent = [part for of_output in parts for part in of_output if isinstance(part, HostTensor)]
        with turns.take(call, slot, "backward", [*saved, *sent]) as executor:
            worker, bring = executor.worker, activations.on
            if saved and call.inputs.carried.block:
                worker.in_flight.wait_for_products()
            inputs = [bring(each, device) for each in saved]
            arriving = [[bring(part, device) for part in of_output] for of_output in parts]
            del parts
            if planned and self.spec.recomputes_ahead:
                self._recompute_ahead(call, executor, slot)
            following = self._following(slot)
            activations.bring_ahead(following, device, worker.room)
            gradients = executor.backward(call, slot, inputs, arriving, self.weights.mode.proxies.factor)
            del inputs, arriving
            activations.drop(device, following)
            if planned and turns.microbatch == slot.microbatches[-1] and call.index in slot.gradients.on_worker:
                worker.sender.send(slot, [call.index])
            turns.device = device
        return gradients, device

    def _refuse_unplaced(self, call: LayerCall, sums: HostGradSums | None) -> None:
        """Raise if a parameter is trained at the call for whose gradient there is no memory."""
        now = call.environment.trained
        placed = sums.layout.trained if sums is not None else (False,) * len(now)
        if now == placed:
            return
        for master, trained, place in zip(call.layer.masters, now, placed, strict=True):
            if trained and not place and master.numel():
                raise RoundPipeError(
                    f"training_step switches on requires_grad of parameter {self.context.model.name_of(master)!r}, in "
                    f"layer {call.layer.name!r}, for which the step has reserved no gradient: it was off before. "
                    "Switch on between steps, for example in on_train_batch_start, all that the window's batches "
                    "train; training_step may switch it off."
                )

    def moved(self, tensor: Tensor, device: Device, to: Device | None) -> Tensor:
        """Return a tensor on another device, whose compute stream waits for it, or on the host, which does."""
        turns, pool = self.turns, self.context.pool
        if to is None:
            if pool.accelerator is None:
                return tensor
            sent = turns.activations.send(tensor, device, None)
            assert isinstance(sent, HostTensor) and sent.ready is not None
            pool.baton.wait_for_event(sent.ready)
            return copy_alike(sent.tensor)
        moved, event = turns.activations.move(tensor, device, to)
        if event is not None:
            pool.workers[to.index].follow(event)
        return moved

    def _recompute_ahead(self, call: LayerCall, executor: Executor, slot: Slot) -> None:
        """Recompute all calls of a stage before the first one's gradients are used, which a GPU may still wait for.

        They run in the order of their forward, as one may give inputs of the next ones.
        """
        before = [*itertools.takewhile(lambda other: other.index in slot.call_indices, reversed(self.tape))]
        for other in (*reversed(before), call):
            if other.graph is None:
                inputs = [self.turns.activations.on(each, executor.device) for each in other.inputs.brought]
                executor.recompute(other, slot, inputs)

    def _gradients_of(self, call: LayerCall, device: Device) -> list[list[HostTensor | Tensor]]:
        """Take the gradients of a call's outputs. Those that are not on ``device`` begin to go to the host."""
        home = call.gradients.home or device
        parts, send = call.gradients.parts, self.turns.activations.send
        if self.sections.memory is not None:
            self.sections.memory.before_backward(call, self.tape)
        call.gradients.close()
        return [[send(p.tensor, p.home or home, device, p.ready) for p in of_output] for of_output in parts]

    def _following(self, slot: Slot) -> list[HostTensor]:
        """Return what the next call on the tape is recomputed from, or all that are recomputed ahead, in ``slot``."""
        calls = reversed(self.tape) if self.spec.recomputes_ahead else self.tape[-1:]
        mine = itertools.takewhile(lambda call: call.index in slot.call_indices and slot.phase == "backward", calls)
        return [saved for call in mine for saved in call.inputs.brought]

    def _hand_on(self, call: LayerCall, gradients: Sequence[Tensor | None], device: Device) -> None:
        """Hand the gradients of a call's inputs to the calls in front, and through user code in between [4]."""
        roots, values = [], []
        for edge, gradient in zip(call.inputs.edges, gradients, strict=True):
            if gradient is None or edge.hand_over(gradient, device):
                continue
            roots.append(edge.edge)
            values.append(self.moved(gradient, device, edge.home))
        if not roots:
            return
        home, memory = call.home or self.context.pool.devices[0], self.sections.memory
        with self._user_code(home, f"before layer {call.layer.name!r}"):
            meter = memory.meter(home) if memory is not None else None
            run_backward(roots, values, retain_graph=True)
            if meter is not None and call.traced is not None:
                peak = storage_bytes(values) + meter.read()
                call.traced.memory.activation_bytes = max(call.traced.memory.activation_bytes, peak)
                call.traced.memory.handing_bytes = peak

    @contextlib.contextmanager
    def _user_code(self, home: Device, where: str) -> Iterator[None]:
        """Enter a section of user code on ``home``, within backward."""
        turns, sections = self.turns, self.sections
        sections.last = where
        before, turns.device = turns.device, home
        with self.spec.thread_state.entered(), sections.noted():
            sections.enter()
            try:
                with sections.saved, self.weights.mode, torch.autograd.set_multithreading_enabled(False):
                    yield
            finally:
                sections.exit()
        turns.device = before
