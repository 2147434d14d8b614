"""One microbatch of a step, on a thread of its own: its ``training_step``, its calls, its tape.

    user code ── with the baton, its own attributes and random state ── [1]
    a layer is called ── its inputs are saved ── the turn of its slot ── its forward on the slot's worker ── [2]
    the loss ── weighed ── backward through user code and the stages that keep their graph ── [3]
    the tape, deepest call first ── the turn of its slot ── recomputation and backward ── gradients go on to the calls
    and the user code in front ── [4]
    a layer is called in a backward of user code, by a checkpoint ── see `repeated_calls` ── [5]

A planned call runs in its slot. Any other call (a layer that is called twice, a branch that the first window has not
shown) runs in whatever turn the microbatch has, with weights that are brought for it: slower, and right.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.outputs import detached, loss_of
from lightning_roundpipe.batches.weights import TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.engine.activations import Activations, Arriving
from lightning_roundpipe.engine.arguments import Arguments, collect
from lightning_roundpipe.engine.caller_modes import Surroundings, without_caller_modes
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.executor import LayerCall, Run
from lightning_roundpipe.engine.measured import MeasuredMemory
from lightning_roundpipe.engine.output_collectors import hand_over
from lightning_roundpipe.engine.randomness import USER_CODE, Seed
from lightning_roundpipe.engine.repeated_calls import connected, repeated
from lightning_roundpipe.engine.shared_memory import SharedOutputs
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.step_slots import StepSlots
from lightning_roundpipe.engine.sync import GivenUp, Runner, Signal, Trail
from lightning_roundpipe.engine.trace import Trace, TracedCall
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.faults.notes import FaultPlace, noted
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.planning.crossing import storage_bytes
from lightning_roundpipe.user_code.graph_cut import InputEdge, Part, filled_like, run_backward, seed_of
from lightning_roundpipe.user_code.interception import Inside
from lightning_roundpipe.user_code.mode import UserCodeMode
from lightning_roundpipe.user_code.module_state import AttributeView, observe


class Microbatch:
    """See above.

    It has many attributes because all that one thread knows of its way through a step is here, and nowhere else.

    Args:
        context: the parts of the engine that outlive the step.
        layout: the slots of the step.
        index: its number.
        after: reached when it may begin; None: at once.
        slots: those of its round, in order; empty without a plan.

    Attributes:
        begun: reached when its user code in front of the first layer is over.
        ready: reached when ``training_step`` has ended, and backward through user code, with ``output`` or ``error``.
        ended: reached when nothing of it runs any more.
        trail: where it is in user code.
        follows: that of the last microbatch of the round before, if it is the first one of its own. Turns keep the
            order within a round; rounds may run side by side.
    """

    def __init__(
        self, context: Context, layout: StepSlots, index: int, after: Signal | None = None, slots: Sequence[Slot] = ()
    ) -> None:
        self.spec = spec = layout.spec
        self.index, self.context, self._layout, self._slots, self._after = index, context, layout, slots, after
        self.runner = Runner(spec.scope, (slots[0].index if slots else 0) + index)
        self.begun, self.ready, self.ended = Signal(), Signal(), Signal()
        self.trail = Trail()
        self.follows: Trail | None = None
        self.output: Any = None
        self.loss: Tensor | None = None
        self.computed: Event | None = None
        self.error: Exception | None = None
        self.weight, self.differentiable = 0.0, False
        self.logs = LogRecorder(context.pool.devices)
        self.kept = AttributeView(context.shared) if spec.several else None
        self.read: set[ParamBucket] = set()
        self.made = Trace()
        """The calls that it has made."""
        self._memory = MeasuredMemory(context.pool) if spec.measures else None
        self.mode = self._user_code_mode()
        self._baton = context.pool.baton
        self._activations = Activations(index, spec.recorder, context.pool.devices[0])
        self._tape: list[LayerCall] = []
        self._uses: Counter[int] = Counter()
        self._next = 0
        """The first position of the trace that it may still call."""
        self._at = -1
        """The position of the slot whose turn it has."""
        self._left = 0
        """Slots in front of this position have been left."""
        self._worker: Worker | None = None
        """The worker that it ran on last, where its newest tensors are."""
        self._sections = 0
        self._phase, self._last = "forward", "before the first layer"
        self._draws = self._in_user_code = False
        self._activated: contextlib.AbstractContextManager[None] | None = None
        self._surroundings: Surroundings | None = None
        self._shared = SharedOutputs()
        self._written: list[nn.Parameter] = []
        """Parameters that user code has written to by their ``.data``, and that no call was made with since."""
        self._rewritten: set[int] = set()
        """Layers whose weights user code has written to: their calls run outside of the plan."""

    def _user_code_mode(self) -> UserCodeMode:
        context = self.context
        return UserCodeMode(
            context.model.bucket_of, self._read_master, context.model.formats, train=True,
            accelerator=context.pool.accelerator, devices=context.pool.devices, run_unlocked=self._run_unlocked,
            buffers=context.model.buffers, targets=TargetCounts() if self.spec.weights.counts_targets else None,
            copies=self.spec.copies,
        )  # fmt: skip

    @property
    def ended_early(self) -> bool:
        """Whether it has not made the last call of the trace."""
        return self._layout.trace is not None and self._next < len(self._layout.trace.calls)

    @property
    def device(self) -> Device | None:
        return self._worker.device if self._worker is not None else None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], Any], predecessors: Sequence[Microbatch] = ()) -> None:
        """Run ``function``, the user's step, and what follows it.

        Errors fail the step, which raises them in the main thread. The microbatches before this one return their losses
        first, as Lightning comes to them before.
        """
        self._baton.acquire(self.runner)
        try:
            self.spec.scope.check()
            if self._after is not None:
                self._baton.wait(self.runner, self._after.then)
            self._run(function)
            self._leave(len(self._slots))
        except BaseException as error:
            self._fail(error, predecessors)
        finally:
            self._end()

    def _run(self, function: Callable[[], Any]) -> None:
        """Run ``training_step`` and the backward of its loss."""
        with working(self), self.spec.thread_state.entered(), self.mode:
            self._train(function)
        with working(self):
            self._walk_tape()
        if not self.spec.overlaps:  # else the main thread has its generators back
            self.context.randomness.check()

    def _fail(self, error: BaseException, predecessors: Sequence[Microbatch]) -> None:
        if isinstance(error, Exception) and predecessors and self._phase == "forward":
            self._let_pass(error, predecessors)
        self.spec.scope.fail(error)  # the main thread raises it

    def _end(self) -> None:
        for call in self._tape:  # a gradient that reaches one of these later is an error
            call.gradients.close()
        self._tape.clear()
        self._surroundings = None  # which knows the mode, and that this
        self.mode.proxies.end()
        self._activations.drop(None)  # enqueues nothing, which a failed device would refuse
        self.trail.leave(math.inf)
        for signal in (self.begun, self.ready, self.ended):
            signal.set()
        self._baton.release()

    def _let_pass(self, error: Exception, predecessors: Sequence[Microbatch]) -> None:
        """After an ``error`` of user code, give up the turns, and wait for the losses of the microbatches before."""
        try:
            self._close_section()
            self.begun.set()
            self._leave(len(self._slots))
            for other in predecessors:
                self._baton.wait(self.runner, other.ready.then)
        except BaseException:
            return  # another one has failed
        if all(other.error is None for other in predecessors):
            self.error = error

    def _run_user_code(self, function: Callable[[], Any]) -> Any:
        self._enter_user_code()
        self._surroundings = Surroundings()
        with self._noted():
            return function()

    def _train(self, function: Callable[[], Any]) -> None:
        output = self._run_user_code(function)
        with self._noted():
            loss = loss_of(output)
            with torch._C.DisableTorchFunction():
                self._check_after()
                self._shared.assert_unmodified()
                self._refuse_late()
                if loss is not None:
                    self.weight = self.spec.weights.of(self, loss, self.mode.targets)
        self.begun.set()
        self.trail.leave(math.inf)
        self._phase, self.mode.returning = "backward", True
        if loss is not None:
            self._backward_of_loss(loss)
            self.loss = loss.detach()
        self.output = detached(output)
        del output, loss
        if self.kept is not None:
            self.kept.end()
        self.computed = self.device.compute.record() if self.device is not None else None
        self._close_section()
        self.context.randomness.check()
        self.ready.set()

    def _refuse_late(self) -> None:
        """Raise if user code has registered a parameter and computed with it: the optimizer does not know it."""
        if not self.mode.met_others:
            return
        model = self.context.model
        late = (n for n, p in model.module.named_parameters() if p.requires_grad and id(p) not in model.bucket_of)
        if name := next(late, None):
            raise RoundPipeError(
                f"training_step registered parameter {name!r} and computes with it, but the strategy finds parameters "
                "before a step. Register it between steps, for example in on_train_batch_start."
            )

    def _backward_of_loss(self, loss: Tensor) -> None:
        """Run backward from the loss through the user code behind the last layer [3]; hooks of user code run too."""
        self.differentiable = loss.requires_grad
        scales = self.context.model.formats.scales
        self._wait_in_user_code(scales, self.spec.version)
        scale = self.spec.weights.share(self) * scales.of(self.spec.version)
        if not loss.requires_grad or not scale:
            return
        seed, self.mode.proxies.factor = seed_of(scale, self.context.model.formats.low or loss.dtype)
        with torch._C.DisableTorchFunction():
            seeded = filled_like(loss, seed)
        for call in self._tape:
            call.gradients.expected = True
        with self._noted(), torch.autograd.set_multithreading_enabled(False):  # user code in it may call layers
            torch.autograd.backward(loss, seeded, retain_graph=True)

    def _noted(self) -> noted:
        return noted(lambda: FaultPlace(f"the code {self._last}", self._phase, self.index, self._slot, self.device))

    @property
    def _slot(self) -> Slot | None:
        return self._slots[self._at] if self._at >= 0 else None

    # -- user code ----------------------------------------------------------------------------------------------------

    def _enter_user_code(self, behind: int | None = None) -> None:
        """Enter a section of user code [1]; ``behind``: the call of the forward that the section is behind again."""
        context, spec = self.context, self.spec
        if self.follows is not None and self._phase != "backward":
            self._baton.wait(self.runner, functools.partial(self.follows.behind, self._next))
        for bucket in context.learned.read_by_user_code:
            self._wait_for(bucket, spec.version)
        if self.kept is not None and (self._phase == "forward" or not spec.overlaps):
            self.kept.enter()
        elif self.kept is None:
            observe(_Touched(context.attributes.touched))
        if context.model.buffers.replaced:
            context.model.buffers.settle()
        device = self.device or context.pool.devices[0]
        activated = device.activate()
        activated.__enter__()
        self._activated = activated
        seed = self._seed_of(self._sections if behind is None else behind + 1)
        self._draws = context.randomness.begin(USER_CODE, device, seed)
        self._sections += behind is None
        self._in_user_code = True
        if self._memory is not None and self._phase == "forward":
            self._memory.enter(device)

    def _seed_of(self, section: int) -> Seed:
        """Return the seed of a section of user code. Call number i of the forward ends section i."""
        return (*self.spec.seed, self.spec.first + self.index, -1 - section)

    def _close_section(self) -> None:
        if not self._in_user_code:
            return
        self._in_user_code = False
        if self._memory is not None:
            self._memory.leave(self.made.calls[-1] if self.made.calls else None)
        if self._draws:
            self.context.randomness.end(USER_CODE)
        if self.kept is not None:
            self.kept.leave()
        else:
            observe(None)
        activated, self._activated = self._activated, None
        if activated is not None:
            activated.__exit__(None, None, None)

    def _leave_sections(self) -> None:
        """Let the first microbatch of the next round follow, but not into buffers that a later call still changes."""
        held = self._layout.trace.held if self._layout.trace is not None else []
        self.trail.leave(min([self._next, *(first for first, last in held if first < self._next <= last)]))

    def _read_master(self, master: nn.Parameter) -> Tensor:
        """Return the values of a master that this step computes with."""
        bucket, spec = self.context.model.bucket_of[id(master)], self.spec
        known = self.context.learned.read_by_user_code
        if self._phase == "backward" and spec.overlaps and bucket not in known:
            raise RoundPipeError(
                f"code that runs in backward reads parameter {self.context.model.name_of(master)!r}, which no earlier "
                "batch read between layers, while the optimizer may be changing it. Let it read it from the first "
                "batch on."
            )
        self.read.add(bucket)
        self._wait_in_user_code(bucket, spec.version)
        return bucket.read(master)

    def _wait_for(self, what: Versioned, version: int) -> None:
        if not what.has(version):
            self._baton.wait(self.runner, functools.partial(what.when, version))

    def _wait_in_user_code(self, what: Versioned, version: int) -> None:
        if what.has(version):
            return
        if self._draws:
            raise RoundPipeError(
                "code between layers draws random numbers and reads weights that it did not read in the first batch, "
                "while the optimizer is changing them. Let it read them from the first batch on."
            )
        with self._outside():
            self._wait_for(what, version)

    def _run_unlocked(self, wait: Callable[[], Any]) -> Any:
        """Wait for a device while others run. A microbatch behind this one cannot come to the same code meanwhile."""
        if self._draws or not self._in_user_code:
            return wait()
        with self._outside():
            self._baton.release()
            try:
                return wait()
            finally:
                self._baton.acquire(self.runner)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Leave the section of user code for a wait."""
        if self.kept is not None:
            self.kept.leave()
        try:
            yield
        finally:
            if self.kept is not None:
                self.kept.enter()

    def _check_weights(self, layer: HostLayer) -> None:
        """Make sure that a call computes with the weights that ``layer`` has now.

        A step of one microbatch may write to the weights of a layer that has no call on the tape, as momentum teachers
        do: its calls then run outside of the plan. A write that every microbatch would repeat is an error.
        """
        if self.spec.several:
            self._refuse_own_writes()
            layer.assert_unmodified()
            return
        self._written += self.mode.written_by_data()
        mine = [master for master in layer.masters if any(master is other for other in self._written)]
        if not (mine or layer.is_written()):
            layer.assert_unmodified()
            return
        self._refuse_taped(layer)
        model = self.context.model
        if (
            self.context.options.staleness
            or model.formats.low is not None
            or any(id(p) in model.formats.hidden for p in mine)
        ):
            torch.autograd.graph.increment_version(mine)
            layer.assert_unmodified()
        if (updates := self.spec.updates) is not None:
            self._run_unlocked(updates.settle)
        layer.reattach()
        layer.bucket.refresh()
        layer.snapshot()
        self._rewritten.add(layer.index)
        self._written = [master for master in self._written if not any(master is other for other in mine)]

    def _check_after(self) -> None:
        """Check for writes to weights after ``training_step`` has returned."""
        if self.spec.several:
            self._refuse_own_writes()
            return
        self._written += self.mode.written_by_data()
        for layer in {call.layer.index: call.layer for call in self._tape}.values():
            if layer.is_written() or any(master is other for master in layer.masters for other in self._written):
                self._refuse_taped(layer)

    def _refuse_own_writes(self) -> None:
        if written := self.mode.written_by_data():
            raise RoundPipeError(
                f"training_step writes to parameter {self.context.model.name_of(written[0])!r} by its .data, while "
                "microbatches compute with it. Write to parameters between steps, for example in on_train_batch_end."
            )

    def _refuse_taped(self, layer: HostLayer) -> None:
        """Raise if a call of ``layer`` is on the tape: its recomputation would use other weights than its forward."""
        if any(call.layer is layer for call in self._tape):
            raise RoundPipeError(
                f"parameters of layer {layer.name!r} were written to within training_step, after a call whose backward "
                "computes it once more. Write to them between steps, for example in on_train_batch_end."
            )

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return the stand-in of ``master`` for a layer on ``device``."""
        if not self.context.model.bucket_of[id(master)].has(self.spec.version):
            raise RoundPipeError(
                f"a layer computes with parameter {self.context.model.name_of(master)!r} of another module, which it "
                "did not in the first batch, while the optimizer is changing it. Let it do so from the first batch on."
            )
        proxy = self.mode.proxies.of(master)
        return proxy if proxy.device == device else self.mode.proxies.on(proxy, device)

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor, layer: str = "") -> bool:
        """Take a gradient that autograd is about to accumulate into ``master`` itself; see `bypassed_gradients`.

        ``layer``: the layer whose backward this is; "": that of user code.
        """
        bucket = self.context.model.bucket_of[id(master)]
        known = self.spec.undisturbed or bucket in self.context.learned.read_by_user_code
        if bucket.read(master) is not master or master._backward_hooks or not known:
            name = self.context.model.name_of(master)
            raise RoundPipeError(
                f"layer {layer!r} computes with parameter {name!r} of another module, which did not show in the first "
                "batch. Pass the parameter to the layer."
                if layer
                else f"code uses parameter {name!r} itself, by another way than a torch function, while the step "
                "computes with a copy of it, the optimizer may change it, or a hook on it waits for its whole "
                "gradient. Give it parameter.clone() instead."
            )
        self.read.add(bucket)
        self.mode.proxies.add_bypassed(master, grad)
        return True

    # -- turns --------------------------------------------------------------------------------------------------------

    def _move(self, position: int, saved: Sequence[HostTensor] = (), *, lent: bool = True) -> None:
        """Leave the present slot and those in between, and wait for the turn of another one.

        ``saved``: what the coming call needs. It is brought once the turn is the next one, see `Activations.on`.
        """
        if position == self._at:
            return
        self._leave(position)
        self._at = position
        slot = self._slots[position]
        worker = self.context.pool.workers[slot.worker]
        coming = functools.partial(self._bring_ahead, worker, saved, lent=lent) if saved else None
        worker.enter(slot, self.index, self.runner, coming)

    def _bring_ahead(self, worker: Worker, saved: Sequence[HostTensor], *, lent: bool = True) -> None:
        try:
            with worker.device.activate():
                self._activations.bring_ahead(saved, worker.device, worker.room, lent=lent)
        except Exception:
            return  # this may be another one's thread; the call brings what is not there, and raises the error

    def _leave(self, position: int) -> None:
        for slot in self._slots[self._left : position]:
            self.context.pool.workers[slot.worker].turns.leave(slot, self.index)
        self._left = max(self._left, position)

    def _in_turn(
        self, position: int, saved: Sequence[HostTensor] = (), *, lent: bool = True
    ) -> contextlib.AbstractContextManager[tuple[Worker, Slot]]:
        """Return the worker and the slot of a planned call, in its turn. For ``saved`` and ``lent`` see `_move`."""
        self._move(position, saved, lent=lent)
        slot = self._slots[position]
        return contextlib.nullcontext((self.context.pool.workers[slot.worker], slot))

    @contextlib.contextmanager
    def _on_demand(self, slot: Slot) -> Iterator[tuple[Worker, Slot]]:
        """Open a slot that was made for one call, in whatever turn the microbatch has."""
        worker = self.context.pool.workers[slot.worker]
        memory = worker.spare if self._slots else worker.planned
        fresh = any(layer.index in self._rewritten for layer in slot.layers)
        worker.open(slot, memory, self.runner, None if fresh else self._slot)
        try:
            yield worker, slot
        finally:
            worker.close_slot(slot, memory)

    def _worker_on_demand(self, call: int) -> int:
        """Return the worker of a call that is not planned: that of the turn which the microbatch has."""
        if not self._slots:
            return call % len(self.context.pool.workers)
        self._move(max(self._at, 0))
        return self._slots[self._at].worker

    def _is_planned(self, call: LayerCall) -> bool:
        trace = self._layout.trace
        return trace is not None and call.index < len(trace.calls) and call.layer.index not in self._rewritten

    # -- layer calls --------------------------------------------------------------------------------------------------

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call on a worker [2]. User code calls this by way of the intercepted layer."""
        with torch._C.DisableTorchFunction():
            assert self._surroundings is not None
            self._surroundings.refuse(layer.name)
            self._check_weights(layer)
            self._shared.assert_unmodified()
            if self._phase == "backward":
                return self._call_again(layer, args, kwargs)
            if layer.sets_attributes:
                self._come_to_turn(layer)
            call = self._capture(layer, args, kwargs, self._uses[layer.index])
            traced = self._find(call)
            given = call.tensors
            self._close_section()
            if self.follows is not None:  # where it leaves layers out that the other one calls
                self._baton.wait(self.runner, functools.partial(self.follows.behind, self._next - 1))
            self.begun.set()
            result, run, self._worker = self._forward(call, taped=traced.taped)
            traced.taped, traced.worker = bool(call.kinds), self._worker.index
            self.made.calls.append(traced)
            layer.sets_attributes |= bool(run.written) or run.fills_attributes
            self._leave_sections()
            if self._memory is not None:
                outputs: list[Tensor] = []
                collect(result, set(), outputs)
                self._memory.called(traced, given, outputs)
                del outputs
            self._enter_user_code()
            result = self._deliver(call, run, given, result)
            if call.kinds and call.thread_state.grad:
                self._tape.append(call)
            elif call.slot is not None:
                self._layout.give_up(call.slot)
            return result

    def _deliver(self, call: LayerCall, run: Run, given: Sequence[Tensor], result: Any) -> Any:
        """Return a call's output to user code, with all else that the layer has done."""
        self._last = f"after layer {call.layer.name!r}"
        self.context.executors[0].deliver(call, run, given)
        self._shared.add(run.shared, call.layer.name)
        self._activations.drop(self.device)
        call.arguments.forget_originals()
        return hand_over(result)

    def _come_to_turn(self, layer: HostLayer) -> None:
        """Wait for the turn of a call of ``layer`` before its attributes are looked at, which it sets itself.

        Within the turn, it finds what the call of the microbatch before has set.
        """
        calls = self._layout.trace.calls if self._layout.trace is not None else []
        call = next((i for i in range(self._next, len(calls)) if calls[i].layer is layer), None)
        if call is None or not self._slots or layer.index in self._rewritten:
            return
        if (position := self._layout.forward_position(call)) > self._at:
            self._close_section()
            self._move(position)
            self._enter_user_code(self._sections - 2)  # the same section, with the same seed

    def _capture(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any], use: int) -> LayerCall:
        """Take a call's arguments apart, within user code."""
        context, spec = self.context, self.spec
        contents, state = context.attributes.contents(layer), context.attributes.of(layer)
        thread_state = context.thread_state()
        seed = (*spec.seed, spec.first + self.index, layer.index, use)
        attributes = context.attributes.containers(layer)
        if state is not None and state.carried:
            attributes = {**state.carried, **attributes}
        arguments = Arguments(args, kwargs, attributes, self.mode.stand_in)
        needs = [thread_state.grad and t.requires_grad for t in arguments.tensors]
        edges = [InputEdge(t, self._home_of(t)) for t, n in zip(arguments.tensors, needs, strict=True) if n]
        return LayerCall(
            layer, -1, self.index, seed, state, thread_state, self, arguments, contents, needs, edges, self.device,
            layer.trainable(),
        )  # fmt: skip

    def _find(self, call: LayerCall) -> TracedCall:
        """Find a call in the trace, and set its index."""
        layer, trace = call.layer, self._layout.trace
        self._uses[layer.index] += 1
        traced = TracedCall(layer, call.use, call.is_taped)
        if self._memory is not None:
            call.traced = traced
        found = trace.find(layer, self._next, taped=traced.taped) if trace is not None else None
        if found is not None:
            self._next = found + 1
            if not layer.mutable_buffers:  # else it is left behind the call, whose buffers the next one finds
                self._leave_sections()
        behind = len(self.made.calls) + (len(trace.calls) if trace is not None else 0)
        call.index = found if found is not None else behind
        return traced

    def _forward(self, call: LayerCall, *, taped: bool) -> tuple[Any, Run, Worker]:
        """Run a call in its turn. Returns what user code gets, the rest of it, and the worker."""
        layer, given = call.layer, call.tensors
        homes = list(map(self._home_of, given))
        position = self._layout.forward_position(call.index) if self._is_planned(call) else None
        keeps = position is not None and self._slots[position].phase == "fused"
        workers = self.context.pool.workers
        if position is not None:
            coming = self._elsewhere(call, homes, workers[self._slots[position].worker].device)
            where = self._in_turn(position, [*coming.values()], lent=not keeps)
        else:
            number = self._worker_on_demand(call.index)
            coming = self._elsewhere(call, homes, workers[number].device)
            where = self._on_demand(self._layout.on_demand("forward", call.index, layer, self.index, number))
            if taped and self._slots and call.place is None:
                sums = self._layout.sums_of(layer, call.use, self.index)
                call.slot = self._layout.on_demand("backward", call.index, layer, self.index, number, sums)
        with where as (worker, slot), worker.device.activate():
            device, bring = worker.device, self._activations.on
            with noted(lambda: FaultPlace(layer.title, self._phase, self.index, slot, device)):
                worker.wait_for_copies(self.runner)
                carries = taped and position is not None and call.index in self.spec.carry
                if carries:
                    worker.wait_for_products(self.runner)
                if taped and not keeps:
                    call.saved = [coming.get(i) or self._activations.save(t, device) for i, t in enumerate(given)]
                    worker.copying = [saved.ready for saved in call.saved if saved.ready is not None]
                inputs = [
                    bring(coming[i], device, lent=not keeps) if i in coming else Arriving(tensor, None)
                    for i, tensor in enumerate(given)
                ]
                with without_caller_modes():
                    result, run = self.context.executors[worker.index].forward(
                        call, slot, inputs, self.runner, Inside(layer.name), keep_graph=keeps,
                        carries=carries,
                    )  # fmt: skip
            if call.kinds and not (taped or keeps):  # it computes with a parameter of another module
                call.saved = list(map(self._activations.save, given, homes))
        return result, run, worker

    def _home_of(self, tensor: Tensor) -> Device | None:
        """Return the device that a tensor of user code is on, if possible the present one; None for the host.

        Emulated devices are told apart by the worker alone. So before the first layer, all is on the host there.
        """
        present, pool = self.device, self.context.pool
        if pool.accelerator is None or (present is not None and tensor.device == present.torch_device):
            return present
        return next((device for device in pool.devices if device.torch_device == tensor.device), None)

    def _elsewhere(self, call: LayerCall, homes: Sequence[Device | None], device: Device) -> dict[int, HostTensor]:
        """Return, by position, the tensors that have to come to ``device`` for a call."""
        there = [i for i, home in enumerate(homes) if home is not device]
        return {i: self._activations.save(call.tensors[i], homes[i]) for i in there}

    # -- backward -----------------------------------------------------------------------------------------------------

    def _walk_tape(self) -> None:
        """Run the backward of every call on the tape, deepest first [4]."""
        while self._tape:
            call = self._tape.pop()
            if call.gradients:
                self._backward(call)
            elif call.slot is not None:
                self._layout.give_up(call.slot)
            call.gradients.close()
            call.graph = call.slot = None

    def _backward(self, call: LayerCall) -> None:
        self._run_hooks(call)
        gradients, device = self._through(call)
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
            parts = [self._moved(part.tensor, part.home or home, home) for part in gradients.parts[index]]
            with self._user_code_in_backward(home, f"after layer {call.layer.name!r}"):
                total = functools.reduce(torch.add, parts)
                for hook in list(hooks.values()):
                    changed = hook(total)
                    total = total if changed is None else changed
            gradients.parts[index] = [Part(total, home, None)]

    def _through(self, call: LayerCall) -> tuple[list[Tensor | None], Device]:
        """Run a call's backward in its slot. Returns the gradients of its inputs, and the device that they are on."""
        layer = call.layer
        position = self._layout.backward_position(call.index, self._slots) if self._is_planned(call) else None
        if position is not None:
            number = self._slots[position].worker
        else:
            number = self._worker_on_demand(call.index)
        device = self.context.pool.workers[number].device
        parts = self._gradients_of(call, device)
        saved = call.brought if call.graph is None else []
        if position is not None:
            sent = [part for of_output in parts for part in of_output if isinstance(part, HostTensor)]
            where = self._in_turn(position, [*saved, *sent])
        else:
            if call.slot is None:
                sums = self._layout.sums_of(layer, call.use, self.index if self._slots else None)
                call.slot = self._layout.on_demand("backward", call.index, layer, self.index, number, sums)
            call.slot.worker = number
            where = self._on_demand(call.slot)
        with where as (worker, slot), worker.device.activate():
            self._refuse_unplaced(call, slot.sums.get(call.index))
            bring = self._activations.on
            with noted(lambda: FaultPlace(layer.title, "backward", self.index, slot, device)):
                if saved and call.carried:
                    worker.wait_for_products(self.runner)
                inputs = [bring(each, device) for each in saved]
                arriving = [
                    [bring(p, device) if isinstance(p, HostTensor) else Arriving(p, None) for p in of_output]
                    for of_output in parts
                ]
                del parts
                if position is not None and self.spec.ahead:
                    self._recompute_ahead(call, worker, slot)
                following = self._following(slot)
                self._activations.bring_ahead(following, device, worker.room)
                gradients = self.context.executors[worker.index].backward(
                    call, slot, inputs, arriving, self.mode.proxies.factor, self.runner,
                    Inside(layer.name, functools.partial(self.take_bypassed_grad, layer=layer.name)),
                )  # fmt: skip
            del inputs, arriving
            self._activations.drop(device, following)
            if position is not None and self.index == slot.microbatches[-1] and call.index in slot.gradients:
                worker.send(slot, [call.index])
            self._worker = worker
        return gradients, device

    def _refuse_unplaced(self, call: LayerCall, sums: HostGradSums | None) -> None:
        """Raise if a parameter is trained at the call for whose gradient there is no memory."""
        placed = sums.layout.trained if sums is not None else [False] * len(call.trained)
        if call.trained == placed:
            return
        for master, trained, place in zip(call.layer.masters, call.trained, placed, strict=True):
            if trained and not place and master.numel():
                raise RoundPipeError(
                    f"training_step switches on requires_grad of parameter {self.context.model.name_of(master)!r}, in "
                    f"layer {call.layer.name!r}, for which the step has reserved no gradient: it was off before. Set "
                    "requires_grad between steps, for example in on_train_batch_start."
                )

    def _moved(self, tensor: Tensor, device: Device, to: Device | None) -> Tensor:
        """Return a tensor on another device, whose compute stream waits for it, or on the host, which does."""
        if to is None:
            if self.context.pool.accelerator is None:
                return tensor
            sent = self._activations.send(tensor, device, None)
            assert isinstance(sent, HostTensor) and sent.ready is not None
            with GivenUp(self._baton, self.runner):
                sent.ready.wait()
            return sent.tensor.clone()
        moved, event = self._activations.move(tensor, device, to)
        if event is not None:
            self.context.pool.workers[to.index].follow(event, self.runner)
        return moved

    def _recompute_ahead(self, call: LayerCall, worker: Worker, slot: Slot) -> None:
        """Recompute all calls of a stage before the first one's gradients are used, which a GPU may still wait for."""
        for other in (call, *reversed(self._tape)):
            if other.index not in slot.calls:
                return
            if other.graph is None:
                inputs = [self._activations.on(each, worker.device) for each in other.brought]
                inside = Inside(other.layer.name)
                self.context.executors[worker.index].recompute(other, slot, inputs, self.runner, inside)

    def _gradients_of(self, call: LayerCall, device: Device) -> list[list[HostTensor | Tensor]]:
        """Take the gradients of a call's outputs. Those that are not on ``device`` begin to go to the host."""
        home = call.gradients.home or device
        parts, send = call.gradients.parts, self._activations.send
        if self._memory is not None and call.traced is not None:
            own, *others = (
                [part.tensor for of_output in each.gradients.parts for part in of_output]
                for each in (call, *self._tape)
            )
            self._memory.before_backward(call.traced, call.index, own, [*own, *itertools.chain(*others)])
        call.gradients.close()
        return [[send(p.tensor, p.home or home, device, p.made) for p in of_output] for of_output in parts]

    def _following(self, slot: Slot) -> list[HostTensor]:
        """Return what the next call on the tape is recomputed from, or all that are recomputed ahead, in ``slot``."""
        calls = reversed(self._tape) if self.spec.ahead else self._tape[-1:]
        mine = itertools.takewhile(lambda call: call.index in slot.calls and slot.phase == "backward", calls)
        return [saved for call in mine for saved in call.brought]

    def _hand_on(self, call: LayerCall, gradients: Sequence[Tensor | None], device: Device) -> None:
        roots, values = [], []
        for edge, gradient in zip(call.edges, gradients, strict=True):
            if gradient is None or edge.hand_over(gradient, device):
                continue
            roots.append(edge.edge)
            values.append(self._moved(gradient, device, edge.home))
        if not roots:
            return
        home = call.home or self.context.pool.devices[0]
        with self._user_code_in_backward(home, f"before layer {call.layer.name!r}"):
            meter = self._memory.meter(home) if self._memory is not None else None
            run_backward(roots, values, retain_graph=True)
            if meter is not None and call.traced is not None:
                peak = storage_bytes(values) + meter.read()
                call.traced.activation_bytes = max(call.traced.activation_bytes, peak)

    @contextlib.contextmanager
    def _user_code_in_backward(self, home: Device, where: str) -> Iterator[None]:
        self._last = where
        before, self._worker = self._worker, self.context.pool.workers[home.index]
        with self.spec.thread_state.entered(), self._noted():
            self._enter_user_code()
            try:
                with self.mode, torch.autograd.set_multithreading_enabled(False):
                    yield
            finally:
                self._close_section()
        self._worker = before

    # -- calls in backward --------------------------------------------------------------------------------------------

    def _call_again(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Repeat a call of the forward within the backward of user code [5]; the optimizer waits for it."""
        spec, known = self.spec, self.context.learned.read_by_user_code
        if spec.overlaps and layer.bucket not in known:
            raise RoundPipeError(
                f"layer {layer.name!r} is called in a backward, which no earlier batch did, while the optimizer may be "
                "changing its weights. Let it be called so from the first batch on."
            )
        self.read.add(layer.bucket)
        made, trace = self.made.calls, self._layout.trace
        again = repeated(layer, made, self._seed_of, draws=layer.index in self.context.randomness.draws)
        call = self._capture(layer, args, kwargs, made[again].use)
        call.index = again + len(trace.calls if trace is not None else made)
        call.place = functools.partial(self._give_again, call, made[again], call.tensors)
        given = call.tensors
        self._close_section()
        result, run, _ = self._forward(call, taped=call.is_taped)
        layer.sets_attributes |= bool(run.written) or run.fills_attributes
        self._enter_user_code(again)
        return self._deliver(call, run, given, result)

    def _give_again(
        self, call: LayerCall, made: TracedCall, inputs: Sequence[Tensor], outputs: list[Tensor], device: Device
    ) -> list[Tensor]:
        """Return the outputs of a repeated call on the device that the call of the forward left them on [5]."""
        self._worker = self.context.pool.workers[made.worker]
        home = self._worker.device
        moved = [self._moved(t.detach(), device, home) for t in outputs]
        if not call.thread_state.grad or not any(t.requires_grad for t in outputs):
            return moved
        call.gradients.home = home
        call.gradients.expected = True
        differentiate = functools.partial(self._differentiate_again, call)
        return connected(differentiate, outputs, moved, [t for t, n in zip(inputs, call.needs, strict=True) if n])

    def _differentiate_again(self, call: LayerCall) -> list[Tensor | None]:
        """Run the backward of a repeated call, whose gradients have come, within the backward of user code."""
        before = self._worker
        self._close_section()
        gradients, device = self._through(call)
        given = [
            None if g is None else self._moved(g, device, edge.home)
            for g, edge in zip(gradients, call.edges, strict=True)
        ]
        self._worker = before
        call.slot = None
        self._enter_user_code()
        return given


class _Touched:
    """Tells of what the only microbatch of a step sets on modules."""

    buffers: ClassVar[dict[int, Any]] = {}

    def __init__(self, touched: Callable[[Any], object]) -> None:
        self._touched = touched
        self.state = self

    def about_to_write(self, holder: Any, name: str, *, in_place: bool = False) -> None:
        self._touched(holder)
