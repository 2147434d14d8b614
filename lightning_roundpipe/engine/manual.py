"""A step under manual optimization: ``training_step`` itself runs backward and steps its optimizers.

It is one microbatch without a plan, on a thread of its own:

    layer call ── its slot gets the newest weights ── their upload ends, as user code may write to them next ── [1]
    loss.backward() ── through the user code behind the layers, then the tape, deepest call first ── [2]
                    ── the gradients arrive and are added to ``.grad`` ── [3]
    a call stays on the tape until a backward has used it, or longer with ``retain_graph`` ── [4]

User code reads masters themselves. Under a ``*-true`` precision of 16 bits it reads a low-precision copy of each, made
anew when the master has changed. What is written, and what an optimizer does, goes to the masters; optimizers see the
default dtype outside of a step.

A call is recomputed for its backward, so its weights must not change in between. Plain training raises, too, if a
tensor that backward needs was written to.

User code draws from the caller's own generators, as in plain training. Layers have seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.layer_calls import Tape
from lightning_roundpipe.engine.microbatch import Microbatch
from lightning_roundpipe.engine.randomness import CallerRandomState
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.step import Step, training_spec
from lightning_roundpipe.engine.step_slots import StepSlots, Turns
from lightning_roundpipe.engine.user_sections import UserSections, WeightGuard
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.user_code.graph_cut import filled_like, seed_of
from lightning_roundpipe.user_code.mode import DATA, UserCodeMode
from lightning_roundpipe.user_code.stand_ins import Proxies


class ManualSlots(StepSlots):
    """The slots of a batch, one for each call."""

    def sums_of_call(self, call: LayerCall, microbatch: int | None) -> HostGradSums | None:
        """Return the host sums of a call's gradients in the running backward; None if nothing of it is trained.

        ``toggle_optimizer`` changes what is.
        """
        layer, key = call.layer, (call.layer.index, call.use)
        if key not in self.sums:
            # Counted within this backward, not within the step: a loop of call and backward then reuses one buffer.
            nth = sum(other == layer.index for other, _ in self.sums)
            self.sums[key] = self._context.gradients.begin(layer, (nth,), call.environment.trained)
        return self.sums[key] if self.sums[key].layout.nbytes else None

    def hand_out(self) -> None:
        """Add the sums of a backward to ``.grad`` through autograd, which calls the parameters' hooks [3]."""
        sums, self.sums = [self.sums[key] for key in sorted(self.sums)], {}
        self._adding.clear()
        gradients = StepGradients(sums, [], 1.0)
        gradients.arrive()
        (loss,) = gradients.losses([(torch.zeros(()), True)])
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            gradients.release()


class _Sections(UserSections):
    """Sections of user code that draws from the caller's own generators."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns, None)
        self.random = CallerRandomState([])
        """The caller's generators, as user code has left them."""

    def enter(self, section: int | None = None) -> None:
        super().enter()
        self.random.restore()

    def exit(self) -> None:
        if self.is_open:
            self.random = CallerRandomState([])
        super().exit()


class _Weights(WeightGuard):
    """The masters, which user code may read and write, except between a call and its backward.

    ``differentiate``: runs in place of ``backward``.
    """

    mode: _ManualUserCode

    def __init__(self, sections: UserSections, differentiate: Callable[..., None]) -> None:
        super().__init__(sections, _ManualUserCode(sections.context, differentiate, self._touched))
        self._at_call: dict[LayerCall, list[tuple[int, int]]] = {}
        """Versions and addresses of the masters of each taped call's layer, at the call."""
        self._before: dict[LayerCall, list[tuple[nn.Parameter, Tensor]]] = {}
        """Masters whose ``.data`` user code has read since a taped call, with copies of their values."""
        self._copied = {layer.index: layer.weights.written() for layer in self.context.model.layers}
        """Versions and addresses of each layer's masters when its working copies were last made."""

    def _touched(self, master: nn.Parameter) -> None:
        """Note that user code may write to a master without raising its version."""
        held = [call for call in self.tape if any(master is mine for mine in call.layer.masters)]
        value = master.detach().clone() if held else master
        for call in held:
            self._before.setdefault(call, []).append((master, value))

    def check(self, layer: HostLayer) -> None:
        """Let the call's upload read what user code has written to masters, or put in their place."""
        places = [master.data_ptr() for master in layer.masters]
        layer.weights.reattach()
        moved = [m for m, place in zip(layer.masters, places, strict=True) if m.data_ptr() != place]
        torch.autograd.graph.increment_version(moved)  # user code has replaced their values, as a write would
        layer.check.snapshot()
        now = layer.weights.written()
        unseen = any(id(master) in self.mode.unversioned for master in layer.masters)
        if layer.weights.copied and (unseen or self._copied[layer.index] != now):
            layer.bucket.refresh()
            self._copied[layer.index] = now

    def note_call(self, call: LayerCall) -> bool:
        """Note the weights that a call was made with, and let its upload end [1]."""
        if call.output_kinds and call.reconnect is None:
            self._at_call[call] = call.layer.weights.written()
        return True

    def refuse_written(self, call: LayerCall) -> None:
        """Raise if they were written to since."""
        before = self._before.get(call, ())
        if self._at_call[call] == call.layer.weights.written() and all(torch.equal(m, value) for m, value in before):
            return
        raise RoundPipeError(
            f"weights of layer {call.layer.name!r} were written to (by an optimizer's step, most likely) between "
            "its call and the backward of that call, for which it is computed once more. Run backward before the "
            "step, or call the model again after it."
        )

    def forget(self, call: LayerCall) -> None:
        """Forget a call that has left the tape."""
        del self._at_call[call]
        self._before.pop(call, None)

    def end(self) -> None:
        """Forget all calls, which know this."""
        for kept in (self._at_call, self._before):
            kept.clear()

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return ``master``, or a differentiable copy, for a layer on ``device``."""
        lent: Tensor = self.mode.stand_in(master).to(device)
        return lent

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor, layer: str = "") -> bool:
        """Leave a gradient that reached ``master`` itself to autograd, which adds it to ``.grad``."""
        return False


class ManualMicrobatch(Microbatch):
    """The batch, as the one microbatch of its step."""

    weights: _Weights
    sections: _Sections

    def _calls_of(self, turns: Turns) -> Tape:
        sections = _Sections(turns)
        return Tape(sections, _Weights(sections, self.differentiate))

    def _run(self, function: Callable[[], Any]) -> None:
        """Run ``training_step``."""
        mode = self.weights.mode
        with working(self), self.spec.thread_state.entered(), self.sections.saved, mode.watching_optimizers(), mode:
            self.result.output = self.sections.run(function)

    def _end(self) -> None:
        self.weights.end()
        self.sections.exit()
        self.sections.random.restore()
        super()._end()

    # -- backward -----------------------------------------------------------------------------------------------------

    def differentiate(
        self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None], *, retain_graph: bool | None,
        create_graph: bool, inputs: Any,
    ) -> None:  # fmt: skip
        """Run backward from ``losses`` in training_step [2]."""
        if create_graph or inputs is not None:
            raise RoundPipeError(
                f"backward({'create_graph=True' if create_graph else 'inputs=...'}) is not supported by the roundpipe "
                "strategy: a layer is differentiated on its worker, once, by all that is trained. Differentiate twice "
                "inside a layer, and choose what gets gradients with requires_grad (toggle_optimizer)."
            )
        sections, mode, formats = self.sections, self.weights.mode, self.context.model.formats
        with torch._C.DisableTorchFunction():
            sections.phase, mode.returning = "backward", True
            seeds = list(gradients)
            if (scale := formats.scales.manual) != 1.0:
                seed, mode.proxies.factor = seed_of(scale, formats.low or losses[0].dtype)
                pairs = zip(losses, gradients, strict=True)
                seeds = [filled_like(loss, seed) if grad is None else grad * seed for loss, grad in pairs]
            self.layer_calls.expect_gradients()
            one_thread = torch.autograd.set_multithreading_enabled(False)  # user code in it may call layers
            with sections.noted(), one_thread, torch._C._EnableTorchFunction():
                mode.run_backward(losses, seeds)
            sections.exit()
            self._walk(retain=bool(retain_graph))
            assert isinstance(self.turns.slots, ManualSlots)
            self.turns.slots.hand_out()
            sections.enter()
            sections.phase, mode.returning = "forward", False

    def _walk(self, *, retain: bool) -> None:
        """Run the backward of the calls that a gradient reaches, deepest first; others stay on the tape [4].

        When this returns, all gradients are on their way to the host.
        """
        left: list[LayerCall] = []
        slots: list[Slot] = []
        while self.layer_calls.tape:
            call = self.layer_calls.tape.pop()
            reached = bool(call.gradients)
            if reached:
                self.weights.refuse_written(call)
                self.layer_calls.backward(call)
                assert call.slot is not None
                slots.append(call.slot)
                call.slot = None
            if retain or not reached:
                call.gradients.reopen(len(call.output_kinds))
                left.append(call)
            else:
                call.gradients.close()
                self.weights.forget(call)
        self.layer_calls.tape += left[::-1]
        for slot in slots:
            self.context.pool.baton.wait(slot.gradients.sent.then)


class ManualStep(Step):
    """The step of one batch."""

    slots_type = ManualSlots
    microbatch_type = ManualMicrobatch

    def __init__(self, context: Context, seed: tuple[int, ...], updates: AsyncOptimizer | None) -> None:
        super().__init__(context, training_spec(context, seed, LossWeights(None, [1], [0]), updates))

    def run_batch(self, function: Callable[[], Any]) -> Any:
        """Return what ``function()`` returns. The devices' generators are the caller's again behind it."""
        devices = CallerRandomState(self.context.pool.devices)
        try:
            self.run([function], in_order=True)
        finally:
            host = CallerRandomState([])
            devices.restore()
            host.restore()
        return self.microbatches[0].result.output


class _ManualUserCode(UserCodeMode):
    """The torch function mode of the batch. It replaces ``Tensor.backward`` and ``torch.autograd.backward``.

    Args:
        differentiate: runs in their place.
        touched: called with each master whose ``.data`` user code reads.

    Attributes:
        unversioned: ids of these masters: their versions do not show all writes.
    """

    def __init__(
        self, context: Context, differentiate: Callable[..., None], touched: Callable[[nn.Parameter], None]
    ) -> None:
        formats, pool = context.model.formats, context.pool
        seen = context.model.bucket_of if formats.low is not None else ()
        super().__init__(
            seen, lambda master: master, formats, train=True, accelerator=pool.accelerator, devices=pool.devices,
            buffers=context.model.buffers,
        )  # fmt: skip
        self._all = context.model.bucket_of
        self._differentiate, self._touched = differentiate, touched
        self._copies: dict[int, tuple[tuple[int, int, bool], Tensor]] = {}
        """Low-precision copies by id of the master, with its version, address and ``requires_grad`` at that time."""
        self.unversioned: set[int] = set()
        self._steps = False
        """Whether an optimizer's own code is running."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.backward, torch.autograd.backward) and not self.returning:  # else a checkpoint's own
            return self._begin_backward(*args, **(kwargs or {}))
        if func == DATA and isinstance(args[0], nn.Parameter) and id(args[0]) in self._all:
            self.unversioned.add(id(args[0]))
            self._touched(args[0])
        if self._steps:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _begin_backward(
        self, tensors: Any, gradients: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        inputs: Any = None, **named: Any,
    ) -> None:  # fmt: skip
        """Take the arguments of both functions, which name the second one otherwise."""
        gradients = named.get("gradient", named.get("grad_tensors", gradients))
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads = [gradients] if isinstance(gradients, Tensor) else gradients or [None] * len(losses)
        self._differentiate(losses, grads, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)

    def run_backward(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run backward through user code, under this mode."""
        super()._backward(tuple(losses), tuple(gradients), True, False, None)

    # -- in low precision ---------------------------------------------------------------------------------------------

    def refuse_write(self, does: str, master: nn.Parameter) -> None:
        """Allow it: the write goes to the master itself."""

    def stand_in(self, value: Any) -> Any:
        """Return a low-precision copy if ``value`` is a master that is read as one, else ``value``."""
        if not (isinstance(value, nn.Parameter) and id(value) in self._masters and self._formats.differ(value)):
            return value
        now, known = (value._version, value.data_ptr(), value.requires_grad), self._copies.get(id(value))
        if known is not None and known[0] == now and not self._has_moved(value, known[1]):
            return known[1]
        with torch.inference_mode(False), torch.enable_grad():
            copied = _Seen.apply(value, self._formats.of(value), self.proxies)  # type: ignore[no-untyped-call]
        self._copies[id(value)] = (now, copied)
        return copied

    def _has_moved(self, master: nn.Parameter, copied: Tensor) -> bool:
        """Return whether ``master`` has changed without raising its version since the copy was made."""
        return id(master) in self.unversioned and not torch.equal(master.detach().to(copied.dtype), copied.detach())

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Let optimizers that are stepped meanwhile work on masters, in the dtypes of plain code."""
        if self._formats.low is None:
            yield
            return
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(lambda *_: self._stepping(False))
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._steps = False

    def _stepping(self, steps: bool) -> None:
        self._steps = steps
        assert self._formats.low is not None
        torch.set_default_dtype(self._formats.outside if steps else self._formats.low)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Enter the optimizer's code, and return its arguments with closures that run as training_step does."""
        self._stepping(True)

        def wrapped(argument: Any) -> Any:
            if not callable(argument):
                return argument

            def closure(*args: Any, **kwargs: Any) -> Any:
                self._stepping(False)
                try:
                    return argument(*args, **kwargs)
                finally:
                    self._stepping(True)

            return closure

        return (args[0], *map(wrapped, args[1:])), {key: wrapped(value) for key, value in kwargs.items()}


class _Seen(torch.autograd.Function):
    """Cast a master to low precision; cast its gradient back, and multiply it by the pending ``Proxies.factor``."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: torch.dtype, proxies: Proxies) -> Tensor:
        ctx.dtype, ctx.proxies = master.dtype, proxies
        return master.to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.to(ctx.dtype)
        return grad if ctx.proxies.factor == 1.0 else grad * ctx.proxies.factor, None, None
