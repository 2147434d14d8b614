"""The tasks of a step that cuts only the calls of the model: one for the whole batch, and one per part of a call.

    whole batch: user code ── model call: releases the user-code lock ──► parts ──► merged outputs ── user code ── loss
                                                                            │                                       │
                                                                          tapes                                     │
                                                                            ▼                                       │
    user code in front ◄── argument gradients ◄────────────────── backward of the parts ◄── output gradients ◄──────┘

`WholeRun` treats a call of the model as `MicrobatchTask` treats a layer call: a cut of its graph, whose backward runs
deepest first. `PartRun` is a microbatch of one such call; the part of the same number in the next call continues it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.messages import plural
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask, TaskStep
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slots
from lightning_roundpipe.runtime.layer_calls.arguments import flatten
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.model_call_stages import ModelCallStages
from lightning_roundpipe.runtime.modes.model_calls import CutArgument, ModelCall, PartArguments
from lightning_roundpipe.runtime.user_code.interception import calling, current
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.module_state import StatePlace


class PartRun(MicrobatchTask):
    """A microbatch of one call of the model.

    A call of the model and a microbatch at once, so its collaborators are those of `ModelCall` and of `MicrobatchTask`.

    Args:
        engine: the context that outlives the step.
        step: the state that it shares with the other parts.
        index: its microbatch number.
        trace: the layer calls that it is expected to make; None records them.
        slots: the slots of its layer calls.
        call: the call of the model.
        portion: the call's place in the trace, whose layer calls alone it may make; None while they are learned.
        before: the part of the same number in the call before; None if there is none.
        device: the device that its arguments are on.

    Attributes:
        outputs: the model's return value, as leaves and structure.
    """

    def __init__(
        self, engine: EngineContext, step: TaskStep, index: int, trace: Trace | None, slots: Slots,
        call: ModelCall[PartRun], portion: ModelCallStages | None, before: PartRun | None, device: Device | None,
    ) -> None:  # fmt: skip
        super().__init__(engine, step, index, trace, slots)
        self.outputs: tuple[list[Any], TreeSpec]
        self._call, self._portion, self._device = call, portion, device
        self._end = CutArgument(call.name)
        if before is not None:
            self._uses = before._uses
            self.segments.go_on(before.segments)
            if self.learning:
                self.trace, self._user_memory = before.trace, before._user_memory
        if portion is not None:
            self.reached = portion.calls.start

    @property
    def device(self) -> Device | None:
        """The device that it ran on last; None is the host."""
        return self._device

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: contextvars.Context,
        predecessor: Waiter | None,
    ) -> None:  # fmt: skip
        """Run ``function``, the model's forward, on this part's arguments."""
        try:
            if predecessor is not None:
                self._cancel_scope.wait(predecessor)
            with calling(self):
                try:
                    context.run(self._go, function, args, kwargs)
                finally:
                    self.segments.close()
            self._slots.finish(self.index)
        except BaseException as error:
            self._cancel_scope.fail(error)
        finally:
            self._announce()

    def _go(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        with self._call.thread_state.entered(), self.mode:
            self._enter_user_code()
            self._surroundings = Surroundings()
            if not self.index:
                self._measure_user_code()
            with self._noted():
                output = function(*args, **kwargs)
                self._user_memory.end(self.trace.calls)
                self._step.padded_calls.compare(self._call.number, self.mode.padded_calls)
                self._watched.assert_unmodified()
                with torch._C.DisableTorchFunction():
                    self.activations.restore_all()  # the batch's code holds what the model returns
                    self._give(output)
            self._watch_late()
            del output
            if self.kept is not None:
                self.kept.module_state.finished()
            self._leave_user_code()
        self.activations.leave()
        self.activations.end_forward()
        self._prefetcher.end()

    def _give(self, output: Any) -> None:
        """Store the outputs detached, and remember where their gradients go."""
        leaves, spec = flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._end.input_home = self._device
        self._end.connect(tensors if self._call.thread_state.grad else [t.detach() for t in tensors])
        bare = [t.detach().requires_grad_(flag) for t, flag in zip(tensors, self._end.tensor_flags, strict=True)]
        rest = iter(bare)
        self.outputs = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec

    def _next(self, layer: HostLayer, *, can_tape: bool) -> tuple[int, TracedCall]:
        index, traced = super()._next(layer, can_tape=can_tape)
        if self.learning:
            traced.portion = self._call.number
        elif self._portion is not None and index not in self._portion.calls:
            raise RoundPipeError(
                f"microbatch {self.index} called layer {layer.name!r} within {self._call.what}, unlike in the first "
                "batches: with several microbatches the model must call its layers in an order that these have shown. "
                "Set num_microbatches=1, without a plan, which allows any control flow."
            )
        return index, traced

    # -- backward -----------------------------------------------------------------------------------------------------

    def back(self, grads: list[Tensor | None], device: Device | None, factor: float) -> None:
        """Run this part's backward, from the gradients of its outputs to those of its arguments.

        Args:
            grads: gradients of the outputs.
            device: the device that they are on.
            factor: what the gradients of weights still have to be multiplied by.
        """
        try:
            with calling(self):
                try:
                    self._phase, self.walking, self.mode.returning = "backward", True, True
                    self.mode.proxies.factor = factor
                    home = self._end.input_home
                    self._hand_on(self._end, [g if g is None else self.bring(g, device, home) for g in grads], home)
                    self._walk_tape()
                    self._run_hooks()
                finally:
                    self.segments.close()
                    self.activations.move_to(None)
                    self._prefetcher.end()
                    self._accumulators.end()
            self._slots.finish(self.index)
        except BaseException as error:
            self._cancel_scope.fail(error)

    def _run_hooks(self) -> None:
        for end in self._call.arguments[self.index]:
            if end.hooks and end.wants_backward():
                with self._user_code_again(end.home):
                    end.run_hooks(self.activations.transfer, self.mode)

    def bring(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """Return ``tensor``, one of this part's on ``source``, on ``target``. A tensor on the host stays there."""
        if self.engine.worker_pool.locate(tensor, source) is None:
            return tensor
        return self.activations.transfer(tensor, source, target)


class CallsStep(TaskStep, Protocol):
    """The step of a `WholeRun`: runs the calls of the model in parts. See `ModelStep` for the arguments."""

    sizes_for: Callable[[int], list[int]]

    def forward(
        self, call: ModelCall[PartRun], function: Callable[..., Any], parts: list[tuple[Any, Any]],
        device: Device | None,
    ) -> None:  # fmt: skip
        """Run the forward of ``call`` in parts."""

    def expect_backward(self) -> None:
        """Prepare for the backward of all calls so far."""

    def back(self, call: ModelCall[PartRun], grads: list[list[Tensor | None]], factor: float) -> None:
        """Run the backward of ``call`` in parts."""


class WholeRun(MicrobatchTask):
    """The whole batch in training_step.

    It overrides every step of `MicrobatchTask` that handles a layer call, and needs the modules that these need.

    Args:
        engine: the context that outlives the step.
        step: runs the calls of the model.
        slots: the slots of this task, which makes no layer calls.
    """

    def __init__(self, engine: EngineContext, step: CallsStep, slots: Slots) -> None:
        super().__init__(engine, step, -1, Trace(), slots)
        self._model_step = step
        self._calls: list[ModelCall[PartRun]] = []
        self._left = _Left()
        self.kept, self.segments = None, UserCodeSections(engine, step.spec, -1, learning=False, kind="whole batch's ")
        self.mode = UserCodeMode(
            engine.model.bucket_of, self.segments.read_master, engine.model.formats, train=True,
            accelerator=engine.worker_pool.accelerator, kept=self._left, devices=engine.worker_pool.devices,
            aside=self.segments.paused, buffers=engine.model.buffers,
        )  # fmt: skip

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Treat a layer that training_step calls itself as a model of one layer."""
        return self.call_model(layer.name, lambda *a, **k: current().call(layer, a, k), args, kwargs)

    def call_model(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an intercepted model, whose own forward is ``function``, in parts."""
        with torch._C.DisableTorchFunction():
            engine, step = self.engine, self._model_step
            parameters = [parameter for layer in engine.model.layers for parameter in layer.masters]
            call: ModelCall[PartRun] = ModelCall(
                name=name, number=len(self._calls), thread_state=engine.thread_state(), trained=parameters
            )
            self._refuse_call(call)
            self._left.notice_all((args, kwargs))
            call.input_home = self._device
            parts = call.split(args, kwargs, step.sizes_for, engine.model.bucket_of, self._locate)
            self._leave_user_code()
            self._announce()
            given = [PartArguments(part, copied=False) for part in parts]
            step.forward(call, function, parts, self._device)
            if any(part.are_changed() for part in given):
                raise RoundPipeError(
                    f"{call.what} changes a list, a dict or an object that it is given. Each microbatch has one of its "
                    "own, so the caller does not see that: return what it sets, or set num_microbatches=1."
                )
            last = call.runs[-1]
            self._slot, self._last = last._slot or self._slot, f"after {call.what}"
            self._device = last.device or self._device
            self._enter_user_code()
            if step.spec.module_state is not None and len(call.runs) > 1:
                self._left.look(step.spec.module_state.places.values())
            self._calls.append(call)
            return call.merge(self._device, functools.partial(self._warn, name))

    def _refuse_call(self, call: ModelCall[PartRun]) -> None:
        if self._phase == "backward":
            raise RoundPipeError(
                f"{call.what} came during backward, as torch.utils.checkpoint around it does. The strategy recomputes "
                "layers itself: call the model without a checkpoint around it."
            )
        assert self._surroundings is not None
        self._surroundings.refuse(call.name)

    def _warn(self, name: str, part: Tensor, place: int) -> None:
        if self.engine.learned.columns.are_features(name, place):
            return
        self.engine.hints.warn(
            "pairs",
            f"the model returned a tensor of shape {tuple(part.shape)} for a microbatch of "
            f"{plural(len(part), 'sample')}, whose rows are concatenated with those of the other microbatches. If it "
            "has a value for each pair of samples, the pairs across microbatches are missing: compute it in "
            "training_step, from what the model returns for each sample.",
        )

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_of_loss(self, loss: Tensor) -> None:
        super()._backward_of_loss(loss)
        if any(call.wants_backward() for call in self._calls):
            self._model_step.expect_backward()

    def _walk_tape(self) -> None:
        """Run the backward of every call of the model, deepest first."""
        while self._calls:
            call = self._calls.pop()
            self._model_step.back(call, self._gradients_of(call), self.mode.proxies.factor)
            if any(end.wants_backward() for ends in call.arguments for end in ends):
                with self._user_code_again(call.input_home):
                    pushed = call.argument_gradients()
                self._hand_on(call, pushed, call.input_home)
            call.done = True
            call.arguments.clear()

    def _gradients_of(self, call: ModelCall[PartRun]) -> list[list[Tensor | None]]:
        """Return the gradients of each part's outputs."""
        if not call.wants_backward():
            return call.output_gradients([None] * len(call.rows))
        with self._user_code_again(call.home):
            call.run_hooks(self.activations.transfer, self.mode)
            grads, call.grads = call.grads, []
            return call.output_gradients([self._total(call, parts) for parts in grads])

    def _total(self, call: ModelCall[PartRun], parts: list[tuple[Tensor, Device | None]]) -> Tensor | None:
        there = [self.activations.transfer(grad, device, call.home) for grad, device in parts]
        return functools.reduce(torch.add, there) if there else None


class _Left:
    """Tensors that the model's forward has left on modules: the last part's, where plain training leaves the batch's.

    training_step must not compute with them. Implements `mode.Keeps`.

    Attributes:
        inherited: by id of the tensor, the attribute that holds it, and the tensor.
    """

    def __init__(self) -> None:
        self.inherited: dict[int, tuple[StatePlace, Tensor]] = {}

    def look(self, places: Any) -> None:
        """Find the tensors that a call of the model has left in ``places``."""
        self.inherited = {id(t): (place, t) for place in places for t in place.tensors()}

    def notice_all(self, values: Any) -> None:
        for leaf in flatten(values)[0] if self.inherited else ():
            self.notice(leaf)

    def notice(self, value: Any) -> None:
        """Raise if ``value``, which training_step computes with, is such a tensor."""
        if id(value) in self.inherited:
            self.inherited[id(value)][0].refuse_reading()
