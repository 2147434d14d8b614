"""A step under manual optimization: training_step itself runs backward and steps its optimizers.

It runs on the calling thread, on the whole batch, as one microbatch without a plan:

    layer call ─► worker ── waits for the upload of the weights, as user code may write to them next ── [1]
    loss.backward() ── through the user code behind the layers, then the tape, deepest call first ── [2]
                    ── downloads the gradients and adds them to .grad; returns with no copy in flight ── [3]
    optimizer.step(), p.clamp_(), ... write to masters; the next call uploads the new values ── [4]

`manual_user_code` decides what user code sees of masters in low precision.

A call is recomputed for its backward, so its weights must not change in between. Plain training saves the tensors that
backward needs and raises if one of them was written to; here a write to any weight of the layer is an error.

A call stays on the tape until a backward has used it, so a step may run several backwards, for different losses. User
code draws from the caller's own generators, as in plain training. Layers that draw have seeds of their own, as in every
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.call import Call
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.prediction import LayerCallPredictor
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.seeds import filled_like, seed_of
from lightning_roundpipe.runtime.core.slots_on_arrival import SlotsOnArrival
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker_pool import WatchedCancelScope
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.manual_user_code import ManualUserCode
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.loss_handle import StepGradients
from lightning_roundpipe.runtime.user_code.graph_cuts import driven_backward
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.module_state import SegmentKey
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState, derive


class ManualStep(Step):
    """The step of one batch under manual optimization.

    Args:
        engine: the context that outlives the step.
        seed: numbers that identify the batch.
        updates: see `Step`.
    """

    def __init__(self, engine: EngineContext, seed: tuple[int, ...], updates: AsyncOptimizer | None) -> None:
        self._watched = WatchedCancelScope(engine.worker_pool)
        super().__init__(engine, seed, LossWeights(None, [1], [0]), updates, cancel_scope=self._watched)
        self._trainable: dict[int, tuple[bool, ...]] = {}
        self._copied = {layer: layer.written() for layer in engine.model.layers}
        """Versions and addresses of each layer's masters when its working copies were last made."""
        self.unversioned: set[int] = set()
        """Ids of masters whose ``.data`` user code has read: writes through it do not raise the version."""

    def run(self, function: Callable[[], Any]) -> Any:
        """Return ``function()``, the user's training_step."""
        engine = self.engine
        engine.learned.plans = False
        engine.learned.randomness.learning, engine.learned.randomness.comparing = True, False
        slots = SlotsOnArrival(self._make_slot, self._prepare, self._cancel, self._open, self._close)
        run = ManualRun(self, slots)
        self.runs = [run]
        output: Any = None
        try:
            output = run.train(function)
        except BaseException as error:
            self.cancel_scope.fail(error)
        engine.worker_pool.rest(self.cancel_scope, given_up=self._watched.given_up)
        self.seconds = time.perf_counter() - self.started
        self.cancel_scope.raise_error()
        return output

    def called(self, call: TracedCall, trainable: list[bool]) -> None:
        """Record which parameters were trainable at the call: ``toggle_optimizer`` changes that within the step."""
        self._trainable[id(call)] = tuple(trainable)

    def sums_of(self, call: TracedCall) -> HostGradSums | None:
        """Return the host sums of a call's gradients in the running backward; None if it has no trainable parameter."""
        key = (call.layer.index, call.use)
        if key not in self._sums:
            trainable = self._trainable[id(call)]
            # Count within this backward, not within the step: a loop of call and backward then reuses one buffer.
            nth = sum(layer == call.layer.index for layer, _ in self._sums)
            self._sums[key] = self.engine.gradients.of(call.layer, nth, trainable).begin()
        known = self._sums[key]
        return known if known.layout.nbytes else None

    def _prepare(self, slot: Slot) -> None:
        """Refresh the working copies of the slot's layers if their masters have changed, then upload."""
        for layer in slot.layers:
            if not layer.copied:  # also after user code has put other memory in place of a master's, see `FlatBuffer`
                continue
            now = layer.written()
            if self._copied[layer] != now or any(id(master) in self.unversioned for master in layer.masters):
                layer.bucket.refresh()
                self._copied[layer] = now
        super()._prepare(slot)

    def hand_out(self) -> None:
        """Add the sums of a backward to ``.grad`` through autograd, which calls the parameters' hooks [3]."""
        sums, self._sums = [self._sums[key] for key in sorted(self._sums)], {}
        # A worker's thread runs this after closing its slots, so all gradient downloads are enqueued by then. The wait
        # itself is for a cancelled prefetch, whose upload must not read weights while user code writes to them.
        for worker in self.engine.worker_pool.workers:
            worker.run(worker.device.weights_up.synchronize, self.cancel_scope)
        gradients = StepGradients(sums, [], 1.0)
        self.engine.worker_pool.workers[0].run(gradients.arrive, self.cancel_scope)
        loss = gradients.loss(torch.zeros(()), differentiable=True)
        try:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            gradients.release()
            for total in sums:
                total.end()


class ManualRun(MicrobatchTask):
    """The whole batch, as the one microbatch of its step.

    It has many collaborators because it replaces the user code, predictor and backward of `MicrobatchTask`.
    """

    def __init__(self, step: ManualStep, slots: SlotsOnArrival) -> None:
        super().__init__(step.engine, step, 0, None, slots)
        self._manual = step
        self.segments = self._sections = self.repeated.segments = _ManualSections(step)
        self.mode: ManualUserCode = ManualUserCode(self._differentiate, self._touched, step.engine, step.unversioned)
        self._predictor = self._layer_predictor = LayerCallPredictor(
            slots, step.sums_of, step.engine.learned.order, ahead=bool(step.engine.options.prefetch)
        )
        self._weights: dict[RecordedCall, list[tuple[int, int]]] = {}
        """Versions and addresses of the masters of each recorded call's layer, at the call."""
        self._before: dict[RecordedCall, list[tuple[nn.Parameter, Tensor]]] = {}
        """Masters whose ``.data`` user code has read between a call and its backward, with copies of their values."""

    def train(self, function: Callable[[], Any]) -> Any:
        """Return ``function()``, with its layer calls on the workers."""
        try:
            with calling(self), self.mode.watching_optimizers(), self.mode:
                self._enter_user_code()
                self._surroundings = Surroundings()
                with self._noted(), interrupts_allowed():
                    output = function()
                self._watched.assert_unmodified()
            return output
        finally:
            for recorded in self.tape:  # a gradient that reaches one of these in a later step is an error
                recorded.done = True
                recorded.release()
            self.tape.clear()
            self._leave_user_code()
            self._sections.end()
            self.activations.move_to(None)

    # -- layer calls --------------------------------------------------------------------------------------------------

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with interrupts_allowed(False):
            with torch._C.DisableTorchFunction():
                self._bring_up_to_date(layer)  # [4]
            output = super().call(layer, args, kwargs)
            if self._phase == "backward":
                return output
            assert self._slot is not None
            worker, uploaded = self.engine.worker_pool.workers[self._slot.worker], self._slot.uploaded[layer.index]
            worker.run(uploaded.wait, self._cancel_scope)  # [1]
            return output

    def _check_weights(self, layer: HostLayer) -> None:
        layer.assert_unmodified()  # compares with the snapshot of `_bring_up_to_date`

    def _repeat(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer.copied:
            layer.bucket.refresh()
        return super()._repeat(layer, args, kwargs)

    def add_gradient(self, master: nn.Parameter, grad: Tensor) -> None:
        grad = grad.to(master.dtype) * self.mode.proxies.factor
        master.grad = grad if master.grad is None else master.grad + grad

    def _bring_up_to_date(self, layer: HostLayer) -> None:
        if self._layer_predictor.is_late(layer):
            self._slots.finish(self.index)
        places = [master.data_ptr() for master in layer.masters]
        layer.reattach()
        moved = [m for m, place in zip(layer.masters, places, strict=True) if m.data_ptr() != place]
        torch.autograd.graph.increment_version(moved)  # user code has replaced their values, as a write would
        layer.snapshot()

    def _touched(self, master: nn.Parameter) -> None:
        """Prepare for uncounted writes: user code has read ``master.data``.

        Stops prefetching, and copies the value if a recorded call still has to be recomputed with it.
        """
        self._layer_predictor.stay_behind()
        if self._phase == "forward":
            self._slots.finish(self.index)
        held = [recorded for recorded in self.tape if any(master is mine for mine in recorded.layer.masters)]
        value = master.detach().clone() if held else master
        for recorded in held:
            self._before.setdefault(recorded, []).append((master, value))

    def _record_call(self, call: Call, traced: TracedCall) -> RecordedCall:
        recorded = super()._record_call(call, traced)
        self._weights[recorded] = call.layer.written()
        self._manual.called(traced, call.trainable)
        return recorded

    # -- backward -----------------------------------------------------------------------------------------------------

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Leave a gradient that reached ``master`` itself to autograd, which adds it to ``.grad``."""
        return False

    def _differentiate(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Replace ``loss.backward()`` in training_step [2]."""
        if create_graph or inputs is not None:
            raise RoundPipeError(
                f"backward({'create_graph=True' if create_graph else 'inputs=...'}) is not supported by the roundpipe "
                "strategy: a layer is differentiated on its worker, once, by all that is trained. Differentiate twice "
                "inside a layer, and choose what gets gradients with requires_grad (toggle_optimizer)."
            )
        with interrupts_allowed(False), torch._C.DisableTorchFunction():
            self._phase = "backward"
            if (scale := self.engine.model.formats.scales.manual) != 1.0:
                seed, self.mode.proxies.factor = seed_of(scale, self.engine.model.formats.low or loss.dtype)
                gradient = filled_like(loss, seed) if gradient is None else gradient * seed
            with self._noted(), driven_backward.of(loss), torch._C._EnableTorchFunction(), self.mode:
                torch.autograd.backward(loss, gradient, retain_graph=True)
            self._leave_user_code()
            self._walk_losses(retain=bool(retain_graph))
            self._slots.finish(self.index)
            self._manual.hand_out()
            self.activations.end_forward()  # or host copies would pile up over the step's forwards
            self.activations.move_to(None)
            self._enter_user_code()
            self._phase = "forward"

    def _walk_losses(self, *, retain: bool) -> None:
        """Run the backward of the calls that the gradient reaches, deepest first.

        Other calls stay on the tape, for another loss; with ``retain`` all of them do.
        """
        left: list[RecordedCall] = []
        while self.tape:
            recorded = self.tape.pop()
            reached = recorded.wants_backward()
            if reached:
                self._refuse_written(recorded)
                outputs = len(recorded.grads)
                recorded.done = not retain
                self._run_backward(recorded, self._manual.sums_of(self.trace.calls[recorded.call]))
                recorded.grads, recorded.grad_arrivals = [[] for _ in range(outputs)], 0
            if retain or not reached:
                left.append(recorded)
            else:
                del self._weights[recorded]
                self._before.pop(recorded, None)
        self.tape = left[::-1]

    def _refuse_written(self, recorded: RecordedCall) -> None:
        before = self._before.get(recorded, ())
        if self._weights[recorded] == recorded.layer.written() and all(torch.equal(m, value) for m, value in before):
            return
        raise RoundPipeError(
            f"weights of layer {recorded.layer.name!r} were written to (by an optimizer's step, most likely) between "
            "its call and the backward of that call, for which it is computed once more. Run backward before the "
            "step, or call the model again after it."
        )


class _ManualSections(UserCodeSections):
    """The user code of the step's only microbatch: it takes no turns and draws from the caller's random state."""

    def __init__(self, step: ManualStep) -> None:
        super().__init__(step.engine, step.spec, 0, learning=True)
        self._before = GlobalRandomState(step.engine.worker_pool.devices)
        self._now: GlobalRandomState | None = None

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        device = self._activate(device)
        if self._now is not None:
            self._now.restore()  # layers and backward have drawn from seeds of their own in between
        if device.generator is not torch.default_generator:  # which device this is depends on the number of workers
            device.generator.manual_seed(derive(*self._step.seed, self._index, -1 - self._count))
        self._count += 1

    def leave(self, segment_key: SegmentKey | None) -> None:
        self._now = GlobalRandomState(self._engine.worker_pool.devices)
        self.close()

    def end(self) -> None:
        """Restore the devices' generators; leave the host's as user code has left them, as plain training does."""
        host = GlobalRandomState([])
        self._before.restore()
        host.restore()
