"""Evaluation: validation, test and prediction batches, forward only. Several are in flight at once.

A batch makes its calls like a microbatch, without a tape, and its step runs whole, once. The first batch of a kind runs
alone, with a slot for each call. It shows the calls, how long they take, and which attributes of modules a step leaves
changed. Batches that are started ahead then follow one another through the stages of a forward plan:

    start ── user code, in the order of batches ── a call in the turn of its slot ── user code ── ... ── [1]
    the last call has returned ── the turn is left ── the step goes on when the batch before has ended ── [2]
    anything that the plan lacks ── the batch leaves its turns; when the batches before have ended and all slots are
    closed, it goes on alone; no more batches start ── [3]
    wait_for, show ── the caller holds the baton while its hooks see what the batch has left ── [4]

Alone in any case are steps that draw random numbers, write to weights, want gradients, exchange something with other
machines, have layers that set attributes, call a layer twice that changes its buffers, or give a layer an object again,
as `generate` does with a cache. A batch alone stays on one worker, so that a cache need not move. A call for which user
code wants gradients runs in place, on the user's own weights: autograd then sees what it sees in plain Lightning. So
does every later call of the batch.

A step that makes fewer calls than are known ends while batches before it still run: what it does behind its last call
may come before what they do behind theirs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.devices import Event
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.engine.arguments import collect, is_box
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.executor import LayerCall, Outcome
from lightning_roundpipe.engine.layer_calls import LayerCalls
from lightning_roundpipe.engine.microbatch import CallingThread
from lightning_roundpipe.engine.randomness import CallerRandomState
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.step_slots import StepSlots, Turns
from lightning_roundpipe.engine.step_spec import StepSpec
from lightning_roundpipe.engine.sync import Cancelled, CancelScope, Runner, Signal
from lightning_roundpipe.engine.trace import Trace, TracedCall
from lightning_roundpipe.engine.user_sections import UserSections, WeightGuard
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.faults.notes import remedied
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.planning.forward_plan import plan_forward
from lightning_roundpipe.planning.memory import BESIDE
from lightning_roundpipe.planning.schedule import Stage
from lightning_roundpipe.threads.task_thread import Task
from lightning_roundpipe.user_code.interception import Interceptor, intercepted
from lightning_roundpipe.user_code.mode import DATA, UserCodeMode
from lightning_roundpipe.user_code.module_state import AttributeView, SharedAttributes, observed_writes
from lightning_roundpipe.user_code.thread_state import apply_context
from lightning_roundpipe.user_code.torch_functions import IN_PLACE


class Kind(NamedTuple):
    """What batches of one kind of step have shown.

    Attributes:
        trace: the calls that they make.
        shared: the attributes of modules that they set.
    """

    trace: Trace
    shared: SharedAttributes

    def see(self, recorder: Recorder) -> None:
        """Take over the times of calls, which have ended."""
        for (_, _, position), times in recorder.call_seconds().items():
            call = self.trace.calls[position]
            call.forward_s = min(call.forward_s, *times)


class _Sections(UserSections):
    """Sections of a batch's user code. ``wait_for_before``: waits until the batch before has ended."""

    def __init__(self, turns: Turns, attributes: AttributeView, wait_for_before: Callable[[], None]) -> None:
        super().__init__(turns, attributes, "evaluation")
        self._wait_for_before = wait_for_before

    def enter(self, section: int | None = None) -> None:
        """Enter a section, the last one without a turn, and when the batch before has ended [2]."""
        if not self.turns.ended_early:
            self.turns.release()
            self._wait_for_before()
        super().enter(section)


class _Weights(WeightGuard):
    """The weights, which only a batch alone may write to.

    Args:
        make_exclusive: waits until nothing else is in flight.

    Attributes:
        writes: whether user code may have written to weights.
        in_place: whether it has wanted gradients: calls then run on the weights themselves.
    """

    def __init__(self, sections: UserSections, make_exclusive: Callable[[], None]) -> None:
        self._make_exclusive = make_exclusive
        self.writes = self.in_place = False
        super().__init__(sections, (), _EvaluationUserCode(sections.context, self.touched, sections.run_unlocked))

    def touched(self) -> None:
        """Be alone, as user code is about to write to weights, when no upload reads them. Calls read what it writes."""
        if not self.writes:
            self.writes = True
            self._make_exclusive()
            for device in self.context.pool.devices:
                device.weights_up.synchronize()
            self.context.model.join()

    def runs_in_place(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether user code wants gradients of the call, or has wanted some: an optimizer may have stepped."""
        if not self.in_place and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            found: list[Tensor] = []
            collect((args, kwargs), set(), found)
            self.in_place = any(layer.weights.trainable()) or any(tensor.requires_grad for tensor in found)
        return self.in_place

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return a copy of a parameter of another module for a layer on ``device``."""
        return self.context.model.values(master).to(device)

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor, layer: str = "") -> bool:
        """Leave a gradient that reached ``master`` itself to autograd, which adds it to ``.grad``."""
        return False


class _Calls(LayerCalls):
    """The calls of a batch.

    Args:
        close: lets no more batches start.

    Attributes:
        seen: lists, dicts and objects that each layer has got.
    """

    def __init__(self, sections: UserSections, weights: _Weights, close: Callable[[], None]) -> None:
        super().__init__(sections, weights, [])
        self._close = close
        self.seen: defaultdict[int, list[Any]] = defaultdict(list)

    def needs_order(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the plan does not have the call, or the layer gets an object that it may have written to."""
        trace, known = self.turns.slots.trace, self.seen[layer.index]
        objects = [value for value in (*args, *kwargs.values()) if is_box(value)]
        again = any(one is other for one in objects for other in known)
        known += objects
        return again or (trace is not None and trace.find(layer, self.turns.next, taped=False) is None)

    def forward(self, call: LayerCall, *, taped: bool) -> Outcome:
        outcome = super().forward(call, taped=taped)
        if outcome.written and not call.layer.seen.sets_attributes:
            self._close()
        return outcome


class Batch(CallingThread):
    """A batch of an evaluation.

    Args:
        flight: those that it is among.
        slots, round: the slots of its round.
        before: the batch before, if any is in flight.

    Attributes:
        exclusive: whether it has done what only a batch alone may do [3].
        done: ends of what it has enqueued on devices.
        around: the context variables of its step.
    """

    weights: _Weights
    layer_calls: _Calls

    def __init__(
        self, flight: Flight, slots: StepSlots, round: Sequence[Slot], index: int, before: Batch | None
    ) -> None:
        self._flight, self._before = flight, before
        self.attributes = AttributeView(flight.shared)
        turns = Turns(flight.context, slots, round, index, 1)
        sections = _Sections(turns, self.attributes, self._wait_for_before)
        calls = _Calls(sections, _Weights(sections, self.make_exclusive), flight.close)
        super().__init__(calls, before.sections.begun if before is not None else None)
        self.logs = LogRecorder(flight.context.pool.devices)
        self.output: Any = None
        self.exclusive = False
        self.failure: BaseException | None = None
        self.done: list[Event] = []
        self.around = contextvars.copy_context()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[[], Any]) -> None:
        with working(self), self.spec.thread_state.entered(), self.weights.mode:
            self.output = self.sections.run(function)
            with torch._C.DisableTorchFunction():
                for bucket in self.context.model.buckets if self.weights.writes else ():
                    bucket.refresh()
            self.attributes.end()
            used = {call.worker for call in self.layer_calls.trace.calls}
            self.done = [self.context.pool.devices[worker].compute.record() for worker in used]

    def _fail(self, error: BaseException, predecessors: Sequence[Any]) -> None:
        if not isinstance(error, Cancelled):
            self.failure = error

    def _end(self) -> None:
        """End behind the batches before."""
        try:
            self._release_successors()
            self._wait_for_before()
        except Cancelled:
            pass
        except BaseException as error:
            self.spec.scope.fail(error)
        finally:
            self._before = None
            self.layer_calls.seen.clear()
            super()._end()

    def _release_successors(self) -> None:
        """Let the batches behind go on."""
        self.turns.release()
        self.sections.exit()
        self.sections.release_successors()

    def _wait_for(self, signal: Signal) -> None:
        self.context.pool.baton.wait(signal.then)

    def _wait_for_before(self) -> None:
        if self._before is not None:
            self._wait_for(self._before.ended)

    def make_exclusive(self) -> None:
        """Wait until nothing else is in flight [3]. User code calls this."""
        if self.exclusive:
            return
        self.exclusive = True
        self._flight.close()
        self._release_successors()
        self._wait_for_before()
        for slot in self._flight.slots():
            self._wait_for(slot.gradients.sent)
        self.turns.go_on(self._flight.without_plan)
        self.sections.enter()

    def may_exchange(self) -> bool:
        """Return whether user code may exchange something with other machines, in the order of Lightning's own loop.

        A batch alone may, and all others of its kind then run alone, too.
        """
        if self._flight.known is not None or self.runner.inside is not None:
            return False
        self.make_exclusive()
        return True

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call. User code calls this by way of the intercepted layer."""
        weights, calls = self.weights, self.layer_calls
        with torch._C.DisableTorchFunction():
            in_place = weights.runs_in_place(layer, args, kwargs)
            if calls.needs_order(layer, args, kwargs):
                self.make_exclusive()
            if not in_place:
                if weights.writes:
                    layer.bucket.refresh()
                    layer.check.snapshot()
                calls.check(layer)
                result = calls.call(layer, args, kwargs)
                if weights.writes and self.turns.device is not None:
                    self.turns.device.weights_up.synchronize()
                    layer.bucket.join()
                return result
            weights.touched()
            self.context.model.buffers.settle()
        return self._flight.in_place(layer, args, kwargs)


class _EvaluationUserCode(UserCodeMode):
    """The torch function mode of a batch; tells before user code writes to weights.

    Args:
        touched: called before user code writes to a weight, or reads its ``.data``, through which it may write to it.
    """

    def __init__(
        self, context: Context, touched: Callable[[], None], run_unlocked: Callable[[Callable[[], Any]], Any]
    ) -> None:
        model, pool = context.model, context.pool
        super().__init__(
            model.bucket_of, model.values, model.formats, train=False,
            accelerator=pool.accelerator, devices=pool.devices, run_unlocked=run_unlocked, buffers=model.buffers,
        )  # fmt: skip
        self._all, self._touched = model.bucket_of, touched

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target, name = args[0] if args else None, getattr(func, "__name__", "")
        writes = func == DATA or (IN_PLACE.fullmatch(name) and name != "requires_grad_")
        if writes and isinstance(target, nn.Parameter) and id(target) in self._all:
            self._touched()
        return super().__torch_function__(func, types, args, kwargs)


@dataclass
class Round:
    """The slots that some batches share, one for each stage of a plan, and the numbers of these batches."""

    slots: StepSlots
    batches: range


class Flight:
    """Batches that are in flight together, from the first to the last.

    Args:
        known: what their kind has shown; None for a batch alone.
        size: how many are in flight at a time.
        in_place: runs a call of a layer on the user's own weights.

    Attributes:
        closed: whether no more may start [3].
        without_plan: makes the slots of calls of a batch alone.
    """

    def __init__(
        self, context: Context, known: Kind | None, version: int, size: int,
        in_place: Callable[[HostLayer, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        self.context, self.known, self.in_place = context, known, in_place
        self.scope = CancelScope(lambda: context.pool.fail(self.scope))
        self.shared = known.shared if known is not None else SharedAttributes(context.model.module)
        self.shared.begin()
        self.shared.touched = context.attributes.touched
        self.closed = False
        self.last: Batch | None = None
        self.tasks: list[Task[None]] = []
        self._version, self._size, self._count = version, size, 0
        self.without_plan = self._layout()
        self._rounds = [Round(self.without_plan, range(1 if known is None else 0))]

    def _layout(self, trace: Trace | None = None) -> StepSlots:
        state, weights = self.context.thread_state(), LossWeights(None, [1], [0])
        return StepSlots(self.context, StepSpec(self._version, state, self.scope, weights), trace)

    def slots(self) -> list[Slot]:
        """Return the slots that may be open."""
        return [slot for round_ in self._rounds for slot in round_.slots.all]

    def start(self, function: Callable[[], Any]) -> Batch:
        """Start a batch. The caller holds the baton."""
        index, self._count = self._count, self._count + 1
        begins = self.known is not None and index not in self._rounds[-1].batches
        if begins:
            self._add_round(index)
        round_, before = self._rounds[-1], self.last
        batch = self.last = Batch(self, round_.slots, round_.slots.all, index, before)
        if begins and before is not None:
            batch.turns.predecessor_progress = before.turns.progress
        self.tasks = [task for task in self.tasks if not task.finished]
        work = functools.partial(batch.around.run, batch.run, function)
        self.tasks.append(self.context.pool.thread(index % self._size).submit(work))
        return batch

    def _add_round(self, first: int) -> None:
        """Make the slots of the next batches, with the times that calls have taken so far."""
        assert self.known is not None
        workers, calls = self.context.pool.workers, self.known.trace.calls
        rooms = [w.planned.arena.buffer.numel() // BESIDE for w in workers if w.planned.arena.buffer is not None]
        nbytes = {call.layer.index: call.layer.weights.nbytes for call in calls}
        plan = plan_forward(
            [call.forward_s for call in calls], [call.layer.index for call in calls], nbytes, len(workers),
            min(rooms, default=None),
        )  # fmt: skip
        batches = range(first, first + plan.round_batches(len(workers), self._size))
        layout, before = self._layout(self.known.trace), self.slots()
        stages = [Stage(position, "forward", span.first, span.last) for position, span in enumerate(plan.forward)]
        slots = layout.lay_out(stages, batches)
        for slot in slots:  # with fewer stages than workers, rounds would run the same layers side by side
            changing = [layer for layer in slot.layers if layer.buffers.mutable]
            slot.gradients.after = [other for other in before if any(map(other.has, changing))]
        layout.enqueue()
        self._rounds.append(Round(layout, batches))

    def close_round(self) -> None:
        """Give up the turns of batches that are not started. Others make a new round. The caller holds the baton."""
        last = self._rounds[-1]
        started = max(self._count, last.batches.start)
        for batch in range(started, last.batches.stop):
            for slot in last.slots.all:
                self.context.pool.workers[slot.worker].tickets.release(slot, batch)
        last.batches = range(last.batches.start, min(started, last.batches.stop))

    def close(self) -> None:
        """Let no more batches start."""
        self.closed = True
        self.close_round()

    def forget(self, shown: float) -> Iterator[Recorder]:
        """Forget rounds whose batches have all ended; yield what was recorded of them."""
        for round_ in [r for r in self._rounds if r.batches.stop <= shown]:
            if round_.slots is not self.without_plan or shown == math.inf:
                self._rounds.remove(round_)
                yield round_.slots.spec.recorder


class Evaluations:
    """Evaluates as many batches at once as the caller starts. Lives as long as the engine.

    Args:
        finish: called behind each batch's step, in its last section of user code.
        account: called with what was recorded of batches.
    """

    def __init__(
        self, context: Context, interceptors: Sequence[Interceptor], finish: Callable[[], None],
        account: Callable[[Recorder], None], say: Callable[[str, str], object],
    ) -> None:  # fmt: skip
        self._context, self._interceptors, self._say = context, interceptors, say
        self._finish, self._account = finish, account
        self._known: dict[Hashable, Kind] = {}
        self._kind: Hashable = None
        self._flight: Flight | None = None
        self._around, self._streams = contextlib.ExitStack(), contextlib.ExitStack()
        self._before: CallerRandomState | None = None
        self._has_baton = False

    def knows(self, kind: Hashable) -> bool:
        """Return whether several batches of this kind of step may be in flight."""
        return kind in self._known

    @interrupts_deferred()
    def begin(self, kind: Hashable, version: int, in_flight: int, *, exclusive: bool = False) -> None:
        """Begin to run batches of ``kind``, ``in_flight`` at a time, or one exclusively, which shows its kind."""
        context, self._kind = self._context, kind
        known = self._known.pop(kind) if kind in self._known and exclusive else self._known.get(kind)
        context.attributes.begin()
        self._before = CallerRandomState(context.pool.devices) if exclusive else None
        self._flight = Flight(context, None if exclusive else known, version, in_flight, self._run_in_place)
        for around in (
            intercepted(self._interceptors),
            observed_writes(),
            context.randomness.paused(),
        ):
            self._around.enter_context(around)

    @interrupts_deferred()
    def start(self, function: Callable[[], Any]) -> Batch | None:
        """Start a batch's step. Return None if no more may start [3]."""
        flight = self._flight
        if flight is None or flight.scope.failed:
            return None
        batch = None
        with self._failing(), self._holding(flight):
            if not flight.closed:
                batch = flight.start(lambda: self._finished(function))
        return batch

    def _finished(self, function: Callable[[], Any]) -> Any:
        output = function()
        self._finish()
        return output

    def close_round(self) -> None:
        """Give up the turns of batches that are not started, for which slots would wait."""
        if (flight := self._flight) is not None:
            with self._failing(), self._holding(flight):
                flight.close_round()

    def _run_in_place(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward, accelerator = self._interceptors[layer.index].run, self._context.pool.accelerator
        if accelerator is None:
            return forward(*args, **kwargs)
        self._say(
            "gradients",
            f"layer {layer.name!r} is called with gradients (torch.enable_grad) in a validation, test or predict step, "
            "in which GPUs only run forward: from there on, the step's layers run on the CPU.",
        )
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), (args, kwargs))
        enabled, dtype = torch.is_autocast_enabled(accelerator), torch.get_autocast_dtype(accelerator)
        with torch.autocast("cpu", dtype) if enabled else contextlib.nullcontext():
            return forward(*args, **kwargs)

    # -- the caller, between batches ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End everything if an error comes up here, or has come up in the engine, and raise the first one."""
        flight = self._flight
        assert flight is not None
        try:
            yield
        except BaseException as error:
            flight.scope.fail(error)
            self.end(given_up=not isinstance(error, Cancelled))
            flight.scope.raise_error()
            raise

    @contextlib.contextmanager
    def _holding(self, flight: Flight) -> Iterator[None]:
        """Hold the baton, under the watchdog."""
        if self._has_baton:
            yield
            return
        pool, caller = self._context.pool, Runner(flight.scope, -1)
        pool.baton.acquire(caller, lambda: pool.wait(caller, flight.scope))
        try:
            yield
        finally:
            pool.baton.release()

    @interrupts_deferred()
    @remedied()
    def wait_for(self, batch: Batch) -> None:
        """Wait until ``batch``, the oldest one, has ended. Hooks have no turn any more."""
        self.pause_hooks()
        flight = self._flight
        assert flight is not None
        with self._failing():
            self._context.pool.wait_for(batch.ended, flight.scope)
            flight.scope.check()
            for event in batch.done:
                event.wait()
        self._see(flight, batch.index + 1)

    def _see(self, flight: Flight, shown: float) -> None:
        for recorder in flight.forget(shown):
            self._account(recorder)
            if flight.known is not None and not flight.closed and not flight.scope.failed:
                flight.known.see(recorder)

    @interrupts_deferred()
    @remedied()
    def show(self, batch: Batch) -> None:
        """Let hooks find what ``batch`` has left, and no batch run user code until the next `wait_for` [4]."""
        with self._failing():
            self._give_turn(batch.attributes)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of hooks that run while batches do."""
        self._give_turn()
        try:
            yield
        finally:
            self.pause_hooks()

    def _give_turn(self, view: AttributeView | None = None) -> None:
        """Give the caller's hooks the baton, a view of modules, and the streams that outputs are on."""
        flight = self._flight
        assert flight is not None
        if not self._has_baton:
            self._streams.enter_context(self._holding(flight))
            self._has_baton = True
            self._streams.enter_context(self._context.pool.devices[0].activate())
        flight.shared.enter_hooks(view)

    def pause_hooks(self) -> None:
        """Let batches run user code."""
        if self._flight is not None:
            self._flight.shared.hooks.exit()
        self._streams.close()
        self._has_baton = False

    @remedied()
    def result(self, batch: Batch) -> Any:
        """Return what the step of ``batch`` has returned, or raise what it has raised."""
        apply_context(batch.around)
        error, batch.failure = batch.failure, None  # the traceback refers to the batch
        try:
            if error is not None:
                self._before = None  # its calls are not all that its kind makes
                raise error
            return batch.output
        finally:
            del error

    @interrupts_deferred()
    def end(self, *, given_up: bool = False) -> None:
        """Bring everything to rest. Batches that have not ended are given up."""
        if (flight := self._flight) is None:
            return
        scope, model = flight.scope, self._context.model
        self.pause_hooks()
        self._flight = None
        try:
            if flight.last is not None and not flight.last.ended.is_set:
                scope.fail(Cancelled())
            with self._holding(flight):
                flight.close_round()
        except BaseException as error:
            scope.fail(error)
        self._context.pool.rest(scope, flight.tasks, given_up=given_up)
        if scope.failed:
            self._context.gradients.drop()  # downloads into them may have been aborted
        flight.shared.enter_hooks()
        flight.shared.hooks.exit()
        self._around.close()
        self._learn(flight)
        self._see(flight, math.inf)
        if not scope.failed:
            model.buffers.settle()
        model.buffers.take_history()
        if not isinstance(scope.error, Cancelled):
            scope.raise_error()

    def _learn(self, flight: Flight) -> None:
        """Take note of what a batch alone has shown, or that one has made other calls than those that are known."""
        before, self._before = self._before, None
        if flight.closed:
            self._known.pop(self._kind, None)
        batch = flight.last
        if before is None or batch is None or self._kind == ():
            return
        if batch.exclusive or batch.failure or flight.scope.failed:
            return
        calls = batch.layer_calls.trace.calls
        if calls and not before.has_moved and not any(map(_needs_exclusive, calls)):
            for call in calls:
                call.forward_s = math.inf
            self._known[self._kind] = flight.known = Kind(batch.layer_calls.trace, flight.shared)


def _needs_exclusive(call: TracedCall) -> bool:
    """Return whether a call must follow all calls of the batches before: each finds what those have left."""
    return call.layer.seen.sets_attributes or bool(call.use and call.layer.buffers.mutable)
