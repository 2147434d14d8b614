"""One microbatch on its way through a step: the user's training_step on a thread of its own, its tape, its backward.

    start ── wait for the microbatch before to reach its first layer ── [1]
    user code ── under the user-code lock, with this microbatch's random state ── [2]
    layer call ── lock released ─► turn ─► worker ─► lock taken again ── [3]
    loss ── weighted, backward through the last user code, in the fused slot's turn; output given ── [4]
    tape ── deepest call first: turn ─► worker ─► gradients to the calls and the user code in front ── [5]

The thread never holds the user-code lock while it waits for a turn, or the other way round: that, and the total order
of turns, is why nothing here can wait in a circle.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.runtime.batch.logs import LogRecorder
from lightning_roundpipe.runtime.batch.loss_weights import Weighing
from lightning_roundpipe.runtime.batch.microbatches import detached, loss_of, seed_of
from lightning_roundpipe.runtime.core.activation_prefetch import ActivationPrefetcher
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.core.outputs import check_inputs, hand_back, learn, refuse_hooked_module
from lightning_roundpipe.runtime.core.prediction import NextCallPredictor
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slot, Slots
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.layer_calls.arguments import flatten_call, is_cache, refuse_caches
from lightning_roundpipe.runtime.layer_calls.recompute_check import is_checked
from lightning_roundpipe.runtime.layer_calls.shared_memory import SharedOutputs
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.memory.peak_memory import PeakMemoryMeter
from lightning_roundpipe.runtime.threads.sync import Waiter
from lightning_roundpipe.runtime.user_code.graph_cuts import GraphCut, driven_backward, witness
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.module_state import SegmentKey
from lightning_roundpipe.runtime.user_code.rng import derive


class TaskStep(Protocol):
    """A step, as its microbatches see it.

    Attributes:
        sizes: samples of each microbatch.
    """

    sizes: list[int]
    weighing: Weighing

    @property
    def spec(self) -> StepSpec: ...

    def sums_of(self, call: TracedCall) -> HostGradSums | None:
        """Where the gradients of a call are summed."""

    def is_fused(self, call: int) -> bool:
        """Whether the call is in the fused stage."""


class MicrobatchTask:
    """A microbatch of one step.

    Args:
        engine: what outlives the step.
        step: what it shares with the others.
        index: its number.
        trace: what it is expected to call; None to record it (``learning``).
        slots: where its calls run.
        recent: what it probably calls, though any other calls are as right. Only while learning.
    """

    def __init__(
        self, engine: EngineContext, step: TaskStep, index: int, trace: Trace | None, slots: Slots,
        recent: Trace | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.learning = trace is None
        self.segments = UserCodeSections(engine, step.spec, index, learning=self.learning)
        self.kept = self.segments.kept
        self._step, self.engine, self._cancel_scope = step, engine, step.spec.cancel_scope
        self.mode = UserCodeMode(
            engine.model.bucket_of, self.segments.read_master, engine.model.formats, train=True,
            accelerator=engine.worker_pool.accelerator, kept=self.kept, devices=engine.worker_pool.devices,
            aside=self.segments.paused, buffers=engine.model.buffers,
        )  # fmt: skip
        self.logs = LogRecorder(engine.worker_pool.devices, self.mode.counts.behind)
        self.started = Waiter()
        self.passed = Waiter()
        """Woken when its output is there, computed once ``computed`` has passed; only its backward is left."""
        self.computed: Event | None = None
        self.output: Any = None
        self.weight, self.differentiable = 0.0, False
        self.trace = trace or Trace()
        self._predictor = NextCallPredictor(slots, step.sums_of, recent)
        self._slots = slots
        self.activations = ActivationStore(index, step.spec.recorder, engine.worker_pool.staging)
        self._prefetcher = ActivationPrefetcher(index, engine.worker_pool.workers, slots, self.activations)
        self.tape: list[RecordedCall] = []
        self.reached = 0
        self._off_trace = self.trace.has_skipped_calls
        """Whether layers were left out, so that sections of user code cannot be told by their number."""
        self._uses: Counter[int] = Counter()
        self._announced = self.walking = False
        self._segment_key: SegmentKey = (-1, 0)
        self._device: Device | None = None
        self._slot: Slot | None = None
        self._phase, self._last = "forward", "before the first layer"
        self._surroundings: Surroundings | None = None
        self._watched = SharedOutputs()
        self._written: list[nn.Parameter] = []
        """Masters that were written to by their ``.data``, of which workers may have other values."""
        self._gauge: PeakMemoryMeter | None = None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], predecessor: Waiter | None) -> None:
        """Run ``function`` (the user's training_step) and the backward of its loss."""
        try:
            if predecessor is not None:
                self._cancel_scope.wait(predecessor)  # [1]
            with calling(self):
                try:
                    self._train(function, args)
                finally:
                    self.segments.close()
                    self.activations.move_to(None)
            self._slots.finish(self.index)
        except BaseException as error:
            self._cancel_scope.fail(error)  # which raises it in the main thread
        finally:
            self._announce()
            self.passed.wake()

    def _train(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self._step.spec.thread_state.entered(), self.mode:
            self._enter_user_code()
            self._surroundings = Surroundings()
            with self._noted():
                output = function(*args)
                self._watched.assert_unmodified()
                with torch._C.DisableTorchFunction():
                    self._check_after()
                loss = loss_of(output)
            self.mode.judge(loss, self._step.sizes[self.index])
            self._announce()
            if loss is not None:
                self.weight = self._step.weighing.of(self)
                self._backward_of_loss(loss)
                if self._gauge is not None:
                    self.trace.calls[-1].then(self._gauge.read())
            self.output = detached(output)
            del output, loss
            if self.kept is not None:
                self.kept.module_state.finished()
            self.computed = self._device.compute.record() if self._device is not None else None
            self._leave_user_code()
        self.passed.wake()
        self.activations.end_forward()
        self.walking = True
        self._walk_tape()

    def _noted(self) -> contextlib.AbstractContextManager[None]:
        return noted(lambda: FaultPlace(f"the code {self._last}", self._phase, self.index, self._slot, self._device))

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
        """What the intercepted layer does instead of running [3]. Called by user code."""
        with torch._C.DisableTorchFunction():
            self._refuse(layer)
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
            if self.learning:
                learn(call, traced, forward, self.trace.crossing, taped=recorded is not None)
                if call.tentative and layer.reaches_out:
                    traced.can_tape = traced.needs_grad_mode = True
            output, taped = hand_back(call, recorded, traced, forward, args, kwargs, self._watched)
            if call.measure:
                self._gauge = PeakMemoryMeter(self._device, ())
            if recorded is not None and taped:
                self.tape.append(recorded)
            if self.kept is not None and forward.side_outputs:
                self.kept.module_state.wrote(layer)
            return output

    def _refuse(self, layer: HostLayer) -> None:
        """Calls that could not be right."""
        if self._phase == "backward":
            raise RoundPipeError(
                f"layer {layer.name!r} was called during backward, as torch.utils.checkpoint around layers does. The "
                "strategy recomputes layers itself: call them without a checkpoint around them."
            )
        assert self._surroundings is not None
        self._surroundings.refuse(layer.name)
        self._check_weights(layer)
        self._watched.assert_unmodified()

    def _check_weights(self, layer: HostLayer) -> None:
        """At a call of ``layer``: what a worker gets are the weights that it has now.

        A batch of one microbatch may write to weights of which no graph has been made yet, as momentum teachers do.
        """
        if self._step.spec.cut or not self.learning:
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
        self._slots.finish(self.index)  # what is on its way is dropped
        layer.reattach()
        layer.bucket.refresh()
        layer.snapshot()
        self._written = [master for master in self._written if not any(master is other for other in mine)]

    def _refuse_own_writes(self) -> None:
        """``training_step`` runs once for each microbatch, and so would what it writes."""
        if written := self.mode.written_by_data():
            raise RoundPipeError(
                f"training_step writes to parameter {self.engine.model.name_of(written[0])!r} by its .data, while "
                "microbatches compute with it. Write to parameters between steps, for example in on_train_batch_end, "
                "or set num_microbatches=1."
            )

    def _refuse_taped(self, layer: HostLayer) -> None:
        """Its earlier call would be computed once more, with other weights."""
        if any(recorded.layer is layer for recorded in self.tape):
            raise RoundPipeError(
                f"parameters of layer {layer.name!r} were written to within training_step, after a call whose backward "
                "computes it once more. Write to them between steps, for example in on_train_batch_end."
            )

    def _check_after(self) -> None:
        """When training_step has returned."""
        if self._step.spec.cut or not self.learning:
            self._refuse_own_writes()
            return
        self._written += self.mode.written_by_data()
        for layer in dict.fromkeys(recorded.layer for recorded in self.tape):
            if layer.is_written() or any(master is other for master in layer.masters for other in self._written):
                self._refuse_taped(layer)

    def _prepare(
        self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, RecordedCall | None, TracedCall]:
        index, traced = self._next(layer)
        state = layer.state.current()
        leaves, spec = flatten_call(args, kwargs, state.carried if state else {})
        leaves = self.mode.stand_ins(leaves, (args, kwargs))
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        thread_state = self.engine.thread_state()
        trainable = layer.trainable()
        if self.kept is not None and not self.learning:
            self.kept.module_state.refuse_new(layer, state, trainable)
        can_tape = thread_state.grad and (any(requires_grad) or any(trainable) or bool(layer.reaches_out))
        bare = thread_state.grad and not can_tape
        tentative = bare and self.learning and layer.reaches_out is None and not any(map(is_cache, leaves))
        taped = can_tape or tentative if self.learning else can_tape and traced.taped
        if can_tape:
            refuse_caches(leaves, layer.name)
        if self.learning:
            traced.can_tape = can_tape
        elif can_tape != traced.can_tape:
            raise RoundPipeError(
                f"layer {layer.name!r} is called {'with' if can_tape else 'without'} gradients, unlike in the first "
                "batch: with several microbatches a step must be of one kind. Set num_microbatches=1."
            )
        call = Call(
            index, layer, self.index, spec, leaves, requires_grad, trainable, thread_state, state,
            self._seed_of(layer), contextvars.copy_context(), list(leaves),
            learning=self.learning, may_mutate=None if self.learning else traced.mutates,
            bare=bare, tentative=tentative, lender=self,
        )  # fmt: skip
        return call, self._record_call(call, traced) if taped else None, traced

    def _seed_of(self, layer: HostLayer) -> int | None:
        """By what is called, not by the place in the trace, which may grow while it is learned."""
        use = self._uses[layer.index]
        self._uses[layer.index] += 1
        return derive(*self._step.spec.seed, self.index, layer.index, use)

    def _next(self, layer: HostLayer) -> tuple[int, TracedCall]:
        if self.learning:
            traced = self.trace.append(layer)
            index = len(self.trace.calls) - 1
            self._predictor.see(index, layer)
            return index, traced
        index = self.trace.find(layer, self.reached, self.index)
        self._off_trace |= index != self.reached
        self.reached = index + 1
        return index, self.trace.calls[index]

    def _record_call(self, call: Call, traced: TracedCall) -> RecordedCall:
        """The call's place on the tape, with where its inputs' gradients go."""
        recorded = RecordedCall(
            call.index, call.layer, self.index, call.spec, [], call.requires_grad, call.thread_state, call.state,
            call.seed, call.context, input_home=self._device, mutates=traced.mutates, trainable=call.trainable,
        )  # fmt: skip
        recorded.connect([leaf for leaf in call.leaves if isinstance(leaf, Tensor)])
        return recorded

    def _run_forward(self, call: Call, recorded: RecordedCall | None, traced: TracedCall) -> tuple[Forward, Slot]:
        fused = not self.learning and self._step.is_fused(call.index)
        # Probably the last call: its graph is kept, but should another one come, it is recomputed after all.
        held = recorded is not None and self._predictor.is_last(call.index)
        call.kept = recorded is not None and (fused or held)
        call.recomputed = recorded is not None and not fused
        call.measure = self.learning and self.engine.learned.plans
        call.checked = call.recomputed and is_checked(self._step.spec.number)
        if call.recomputed and self.learning and not (held or self.engine.learned.plans):
            call.precedent = self._predictor.precedent(call)
        alike = call.precedent.alike if call.precedent else False
        call.graph = recorded is not None and (fused or traced.needs_grad_mode or (self.learning and not alike))
        call.graph = call.graph or call.bare  # which costs nothing where nothing requires grad
        sure = recorded is not None and not call.tentative
        call.probe = sure and (self.engine.learned.probes(traced) or alike is None)
        call.walk = (recorded is not None and self.learning and self.engine.learned.walks(traced)) or call.bare
        tensors = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
        saved = call.saved = {i: self._save(t) for i, t in tensors.items()} if call.recomputed else {}
        if recorded is not None and call.recomputed:
            recorded.leaves = [saved.get(i, leaf) for i, leaf in enumerate(call.leaves)]
            self._prefetcher.saved(recorded)
        if self.learning or traced.mutates:
            self.activations.settle()
        self._prefetcher.inputs(call, self._locate)
        if held:
            slot = self._slots.fused(self.index, call.index, call.layer, self._step.sums_of(traced))
        else:
            slot = self._slots.forward(self.index, call.index, call.layer)
        self._predictor.after_forward(self.index, call.index, self.tape, self.trace)
        worker = self.engine.worker_pool.workers[slot.worker]
        elsewhere = [i for i, t in tensors.items() if self._locate(t) is not worker.device]
        call.leaves = [(saved.get(i) or self._save(x)) if i in elsewhere else x for i, x in enumerate(call.leaves)]
        if recorded is not None:
            recorded.home = worker.device
            self._watch_inputs(call, recorded, traced, tensors)
        executor = self.engine.executors[slot.worker]
        with noted(lambda: FaultPlace(call.layer.title, "forward", self.index, slot, worker.device)):
            return worker.run(lambda: executor.forward(slot, call, self.activations), self._cancel_scope), slot

    def _watch_inputs(self, call: Call, recorded: RecordedCall, traced: TracedCall, tensors: dict[int, Tensor]) -> None:
        """A kept graph starts from the inputs themselves; from copies, if user code writes to them (``h +=
        layer(h)``).
        """
        if call.recomputed and not (call.kept or self.engine.learned.plans):
            return  # what is recomputed from was saved before the call
        for i, tensor in tensors.items():
            if isinstance(call.leaves[i], HostTensor) and not self.learning:
                continue  # the layer gets a copy anyway
            if i in traced.overwritten:
                device = self._locate(tensor)
                with device.activate() if device is not None else contextlib.nullcontext():
                    call.leaves[i] = tensor.clone()
            elif i not in traced.mutates and not tensor.is_inference():
                recorded.given.append((i, witness(tensor), tensor._version))

    def _save(self, tensor: Tensor) -> HostTensor:
        return self.activations.save(tensor, self._locate(tensor))

    def _locate(self, tensor: Tensor) -> Device | None:
        return self.engine.worker_pool.locate(tensor, self._device)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_of_loss(self, loss: Tensor) -> None:
        """Backward from the loss through the user code behind the last layer [4], in which user code may run, too."""
        self._phase, self.mode.returning = "backward", True
        self.differentiable = loss.requires_grad
        step, scales = self._step, self.engine.model.formats.scales
        self.segments.wait_for(scales, step.spec.version)
        scale = step.weighing.share(self) * scales.of(step.spec.version)
        if not loss.requires_grad or not scale:
            return
        seed, self.mode.proxies.factor = seed_of(scale, self.engine.model.formats.low or loss.dtype)
        with torch._C.DisableTorchFunction():
            seeded = torch.full_like(loss, seed)
        with self._noted(), driven_backward.of(loss):
            torch.autograd.backward(loss, seeded, retain_graph=True)

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """The stand-in of ``master`` for a layer on ``device``, in its worker's thread."""
        self.segments.refuse_late(master)
        proxy = self.mode.proxies.of(master)
        return proxy if proxy.device == device else self.mode.proxies.on(proxy, device)

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Take a gradient that autograd is about to put into ``master`` itself; see `bypassed_gradients`."""
        self.segments.used_unseen(master)
        self.mode.proxies.passed(master, grad)
        return True

    def _walk_tape(self) -> None:
        """Every call of the tape, deepest first [5]."""
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
        check_inputs(recorded, traced, learning=self.learning)
        refuse_hooked_module(recorded)
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
        with noted(lambda: FaultPlace(recorded.layer.title, "backward", self.index, slot, worker.device)):
            self._prefetcher.following(slot, self.tape)
            grads = worker.run(
                lambda: executor.backward(slot, recorded, self.activations, factor, self, measured), self._cancel_scope
            )
        self._prefetcher.done(recorded, sent)
        self._slot, self._last = slot, f"before layer {recorded.layer.name!r}"
        if self.learning and recorded.found != traced.flags:
            traced.precedent = None
        self._hand_on(recorded, grads, worker.device)
        self._prefetcher.after(slot, recorded.call, self.tape)

    def _hand_over(self, graph_cut: GraphCut, index: int, grad: Tensor | None, device: Device | None) -> None:
        """Add to another call's gradient, on the device where that gradient is already."""
        if grad is not None and not graph_cut.done and graph_cut.grads[index]:
            there = graph_cut.grads[index][0][1]
            grad, device = self.activations.transfer(grad, device, there), there or device
        place = device or self.engine.worker_pool.devices[0]
        with place.activate():  # it may be added to another one, in the order of what made both
            graph_cut.add_grad(index, grad, device)

    @contextlib.contextmanager
    def _user_code_again(self, device: Device | None) -> Iterator[None]:
        """User code runs once more, when the microbatch walks back."""
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

    def _hand_on(self, graph_cut: GraphCut, grads: list[Tensor | None], device: Device | None) -> None:
        pushed: list[Tensor | None] = []
        for grad, target, wanted in zip(grads, graph_cut.targets, graph_cut.tensor_flags, strict=True):
            if target is not None:
                self._hand_over(target[0], target[1], grad, device)
            elif wanted:
                pushed.append(None if grad is None else self.activations.transfer(grad, device, graph_cut.input_home))
        if graph_cut.sink is not None and any(g is not None for g in pushed):
            with self._user_code_again(graph_cut.input_home):
                graph_cut.sink.push(pushed, self.mode)
