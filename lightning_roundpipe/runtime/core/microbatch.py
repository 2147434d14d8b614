"""One microbatch's way through a step: the user's ``training_step`` on its own thread, its tape, and its backward.

    start ── wait until the microbatch before has reached its first layer ── [1]
    user code ── under the user-code lock, with this microbatch's random state ── [2]
    layer call ── release the lock ─► turn ─► worker ─► take the lock again ── [3]
    a call that the plan does not have ── `off_plan`
    loss ── weight it, run backward through the last user code in the fused slot's turn, publish the output ── [4]
    tape ── deepest call first: turn ─► worker ─► gradients go to the calls and the user code in front ── [5]

The thread never waits for a turn while it holds the user-code lock. Slots and microbatches are totally ordered, so
waits cannot form a cycle.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.outputs import detached, loss_of
from lightning_roundpipe.batches.weights import LossWeights, TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.crossing import storage_bytes
from lightning_roundpipe.runtime.core.activation_prefetch import ActivationPrefetcher
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.core.off_plan import OffPlan, give_up_graph, why_not_recomputed
from lightning_roundpipe.runtime.core.outputs import check_inputs, hand_back, learn, refuse_hooked_module
from lightning_roundpipe.runtime.core.prediction import NextCallPredictor
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.repeated_calls import MadeCall, RepeatedCalls
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.seeds import filled_like, seed_of
from lightning_roundpipe.runtime.core.trace import Kind, Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slot, Slots
from lightning_roundpipe.runtime.core.user_memory import UserCodeMemory
from lightning_roundpipe.runtime.faults.notes import FaultPlace, add_off_plan_note, noted
from lightning_roundpipe.runtime.layer_calls.arguments import flatten_call, is_cache, refuse_caches
from lightning_roundpipe.runtime.layer_calls.shared_memory import SharedOutputs
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.threads.caller_modes import without_caller_modes
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Accumulators
from lightning_roundpipe.runtime.user_code.graph_cuts import GraphCut, driven_backward, witness
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.module_state import SegmentKey
from lightning_roundpipe.runtime.user_code.rng import Seed


class TaskStep(Protocol):
    """The interface of a step that its microbatches use.

    Attributes:
        weights: how much each microbatch counts.
        off_plan: the microbatches that have left the plan; None if none may.
    """

    weights: LossWeights
    off_plan: OffPlan | None

    @property
    def spec(self) -> StepSpec: ...

    def sums_of(self, call: TracedCall) -> HostGradSums | None:
        """Return the host sums of a call's gradients; None if nothing in its layer is trained."""

    def is_fused(self, call: int) -> bool:
        """Return whether the call is in the fused stage."""

    def sent(self, slot: Slot, call: int) -> None:
        """Note that the gradients of ``call`` are on their way to the host before ``slot`` is closed."""


class MicrobatchTask:
    """A microbatch of one step: runs ``training_step``, and the backward of its loss, on its own thread.

    It is the context that intercepted layers call into, and the lender of stand-ins for parameters. The class is large
    because it follows one thread from the first line of user code to the last gradient. The subjects on the way have
    classes of their own (sections of user code, prefetch, prediction, outputs); their order, and the state between
    them, is here.

    Args:
        engine: the parts of the engine that outlive the step.
        step: the step that the microbatch belongs to.
        index: number of the microbatch.
        trace: the calls that it is expected to make; None records them (``learning``).
        slots: the slots that its calls run in.
        recent: while learning, the calls that it will probably make. Other calls are just as valid.
    """

    def __init__(
        self, engine: EngineContext, step: TaskStep, index: int, trace: Trace | None, slots: Slots,
        recent: Trace | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.learning, self._left_plan_at = trace is None, ""
        self.segments = UserCodeSections(engine, step.spec, index, learning=self.learning)
        self.kept = self.segments.kept
        self._step, self.engine, self._cancel_scope = step, engine, step.spec.cancel_scope
        self.activations = ActivationStore(index, step.spec.recorder, engine.worker_pool.staging)
        self.mode = UserCodeMode(
            engine.model.bucket_of, self.segments.read_master, engine.model.formats, train=True,
            accelerator=engine.worker_pool.accelerator, devices=engine.worker_pool.devices,
            aside=self.segments.paused, buffers=engine.model.buffers, offloaded=self.activations.offloaded,
            restore=self.activations.restore, targets=TargetCounts() if step.weights.counts_targets else None,
        )  # fmt: skip
        self.logs = LogRecorder(engine.worker_pool.devices)
        self.started = Waiter()
        self.passed = Waiter()
        """Woken when ``output`` is set and only the tape is left; the output is computed once ``computed`` is done."""
        self.computed: Event | None = None
        self.output: Any = None
        self.loss: Tensor | None = None
        """The value of its loss, detached."""
        self.error: Exception | None = None
        """What ``training_step`` has raised, unless this is the first microbatch."""
        self.weight, self.differentiable = 0.0, False
        self.trace = trace or Trace()
        self._predictor = NextCallPredictor(slots, step.sums_of, recent)
        self._slots = slots
        self._prefetcher = ActivationPrefetcher(
            index, engine.worker_pool.workers, slots, self.activations, offloads=engine.learned.offloads
        )
        self.repeated = RepeatedCalls(engine, step.spec, index, self.segments, self.activations)
        self.tape: list[RecordedCall] = []
        self.reached = 0
        self._off_trace = self.trace.has_skipped_calls
        """Whether microbatches skip layers, so that the number of a section of user code does not identify it."""
        self._called: list[Kind] = []
        """The kinds of the calls that it has made."""
        self._uses: Counter[int] = Counter()
        self._announced = self.walking = False
        self._segment_key: SegmentKey = (-1, 0)
        self._device: Device | None = None
        self._slot: Slot | None = None
        self._phase, self._last = "forward", "before the first layer"
        self._surroundings: Surroundings | None = None
        self._watched = SharedOutputs()
        self._written: list[nn.Parameter] = []
        """Masters that user code wrote to by way of ``.data``: uploaded copies may be out of date."""
        self._user_memory = UserCodeMemory(engine.worker_pool, self.trace.crossing)
        self.late: list[nn.Parameter] = []
        """Trained parameters that training_step has registered outside the layers since the engine was set up."""
        self._accumulators = Accumulators()
        """Of the late parameters."""

    @property
    def ended_early(self) -> bool:
        """Whether it has not made the last call of the trace that it was expected to make."""
        return not self.learning and self.reached < len(self.trace.calls)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], Any], predecessors: Sequence[MicrobatchTask]) -> None:
        """Run ``function``, the user's ``training_step`` with its arguments, and the backward of its loss.

        Errors do not propagate to the caller: they fail the step, which raises them in the main thread. The
        microbatches before this one return their losses first, as Lightning comes to them before.

        Args:
            function: the user's ``training_step``.
            predecessors: the microbatches before.
        """
        try:
            if predecessors:
                self._cancel_scope.wait(predecessors[-1].started)  # [1]
            with calling(self):
                try:
                    self._train(function)
                finally:
                    self.segments.close()
                    self.activations.move_to(None)
                    self._prefetcher.end()
                    self._accumulators.end()
            self._slots.finish(self.index)
        except BaseException as error:
            if self._left_plan_at:
                add_off_plan_note(error, self._left_plan_at)
            if isinstance(error, Exception) and predecessors and self._phase == "forward":
                self._let_pass(error, predecessors)
            self._cancel_scope.fail(error)  # the main thread raises it
        finally:
            self._announce()
            self.passed.wake()

    def _let_pass(self, error: Exception, predecessors: Sequence[MicrobatchTask]) -> None:
        """After an ``error`` of user code, give up the turns, and wait for the losses of the microbatches before."""
        self._announce()
        try:
            self._slots.finish(self.index)
            for run in predecessors:
                self._cancel_scope.wait(run.passed)
        except BaseException:
            return  # another one has failed
        if all(run.error is None for run in predecessors):
            self.error = error

    def _train(self, function: Callable[[], Any]) -> None:
        with self._step.spec.thread_state.entered(), self.mode:
            self._enter_user_code()
            self._surroundings = Surroundings()
            if not self.index:  # the others begin while the first one is in a layer
                self._measure_user_code()
            with self._noted():
                output = function()
                self._watched.assert_unmodified()
                with torch._C.DisableTorchFunction():
                    self._check_after()
                loss = loss_of(output)
                if loss is not None:
                    self.weight = self._step.weights.of(self, loss, self.mode.targets)
            for recorded in self.tape:
                recorded.held = []  # no further call can leave the plan
            self._announce()
            self._watch_late()
            if loss is not None:
                self._backward_of_loss(loss)
                self._user_memory.end(self.trace.calls)
                self.loss = loss.detach()
            self.output = detached(output)
            del output, loss
            with torch._C.DisableTorchFunction():
                self.activations.restore_all()  # what user code has kept for later, where nothing restores it
            if self.kept is not None:
                self.kept.end()
            self.computed = self._device.compute.record() if self._device is not None else None
            self._leave_user_code()
        self.passed.wake()
        self.activations.end_forward()
        self.walking = True
        self._walk_tape()

    def _noted(self) -> contextlib.AbstractContextManager[None]:
        return noted(self._place)

    def _place(self) -> FaultPlace:
        return FaultPlace(f"the code {self._last}", self._phase, self.index, self._slot, self._device)

    def _measure_user_code(self) -> None:
        if self.learning and self.engine.learned.plans:
            with without_caller_modes():  # it may compute something, which no checkpoint may take for user code
                self._user_memory.begin(self._device)

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self.started.wake()

    # -- user code -----------------------------------------------------------------------------------------------------

    def _enter_user_code(self) -> None:
        slot = self._slot.index if self._slot else -1
        segment_key = None if self.walking else self._segment_key
        self.segments.enter(slot, segment_key, self._device, f"the code {self._last}", off_trace=self._off_trace)

    def _leave_user_code(self) -> None:
        self.segments.leave(None if self.walking else self._segment_key)

    # -- layer calls --------------------------------------------------------------------------------------------------

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call on a worker [3]. User code calls this by way of the intercepted layer.

        Returns:
            The layer's output as user code sees it.
        """
        with torch._C.DisableTorchFunction():
            if self._phase == "backward":
                return self._repeat(layer, args, kwargs)
            self._refuse(layer)
            self._user_memory.end(self.trace.calls)
            call, recorded, traced = self._prepare(layer, args, kwargs)
            self._leave_user_code()
            self._announce()
            self._segment_key = (layer.index, self._uses[layer.index])
            forward, slot = self._run_forward(call, recorded, traced)
            self._slot, self._last = slot, f"after layer {layer.name!r}"
            self._device = self.engine.worker_pool.workers[slot.worker].device
            self.activations.settle()
            self._prefetcher.after(slot, call.index)
            self._enter_user_code()
            if self.engine.model.buffers.replaced:
                self.segments.paused(self.engine.model.buffers.settle)
            if self.learning:
                learn(
                    call, traced, forward, self.trace.crossing, self.activations.number, taped=recorded is not None,
                    made_bytes=self._user_memory.made_bytes,
                )  # fmt: skip
                if call.tentative and layer.reaches_out:
                    traced.can_tape = True
            traced.profile = forward.profile
            if recorded is not None:
                recorded.is_plain = call.profile is not None and forward.profile is not None
            owner = self.activations.number if self.learning or self._prefetcher.offloads else 0
            call.layer.sets_attributes |= any(kind == "attribute" for kind, *_ in forward.side_outputs)
            output, taped = hand_back(call, recorded, traced, forward, args, kwargs, self._watched, owner)
            self._measure_user_code()
            if recorded is not None and taped:
                self.tape.append(recorded)
            assert call.seed is not None
            self.repeated.made.append(MadeCall(layer, call.seed, self._device))
            return output

    def _repeat(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call in a backward of user code; see `repeated_calls`."""
        self._check_weights(layer)
        output, _ = self.repeated.call(self, layer, args, kwargs, self._slot, self._watched)
        return output

    def add_gradient(self, master: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient, on the host, of a parameter that a repeated call has computed with."""
        self.mode.proxies.passed(master, grad)

    def _refuse(self, layer: HostLayer) -> None:
        """Raise for calls whose results or gradients would be wrong."""
        assert self._surroundings is not None
        self._surroundings.refuse(layer.name)
        self._check_weights(layer)
        self._watched.assert_unmodified()

    def _check_weights(self, layer: HostLayer) -> None:
        """Make sure that the worker will compute with the weights that ``layer`` has now.

        A step of one microbatch may write to the weights of a layer that has no call on the tape, as momentum teachers
        do: the new values are uploaded. A write that every microbatch would repeat, or that a recomputation would see,
        is an error.
        """
        if self._step.spec.several or not self.learning:
            self._refuse_own_writes()
            layer.assert_unmodified()
            return
        self._written += self.mode.written_by_data()
        mine = [master for master in layer.masters if any(master is other for other in self._written)]
        if not (mine or layer.is_written()):
            layer.assert_unmodified()
            return
        self._refuse_taped(layer)
        if self.engine.options.staleness or self.engine.model.formats.low is not None:
            torch.autograd.graph.increment_version(mine)
            layer.assert_unmodified()
        if (updates := self._step.spec.updates) is not None:
            self.segments.aside(updates.settle)
        self._slots.finish(self.index)  # drop uploads that were started ahead: they read the old values
        layer.reattach()
        layer.bucket.refresh()
        layer.snapshot()
        self._written = [master for master in self._written if not any(master is other for other in mine)]

    def _refuse_own_writes(self) -> None:
        """Raise if ``training_step`` wrote to weights: it runs once for each microbatch, and so would the write."""
        if written := self.mode.written_by_data():
            raise RoundPipeError(
                f"training_step writes to parameter {self.engine.model.name_of(written[0])!r} by its .data, while "
                "microbatches compute with it. Write to parameters between steps, for example in on_train_batch_end, "
                "or set num_microbatches=1."
            )

    def _refuse_taped(self, layer: HostLayer) -> None:
        """Raise if a call of ``layer`` is on the tape: its recomputation would use other weights than its forward."""
        if any(recorded.layer is layer for recorded in self.tape):
            raise RoundPipeError(
                f"parameters of layer {layer.name!r} were written to within training_step, after a call whose backward "
                "computes it once more. Write to them between steps, for example in on_train_batch_end."
            )

    def _check_after(self) -> None:
        """Check for writes to weights after ``training_step`` has returned."""
        if self._step.spec.several or not self.learning:
            self._refuse_own_writes()
            return
        self._written += self.mode.written_by_data()
        for layer in dict.fromkeys(recorded.layer for recorded in self.tape):
            if layer.is_written() or any(master is other for master in layer.masters for other in self._written):
                self._refuse_taped(layer)

    def _prepare(
        self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, RecordedCall | None, TracedCall]:
        state = layer.state.current()
        leaves, spec = flatten_call(args, kwargs, state.carried if state else {})
        leaves = self.mode.stand_ins(leaves)
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        thread_state = self.engine.thread_state()
        trainable = layer.trainable()
        can_tape = thread_state.grad and (any(requires_grad) or any(trainable) or bool(layer.reaches_out))
        index, traced = self._next(layer, can_tape=can_tape)
        bare = thread_state.grad and not can_tape
        tentative = bare and self.learning and layer.reaches_out is None and not any(map(is_cache, leaves))
        taped = can_tape or tentative if self.learning else can_tape and traced.taped
        if can_tape:
            refuse_caches(leaves, layer.name)
        if self.learning:
            traced.can_tape = can_tape
        call = Call(
            index, layer, self.index, spec, leaves, requires_grad, trainable, thread_state, state,
            self._seed_of(layer), contextvars.copy_context(), list(leaves),
            graph=True, learning=self.learning, may_mutate=None if self.learning else traced.mutates,
            bare=bare, tentative=tentative, lender=self,
        )  # fmt: skip
        return call, self._record_call(call, traced) if taped else None, traced

    def _seed_of(self, layer: HostLayer) -> Seed | None:
        """Return the seed of a call, which follows from the layer and its use, not from its place in the trace.

        The place may change while the trace is learned, and random numbers must not depend on that.
        """
        use = self._uses[layer.index]
        self._uses[layer.index] += 1
        return *self._step.spec.seed, self._step.spec.first + self.index, layer.index, use

    def _next(self, layer: HostLayer, *, can_tape: bool) -> tuple[int, TracedCall]:
        """Return the position of the coming call in the trace, and its entry there.

        Args:
            layer: the layer that is called.
            can_tape: whether gradients may flow through the call.
        """
        if not self.learning:
            found = self.trace.find(layer, self.reached, can_tape=can_tape)
            if found is not None:
                self._off_trace |= found != self.reached
                self.reached = found + 1
                self._called.append((layer.index, can_tape))
                return found, self.trace.calls[found]
            self._leave_plan(layer, can_tape=can_tape)
        self._called.append((layer.index, can_tape))
        traced = self.trace.append(layer)
        index = len(self.trace.calls) - 1
        self._predictor.see(index, layer)
        return index, traced

    def _leave_plan(self, layer: HostLayer, *, can_tape: bool) -> None:
        """Leave the plan at a call of ``layer`` that it does not have, and wait for the turn to go on without it.

        Args:
            layer: the layer.
            can_tape: whether gradients may flow through the call.

        Raises:
            RoundPipeError: if the microbatch cannot go on.
        """
        off_plan, engine = self._step.off_plan, self.engine
        kept = [recorded for recorded in self.tape if recorded.graph is not None]
        why_not = next(((recorded, why) for recorded in kept if (why := why_not_recomputed(recorded))), None)
        if off_plan is None or why_not is not None:
            more = f" Layer {why_not[0].layer.name!r} {why_not[1]}." if why_not else ""
            self._refuse_other_call(layer, more, can_tape=can_tape)
        self._leave_user_code()
        self._announce()
        self.segments.interrupted()
        for recorded in kept:
            give_up_graph(recorded, self.activations)
        self.activations.leave()
        self._prefetcher.end()
        self._slots.finish(self.index)
        before = f"layer {engine.model.layers[self._called[-1][0]].name!r}" if self._called else "no other layer"
        grad = "" if can_tape else " without gradients"
        self._left_plan_at = f"layer {layer.name!r}{grad} after {before}"
        off_plan.wait(self.index, self._called, self._left_plan_at, self._cancel_scope)
        self.learning = self._off_trace = engine.learned.randomness.learning = True
        self.trace, self._slots = self.trace.extended(), off_plan.slots
        self._predictor = NextCallPredictor(self._slots, self._step.sums_of, None)
        self._prefetcher = ActivationPrefetcher(
            self.index, engine.worker_pool.workers, self._slots, self.activations, offloads=self._prefetcher.offloads
        )
        for recorded in self.tape:
            recorded.recomputed = recorded.failed = None  # the weights are gone
        for recorded in kept:
            self._prefetcher.saved(recorded)
        self._enter_user_code()

    def _refuse_other_call(self, layer: HostLayer, more: str, *, can_tape: bool) -> NoReturn:
        """Raise because the plan has no such call; ``more`` says why the microbatch cannot go on without it."""
        if self.trace.find(layer, self.reached, can_tape=not can_tape) is None:
            self.trace.refuse(layer, self.reached, self.index, more)
        raise RoundPipeError(
            f"layer {layer.name!r} is called {'with' if can_tape else 'without'} gradients, unlike in the first "
            f"batches: with several microbatches a step must be of one kind.{more} Set overlap=False."
        )

    def _record_call(self, call: Call, traced: TracedCall) -> RecordedCall:
        """Make the call's entry for the tape, connected to the calls and the user code that its inputs come from."""
        recorded = RecordedCall(
            call.index, call.layer, self.index, call.spec, [], call.requires_grad, call.thread_state, call.state,
            call.seed, call.context, input_home=self._device, mutates=traced.mutates, trainable=call.trainable,
        )  # fmt: skip
        recorded.connect([leaf for leaf in call.leaves if isinstance(leaf, Tensor)])
        return recorded

    def _run_forward(self, call: Call, recorded: RecordedCall | None, traced: TracedCall) -> tuple[Forward, Slot]:
        fused = not self.learning and self._step.is_fused(call.index)
        # Probably the last call: its graph is kept. If another call follows, this one is recomputed after all.
        held = recorded is not None and self._predictor.is_last(call.index)
        call.kept = recorded is not None and (fused or held)
        call.recomputed = recorded is not None and not fused
        call.measure = self.learning and self.engine.learned.plans
        call.walk = (recorded is not None and self.learning and self.engine.learned.walks(traced)) or call.bare
        if traced.profile is not None and traced.profile.fits(call):
            call.profile = traced.profile
        tensors = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
        for i in (traced.mutates | traced.overwritten) & tensors.keys():
            self.activations.restore(tensors[i])  # what is written must not be the copy that other calls start from
        homes = {i: self._locate(t) for i, t in tensors.items()}
        save = self.activations.save
        saved = call.saved = {i: save(t, homes[i]) for i, t in tensors.items()} if call.recomputed else {}
        if recorded is not None and call.recomputed:
            recorded.leaves = [saved.get(i, leaf) for i, leaf in enumerate(call.leaves)]
            self._prefetcher.saved(recorded)
        if self.learning or traced.mutates:
            self.activations.settle()
        self._prefetcher.inputs(call, homes, call.staying(traced.mutates | traced.overwritten))
        if held:
            slot = self._slots.fused(self.index, call.index, call.layer, self._step.sums_of(traced))
        else:
            slot = self._slots.forward(self.index, call.index, call.layer)
        if call.layer.sets_attributes and self.kept is not None and not self.learning:
            self._take_state_of_turn(call, recorded)
        self._predictor.after_forward(self.index, call.index, self.tape, self.trace)
        worker = self.engine.worker_pool.workers[slot.worker]
        worker.departures.wait(self._cancel_scope)
        for i, home in homes.items():
            if home is not worker.device:
                call.leaves[i] = saved.get(i) or save(tensors[i], home)
        if recorded is not None:
            recorded.home = worker.device
            self._watch_inputs(call, recorded, traced, tensors)
            if not call.recomputed:
                recorded.held = [x.detach() if isinstance(x, Tensor) else x for x in call.leaves]
        executor = self.engine.executors[slot.worker]
        with noted(lambda: FaultPlace(call.layer.title, "forward", self.index, slot, worker.device)):
            run = worker.run if call.profile is None else worker.run_here  # plain calls find all that they need here
            forward = run(lambda: executor.forward(slot, call, self.activations), self._cancel_scope)
        return forward, slot

    def _take_state_of_turn(self, call: Call, recorded: RecordedCall | None) -> None:
        """Take the layer's attributes as the call of the microbatch before has left them, which is over by now."""
        state = self.segments.glance(call.layer.state.current)
        if any(one.carried for one in (state, call.state) if one is not None):
            return  # tensors are arguments of the call, which have been prepared
        call.state = state
        if recorded is not None:
            recorded.state = state

    def _watch_inputs(self, call: Call, recorded: RecordedCall, traced: TracedCall, tensors: dict[int, Tensor]) -> None:
        """Protect a kept graph from user code that overwrites its inputs (``h += layer(h)``).

        The graph starts from the inputs themselves, or from clones if the first batch has shown that user code writes
        to them. The others are watched, and `check_inputs` compares their versions before the backward.
        """
        if call.recomputed and not (call.kept or self.engine.learned.plans):
            return  # the recomputation starts from the host copies, saved before the call
        for i, tensor in tensors.items():
            if isinstance(call.leaves[i], HostTensor) and not self.learning:
                continue  # the layer computes from an uploaded copy anyway
            if i in traced.overwritten:
                device = self._locate(tensor)
                with device.activate() if device is not None else contextlib.nullcontext():
                    call.leaves[i] = tensor.clone()
            elif i not in traced.mutates and not tensor.is_inference():
                recorded.given.append((i, witness(tensor), tensor._version))

    def _locate(self, tensor: Tensor) -> Device | None:
        if self.activations.unwritten(tensor) is not None:
            return None
        return self.engine.worker_pool.locate(tensor, self._device)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_of_loss(self, loss: Tensor) -> None:
        """Run backward from the loss through the user code behind the last layer [4]; hooks of user code run too."""
        self._phase, self.mode.returning = "backward", True
        self.differentiable = loss.requires_grad
        step, scales = self._step, self.engine.model.formats.scales
        self.segments.wait_for(scales, step.spec.version)
        scale = step.weights.share(self) * scales.of(step.spec.version)
        if not loss.requires_grad or not scale:
            return
        seed, self.mode.proxies.factor = seed_of(scale, self.engine.model.formats.low or loss.dtype)
        with torch._C.DisableTorchFunction():
            seeded = filled_like(loss, seed)
        with self._noted(), driven_backward.of(loss):
            torch.autograd.backward(loss, seeded, retain_graph=True)

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return the stand-in of ``master`` for a layer on ``device``. The worker's thread calls this.

        Raises:
            RoundPipeError: if the optimizer may still be writing to ``master``.
        """
        self.segments.refuse_late(master)
        proxy = self.mode.proxies.of(master)
        return proxy if proxy.device == device else self.mode.proxies.on(proxy, device)

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Take a gradient that autograd is about to accumulate into ``master`` itself; see `bypassed_gradients`.

        Returns:
            True: autograd drops the gradient.
        """
        self.segments.used_unseen(master)
        self.mode.proxies.passed(master, grad)
        return True

    def _watch_late(self) -> None:
        """After user code and before its backward: find the parameters that it has registered and computed with.

        Their gradients are handed out with those of masters. Autograd would add them to ``.grad`` at once, where
        ``zero_grad`` comes after them, and without the weight of the microbatch.
        """
        if self.mode.met_others:
            model = self.engine.model
            self.late = [p for p in model.module.parameters() if p.requires_grad and id(p) not in model.bucket_of]
            self._accumulators.watch(self.late)

    def _walk_tape(self) -> None:
        """Run the backward of every call on the tape, deepest first [5]."""
        while self.tape:
            recorded = self.tape.pop()
            recorded.done = True
            if recorded.wants_backward():
                self._run_backward(recorded, self._step.sums_of(self.trace.calls[recorded.call]))
            else:
                self._prefetcher.done(recorded, ())
                recorded.release()

    def _run_backward(self, recorded: RecordedCall, sums: HostGradSums | None) -> None:
        traced, engine = self.trace.calls[recorded.call], self.engine
        measured = traced if self.learning and engine.learned.plans else None
        if measured is not None:
            held = self.trace.crossing.backward_held_bytes(recorded.call)
            measured.backward_held_bytes = held + _pending_bytes(recorded, self.tape)
        check_inputs(recorded, traced, learning=self.learning)
        refuse_hooked_module(recorded)
        self._refuse_unplaced(recorded, sums)
        if recorded.hooks:
            with self._user_code_again(recorded.home):
                recorded.run_hooks(self.activations.transfer, self.mode)
        if not self._slots.keeps_graph(recorded.call):
            recorded.graph = None
        sent = self._prefetcher.gradients(recorded)
        slot = self._slots.backward(self.index, recorded.call, recorded.layer, sums)
        self._predictor.backward(self.index, self.tape, self.trace)
        worker, executor = engine.worker_pool.workers[slot.worker], engine.executors[slot.worker]
        factor = self.mode.proxies.factor
        worker.departures.wait(self._cancel_scope)
        with noted(lambda: FaultPlace(recorded.layer.title, "backward", self.index, slot, worker.device)):
            self._prefetcher.following(slot, self.tape)
            run = worker.run_here if recorded.is_plain and not recorded.hooks else worker.run

            def backward() -> list[Tensor | None]:
                found = executor.backward(slot, recorded, self.activations, factor, self, measured)
                for call in worker.send_final(slot, recorded.call, self.index):
                    self._step.sent(slot, call)
                return found

            grads = run(backward, self._cancel_scope)
        self._prefetcher.done(recorded, sent)
        self._slot, self._last = slot, f"before layer {recorded.layer.name!r}"
        self._hand_on(recorded, grads, worker.device, measured)
        self._prefetcher.after(slot, recorded.call, self.tape)

    def _refuse_unplaced(self, recorded: RecordedCall, sums: HostGradSums | None) -> None:
        """Raise if a parameter was trained at the call for whose gradient the step has reserved no memory."""
        if sums is not None and recorded.trainable == sums.layout.trained:
            return
        placed = sums.layout.trained if sums is not None else [False] * len(recorded.trainable)
        for master, trained, place in zip(recorded.layer.masters, recorded.trainable, placed, strict=True):
            if trained and not place and master.numel():
                raise RoundPipeError(
                    f"training_step switches on requires_grad of parameter {self.engine.model.name_of(master)!r}, in "
                    f"layer {recorded.layer.name!r}, for which the step has reserved no gradient: it was off before. "
                    "Set requires_grad between steps, for example in on_train_batch_start."
                )

    def _hand_over(self, graph_cut: GraphCut, index: int, grad: Tensor | None, device: Device | None) -> None:
        """Add ``grad`` to output ``index`` of another call, on the device that holds that gradient so far."""
        if grad is not None and not graph_cut.done and graph_cut.grads[index]:
            there = graph_cut.grads[index][0][1]
            grad, device = self.activations.transfer(grad, device, there), there or device
        place = device or self.engine.worker_pool.devices[0]
        with place.activate():  # the addition runs on the stream on which both parts were computed
            graph_cut.add_grad(index, grad, device)

    @contextlib.contextmanager
    def _user_code_again(self, device: Device | None) -> Iterator[None]:
        """Enter a section of user code during the tape walk."""
        with (
            self._step.spec.thread_state.entered(),
            noted(lambda: FaultPlace(f"the code {self._last}", "backward", self.index, self._slot, device)),
        ):
            self._device = device
            self._enter_user_code()
            try:
                yield
            finally:
                self._leave_user_code()

    def _hand_on(
        self,
        graph_cut: GraphCut,
        grads: list[Tensor | None],
        device: Device | None,
        measured: TracedCall | None = None,
    ) -> None:
        pushed: list[Tensor | None] = []
        for grad, target, wanted in zip(grads, graph_cut.targets, graph_cut.tensor_flags, strict=True):
            if target is not None:
                self._hand_over(target[0], target[1], grad, device)
            elif wanted:
                pushed.append(None if grad is None else self.activations.transfer(grad, device, graph_cut.input_home))
        if graph_cut.sink is not None and any(g is not None for g in pushed):
            with self._user_code_again(graph_cut.input_home):
                if measured is None:
                    graph_cut.sink.push(pushed, self.mode)
                    return
                meter = self._user_memory.meter(graph_cut.input_home)
                graph_cut.sink.push(pushed, self.mode)
                given = storage_bytes(grad for grad in pushed if grad is not None)
                measured.activation_bytes = max(measured.activation_bytes, given + meter.read())


def _pending_bytes(recorded: RecordedCall, tape: Iterable[RecordedCall]) -> int:
    """Return the bytes on workers of gradients that calls on ``tape`` have already got when ``recorded`` is next."""

    def parts(calls: Iterable[RecordedCall]) -> list[Tensor]:
        found = (part for call in calls for output in call.grads for part in output)
        return [grad for grad, device in found if device is not None]

    own = parts([recorded])
    return storage_bytes([*own, *parts(tape)]) - storage_bytes(own)
