"""One microbatch of a step, on a thread of its own: its ``training_step``, its calls, its tape.

    user code ── in sections between its layer calls ── see `user_sections` ── [1]
    a layer is called ── its forward on the worker of its slot ── see `layer_calls` ── [2]
    the loss ── weighed ── backward through the user code behind the last layer ── [3]
    the tape, deepest call first ── backward on the workers, and through the user code in front ── [4]
    a layer is called in a backward of user code, by a checkpoint ── see `repeated_calls` ── [5]

A planned call runs in its slot. Any other call (a layer that is called twice, a branch that the first window has not
shown) runs in whatever turn the microbatch has, with weights that are brought for it: slower, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.outputs import detached, loss_of
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Event
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.engine.layer_calls import LayerCalls, Tape
from lightning_roundpipe.engine.repeated_calls import call_again
from lightning_roundpipe.engine.step_slots import Turns
from lightning_roundpipe.engine.sync import Signal
from lightning_roundpipe.engine.user_sections import UserSections, WeightGuard
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.user_code.graph_cut import filled_like, seed_of
from lightning_roundpipe.user_code.module_state import AttributeView


@dataclass
class MicrobatchResult:
    """What one microbatch of a window, or one batch of an evaluation, has given.

    Attributes:
        output: what its step returned; that of ``training_step`` detached.
        loss: the value of its loss; None if it returned none.
        weight: how much the loss counts; 0 before that is known, and without a loss.
        differentiable: whether the loss requires grad.
        computed: the ends of what computes the output.
        error: what its step has raised, if those of the microbatches before it have not.
    """

    logs: LogRecorder
    output: Any = None
    loss: Tensor | None = None
    weight: float = 0.0
    differentiable: bool = False
    computed: Sequence[Event] = ()
    error: BaseException | None = None


class CallingThread:
    """A thread whose user code calls layers: what microbatches share with batches of an evaluation.

    Args:
        after: reached when it may begin; None: at once.

    Attributes:
        ended: reached when nothing of it runs any more.
    """

    def __init__(self, calls: LayerCalls, after: Signal | None) -> None:
        self.layer_calls, self.weights, self.sections, self.turns = calls, calls.weights, calls.sections, calls.turns
        self.context, self.spec, self.index = calls.context, calls.spec, calls.turns.microbatch
        self.runner = calls.turns.runner
        self.result = MicrobatchResult(LogRecorder(self.context.pool.devices))
        self.ended = Signal()
        self._after = after

    def run(self, function: Callable[[], Any], predecessors: Sequence[Any] = ()) -> None:
        """Run ``function``, the user's step, and what follows it.

        Errors fail the step, which raises them in the main thread. The ``predecessors`` of a microbatch return their
        losses first, as Lightning comes to them before.
        """
        baton = self.context.pool.baton
        baton.acquire(self.runner)
        try:
            self.spec.scope.check()
            if self._after is not None:
                baton.wait(self._after.then)
            self._run(function)
            self.turns.release()
        except BaseException as error:
            self._fail(error, predecessors)
        finally:
            try:
                self._end()
            finally:  # whatever it raises: the others wait for these
                self.ended.set()
                baton.release()

    @property
    def logs(self) -> LogRecorder:
        return self.result.logs

    def _run(self, function: Callable[[], Any]) -> None:
        raise NotImplementedError

    def _fail(self, error: BaseException, predecessors: Sequence[Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        self.sections.surroundings = None  # which knows the mode
        self.turns.activations.drop(None)  # enqueues nothing, which a failed device would refuse
        self.sections.release_successors()

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor) -> bool:
        """Take a gradient that autograd is about to accumulate into ``master``; see `bypassed_gradients`."""
        layer, kind = self.runner.inside or ("", "")
        if layer and kind != "backward":
            raise RoundPipeError(
                f"layer {layer!r} runs a backward in its forward that reaches a parameter of shape "
                f"{tuple(master.shape)} which is not its own. Pass the parameter to the layer, or detach it."
            )
        return self.weights.take_bypassed_grad(master, grad, layer)


class Microbatch(CallingThread):
    """See above.

    Attributes:
        ready: reached when ``training_step`` has ended, and backward through user code, with the result.
    """

    layer_calls: Tape

    def __init__(self, turns: Turns, after: Signal | None = None) -> None:
        super().__init__(self._calls_of(turns), after)
        self.ready = Signal()

    def _calls_of(self, turns: Turns) -> Tape:
        sections = UserSections(turns, AttributeView(turns.context.user.shared) if turns.slots.spec.several else None)
        return Tape(sections, WeightGuard(sections))

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call [2, 5]. User code calls this by way of the intercepted layer."""
        with torch._C.DisableTorchFunction():
            self.layer_calls.check(layer)
            if self.sections.phase == "backward":
                return call_again(self.layer_calls, layer, args, kwargs)
            return self.layer_calls.call(layer, args, kwargs)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[[], Any]) -> None:
        """Run ``training_step`` and the backward of its loss."""
        with working(self), self.spec.thread_state.entered(), self.sections.saved, self.weights.mode:
            self._train(function)
        with working(self):
            self.layer_calls.walk()
        self.weights.mode.proxies.end()
        if self.spec.shares_state or not self.spec.overlaps:  # else the main thread has its generators back
            self.context.pool.randomness.check()

    def _fail(self, error: BaseException, predecessors: Sequence[Microbatch]) -> None:
        if isinstance(error, Exception) and self.sections.phase == "forward":
            self._wait_for_predecessors(error, predecessors)
        self.spec.scope.fail(error)  # the main thread raises it

    def _end(self) -> None:
        self.layer_calls.close()
        self.ready.set()
        super()._end()

    def _wait_for_predecessors(self, error: Exception, predecessors: Sequence[Microbatch]) -> None:
        """After an ``error`` of user code, give up the turns, and wait for the losses of the microbatches before."""
        try:
            self.sections.exit()
            self.sections.begun.set()
            self.turns.release()
            for other in predecessors:
                self.context.pool.baton.wait(other.ready.then)
        except BaseException:
            return  # another one has failed
        if all(other.result.error is None for other in predecessors):
            self.result.error = error

    def _train(self, function: Callable[[], Any]) -> None:
        result, sections, weights = self.result, self.sections, self.weights
        output = sections.run(function)
        with sections.noted():
            loss = loss_of(output)
            with torch._C.DisableTorchFunction():
                weights.check_after()
                self.layer_calls.shared.assert_unmodified()
                weights.refuse_late()
                if loss is not None:
                    result.weight = self.spec.loss_weights.of(self.index, loss, weights.mode.targets)
        sections.release_successors()
        sections.phase, weights.mode.returning = "backward", True
        if loss is not None:
            self._backward_of_loss(loss)
            result.loss = loss.detach()
        result.output = detached(output)
        del output, loss
        if sections.attributes is not None:
            sections.attributes.end()
        device = self.turns.device
        result.computed = [device.compute.record()] if device is not None else []
        sections.exit()
        self.context.pool.randomness.check()
        self.ready.set()

    def _backward_of_loss(self, loss: Tensor) -> None:
        """Run backward from the loss through the user code behind the last layer [3]; hooks of user code run too."""
        formats, mode, version = self.context.model.formats, self.weights.mode, self.spec.version
        self.result.differentiable = loss.requires_grad
        self.sections.wait_for(formats.scales, version)
        scale = self.spec.loss_weights.share(self.result.weight) * formats.scales.of(version)
        if not loss.requires_grad or not scale:
            return
        seed, mode.proxies.factor = seed_of(scale, formats.low or loss.dtype)
        with torch._C.DisableTorchFunction():
            seeded = filled_like(loss, seed)
        self.layer_calls.expect_gradients()
        with self.sections.noted(), torch.autograd.set_multithreading_enabled(False):  # user code in it may call layers
            torch.autograd.backward(loss, seeded, retain_graph=True)
