"""Who runs what where training_step is not cut, but only the calls of the model that it makes.

    whole batch: user code ── model call: user code's lock given back ──► parts ──► merged outputs ── user code ── ...
        ── loss
                                                                  │                                          │
                 user code in front ◄── argument gradients ◄── parts ◄─┴── their tapes ◄── output gradients ◄─────┘

The whole batch's run is a microbatch's whose layers are the calls of the model: each is a cut of its graph, taken
back deepest first. A part is a microbatch of one such call; one of the next call goes on where it ended.
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
from lightning_roundpipe.runtime.modes.model_calls import CutArgument, ModelCall
from lightning_roundpipe.runtime.threads.sync import Waiter
from lightning_roundpipe.runtime.user_code.interception import calling, current
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.module_state import StatePlace


class PartRun(MicrobatchTask):
    """A microbatch of one call of the model.

    Args:
        engine: what outlives the step.
        step: what it shares with the others.
        index: its number.
        trace: what it is expected to call; None to record it.
        slots: where its calls run.
        call: that it is a part of.
        portion: the calls that it may make; None while they are learned.
        before: the microbatch of the same number in the last call.
        device: where its arguments are.

    Attributes:
        outputs: what the model returned for it, as leaves and structure.
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
                self.trace = before.trace
        if portion is not None:
            self.reached = portion.calls.start

    @property
    def device(self) -> Device | None:
        """Where it has come to."""
        return self._device

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: contextvars.Context,
        predecessor: Waiter | None,
    ) -> None:  # fmt: skip
        """Run ``function``, the model's forward, on its part."""
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
            with self._noted():
                output = function(*args, **kwargs)
                self._watched.assert_unmodified()
                with torch._C.DisableTorchFunction():
                    self._give(output)
            del output
            if self.kept is not None:
                self.kept.module_state.finished()
            self._leave_user_code()
        self.activations.leave()
        self.activations.end_forward()

    def _give(self, output: Any) -> None:
        """Keep the outputs, and of their graph only where gradients go."""
        leaves, spec = flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._end.input_home = self._device
        self._end.connect(tensors if self._call.thread_state.grad else [t.detach() for t in tensors])
        bare = [t.detach().requires_grad_(flag) for t, flag in zip(tensors, self._end.tensor_flags, strict=True)]
        rest = iter(bare)
        self.outputs = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec

    def _next(self, layer: HostLayer) -> tuple[int, TracedCall]:
        index, traced = super()._next(layer)
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
        """From the gradients of its outputs, which lie on ``device``, to those of its arguments.

        Args:
            factor: what its gradients of weights are still to be multiplied by.
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
            self._slots.finish(self.index)
        except BaseException as error:
            self._cancel_scope.fail(error)

    def _run_hooks(self) -> None:
        for end in self._call.arguments[self.index]:
            if end.hooks and end.wants_backward():
                with self._user_code_again(end.home):
                    end.run_hooks(self.activations.transfer, self.mode)

    def bring(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """A tensor of its on ``target``; what is on the host, where others go to a device, stays there."""
        if self.engine.worker_pool.locate(tensor, source) is None:
            return tensor
        return self.activations.transfer(tensor, source, target)


class CallsStep(TaskStep, Protocol):
    """A step that runs the calls of the model in parts."""

    sizes_for: Callable[[int], list[int]]

    def forward(
        self, call: ModelCall[PartRun], function: Callable[..., Any], parts: list[tuple[Any, Any]],
        device: Device | None,
    ) -> None:  # fmt: skip
        """Run the parts of ``call``."""

    def expect_backward(self) -> None:
        """Gradients of all calls so far will come."""

    def back(self, call: ModelCall[PartRun], grads: list[list[Tensor | None]], factor: float) -> None:
        """Run the backward pass of ``call``."""


class WholeRun(MicrobatchTask):
    """The whole batch on its way through training_step."""

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
        """A layer that training_step calls itself is a model of one layer."""
        return self.call_model(layer.name, functools.partial(_call_layer, layer), args, kwargs)

    def call_model(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an intercepted model does when training_step calls it; ``function`` is its forward."""
        with torch._C.DisableTorchFunction():
            engine, step = self.engine, self._model_step
            call: ModelCall[PartRun] = ModelCall(name, len(self._calls), engine.thread_state())
            self._refuse_call(call)
            self._left.notice_all((args, kwargs))
            call.input_home = self._device
            parts = call.split(args, kwargs, step.sizes_for, engine.model.bucket_of, self._locate)
            self._leave_user_code()
            self._announce()
            step.forward(call, function, parts, self._device)
            last = call.runs[-1]
            self._slot, self._last = last._slot or self._slot, f"after {call.what}"
            self._device = last.device or self._device
            self._enter_user_code()
            if step.spec.module_state is not None and len(call.runs) > 1:
                self._left.look(step.spec.module_state.places.values())
            self._calls.append(call)
            return call.merge(self._device, self._warn)

    def _refuse_call(self, call: ModelCall[PartRun]) -> None:
        if self._phase == "backward":
            raise RoundPipeError(
                f"{call.what} came during backward, as torch.utils.checkpoint around it does. The strategy recomputes "
                "layers itself: call the model without a checkpoint around it."
            )
        assert self._surroundings is not None
        self._surroundings.refuse(call.name)

    def _warn(self, part: Tensor) -> None:
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
        """Every call of the model, deepest first."""
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
        """For each part, of its outputs."""
        if not call.wants_backward():
            return call.output_gradients([None] * len(call.rows))
        with self._user_code_again(call.home):
            call.run_hooks(self.activations.transfer, self.mode)
            grads, call.grads = call.grads, []
            return call.output_gradients([self._total(call, parts) for parts in grads])

    def _total(self, call: ModelCall[PartRun], parts: list[tuple[Tensor, Device | None]]) -> Tensor | None:
        there = [self.activations.transfer(grad, device, call.home) for grad, device in parts]
        return functools.reduce(torch.add, there) if there else None


def _call_layer(layer: HostLayer, *args: Any, **kwargs: Any) -> Any:
    return current().call(layer, args, kwargs)


class _Left:
    """What the model has left on modules: the last part's, where plain training leaves the whole batch's.

    Attributes:
        inherited: where the tensors are, by their ids.
    """

    def __init__(self) -> None:
        self.inherited: dict[int, tuple[StatePlace, Tensor]] = {}

    def look(self, places: Any) -> None:
        """After a call of the model."""
        self.inherited = {id(t): (place, t) for place in places for t in place.tensors()}

    def notice_all(self, values: Any) -> None:
        for leaf in flatten(values)[0] if self.inherited else ():
            self.notice(leaf)

    def notice(self, value: Any) -> None:
        """training_step computes with ``value``."""
        if id(value) in self.inherited:
            self.inherited[id(value)][0].refuse_reading()
