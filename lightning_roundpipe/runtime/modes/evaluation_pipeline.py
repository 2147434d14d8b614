"""Evaluation steps of several batches at once, forward only. Each runs whole, once, on a thread of its own.

A batch that runs alone shows which layers a step calls, how long they take, and which attributes of modules it leaves
changed. Batches that are begun ahead then follow one another through stages of these calls:

    begin ── start, start, ..., close_round ── each batch: user code ── layer call: its turn in a slot ── ... ── [1]
    user code runs one batch at a time, and section by section in the order of batches; the last section, behind the
    last call, begins when the batch before has ended: metrics see batches in order ── [2]
    a call that the stages do not have ── the batch gives up its turns; when the batches before it have ended and the
    slots of the others are closed, it goes on as it would alone; no more batches start ── [3]
    wait_for, show ── the caller has the user-code lock while its hooks see what the batch has left ── [4]
    end ── turns of batches that were not started are given up, and everything comes to rest ── [5]

What runs alone in any case: steps that draw random numbers, write to weights, want gradients, or call a layer again
with a key-value cache, as `generate` does.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.forward_plan import plan_forward
from lightning_roundpipe.planning.memory import BESIDE
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.turns import PlannedSlots, Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.core.worker_pool import WorkerPool
from lightning_roundpipe.runtime.faults.interrupts import interrupts_deferred
from lightning_roundpipe.runtime.faults.notes import noted, remedied
from lightning_roundpipe.runtime.layer_calls.surrounding_modes import Surroundings
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.sync import Cancelled, CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task
from lightning_roundpipe.runtime.user_code.interception import Interceptor, calling, intercepted
from lightning_roundpipe.runtime.user_code.module_state import AttributeView, SharedAttributes, observed_writes
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState

_FIRST = (-1,)
"""The priority of the caller's hooks for the user-code lock."""
_ALL = sys.maxsize
"""More sections of user code than a step has."""


class KnownStep(NamedTuple):
    """What batches of one kind of step have shown.

    Attributes:
        layers: the layers that they call, in order.
        seconds: the shortest time of each call.
        module_state: the attributes of modules that they set.
    """

    layers: list[HostLayer]
    seconds: list[float]
    module_state: SharedAttributes

    def see(self, recorder: Recorder) -> None:
        """Take over the times of calls, which have ended."""
        for (_, _, call), times in recorder.call_seconds().items():
            self.seconds[call] = min(self.seconds[call], *times)


class _Round(NamedTuple):
    """Batches that share slots, whether they are started or not."""

    batches: range
    slots: list[Slot]
    turns: PlannedSlots
    recorder: Recorder


class PipelinedBatch(Evaluation):
    """One of several batches in flight.

    It has many attributes and collaborators because it is a batch alone (`Evaluation`) with a place among others: turns
    in slots, an order of user code, and a view of modules.

    Args:
        pipeline: the pipeline.
        index: its number.
        step: what is known of its step.
        round_: the slots that it runs in.
        before: the batch before; None for the first one.
        forwards: see `Evaluation`.

    Attributes:
        ended: woken when its step has ended, and those of the batches before.
        output, error: what the step has returned or raised.
        kept: what it has set on modules.
    """

    def __init__(
        self, pipeline: EvaluationPipeline, index: int, step: KnownStep, round_: _Round,
        before: PipelinedBatch | None, forwards: Mapping[int, Callable[..., Any]],
    ) -> None:  # fmt: skip
        super().__init__(pipeline.engine, forwards, pipeline.cancel_scope, index, round_.recorder)
        self.ended = Waiter()
        self.output: Any = None
        self.error: BaseException | None = None
        self.kept = AttributeView(step.module_state)
        self._pipeline, self._step, self._turns, self._before = pipeline, step, round_.turns, before
        self._thread_state = self._engine.thread_state()
        self._left = self._has_lock = False
        self._section, self._over = 0, 0.0
        """The section of user code that it is in or comes to, and how many sections are over."""
        self._awaited: list[tuple[int, Waiter]] = []
        """The sections that batches behind wait for."""
        self._counting = threading.Lock()
        self._used: dict[Device, Event | None] = {}
        """The devices that it has run on, with the end of its work there."""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run_on_thread(self, function: Callable[[], Any], finish: Callable[[], None]) -> None:
        """Run ``function``, the step. ``finish`` is called in its last section of user code."""
        try:
            with calling(self), self._thread_state.entered(), self._mode, self._user_code, noted(self._place):
                self._enter_user_code()
                self._user_code.enter_context(self._engine.worker_pool.devices[0].activate())
                self.surroundings = Surroundings()
                self.output = function()
                self._watched.assert_unmodified()
                finish()
                self.kept.end()
                self._finish_uploads()
                self._follow_writes()
                self._used = {device: device.compute.record() for device in self._used}
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        self._leave_user_code()
        try:
            self._activations.move_to(None)
            self._give_up_turns()
            self._wait_for_others(_ALL)
        except Cancelled:
            pass
        except BaseException as error:
            self._cancel_scope.fail(error)
        self._before = None
        self._finish_section(math.inf)
        self.ended.wake()

    def wait_for_devices(self) -> None:
        for event in self._used.values():
            if event is not None:
                event.wait()

    # -- sections of user code ----------------------------------------------------------------------------------------

    def _enter_user_code(self) -> None:
        """Take the lock, when the batches before have left the section [2]."""
        if not self._left:
            is_last = self._section == len(self._step.layers)
            self._wait_for_others(_ALL if is_last else self._section)
        self._engine.user_lock.acquire((self.index,), self._cancel_scope)
        self._has_lock = True
        self.kept.enter()

    def _leave_user_code(self) -> None:
        if self._has_lock:
            self.kept.leave()
            self._has_lock = False
            self._engine.user_lock.release()

    def _wait_for_others(self, section: int) -> None:
        """Wait until the batches before have left ``section``; some make no more calls, and those before them do."""
        before = self._before
        while before is not None:
            with before._counting:
                waiter = None if before._over > section else Waiter()
                if waiter is not None:
                    before._awaited.append((section, waiter))
            if waiter is not None:
                self._cancel_scope.wait(waiter)
            before = before._before

    def _finish_section(self, over: float) -> None:
        """Note that so many sections are over, and wake the batches behind."""
        with self._counting:
            self._over = max(self._over, over)
            woken = [waiter for section, waiter in self._awaited if section < self._over]
            self._awaited = [(section, waiter) for section, waiter in self._awaited if section >= self._over]
        for waiter in woken:
            waiter.wake()

    def _give_up_turns(self) -> None:
        """Note that the batch runs in no more slots, so that those behind need not wait for it."""
        self._turns.finish(self.index)
        self._finish_section(len(self._step.layers) + 1)

    def _aside(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait`` while other batches run user code of other sections."""
        if not self._has_lock:
            return wait()
        self._leave_user_code()
        try:
            return wait()
        finally:
            self._enter_user_code()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _be_alone(self) -> None:
        """Wait until nothing else is in flight, to go on as a batch alone does [3]."""
        super()._be_alone()
        if self._left:
            return
        self._left = True
        self._pipeline.leave_stages()
        self._give_up_turns()
        self._leave_user_code()
        self._wait_for_others(_ALL)
        self._pipeline.wait_until_closed(self._cancel_scope)
        self._enter_user_code()
        self._order.begin()

    def _slot_for(self, layer: HostLayer) -> tuple[Slot, int]:
        if not self._left:
            known = self._step.layers
            number = next((n for n in range(self._section, len(known)) if known[n] is layer), None)
            slot = None if number is None else self._turns.upcoming(self.index, number, backward=False)
            if slot is not None and number is not None:
                if layer.sets_attributes:  # the call finds what that of the batch before has set
                    self._aside(functools.partial(self._wait_for_others, number + 1))
                return slot, number
            self._be_alone()
        return super()._slot_for(layer)

    def _enter(self, slot: Slot, call: Call) -> None:
        """Leave user code, and wait for the turn; inputs are uploaded before, when the batch is next in line."""
        self._used.setdefault(self._engine.worker_pool.workers[slot.worker].device)
        if not self._left:
            self._section = call.index + 1
            self._finish_section(self._section)
        self._leave_user_code()
        if self._left:
            return super()._enter(slot, call)
        worker = self._engine.worker_pool.workers[slot.worker]
        self._turns.approach(self.index, slot, functools.partial(self._bring, call, worker))
        self._turns.forward(self.index, call.index, call.layer)

    def _bring(self, call: Call, worker: Worker) -> None:
        with contextlib.suppress(Exception):  # this thread may be another batch's; the call reports what fails
            self._activations.bring(worker.device, [x for x in call.leaves if isinstance(x, HostTensor)], worker.room)

    def _run_forward(self, slot: Slot, call: Call, worker: Worker) -> Forward:
        if self._left:
            return super()._run_forward(slot, call, worker)
        run = worker.run if call.profile is None else worker.run_here  # plain calls find all that they need here
        return run(lambda: self._executors[worker.index].forward(slot, call, self._activations), self._cancel_scope)

    def _leave(self, slot: Slot, call: Call) -> None:
        if self._left:
            super()._leave(slot, call)
        else:
            if self._turns.is_over(slot, call.index):
                self._activations.leave()
            self._turns.after(self.index, slot, call.index)
        self._enter_user_code()


class EvaluationPipeline:
    """Runs evaluation steps, as many at once as the caller starts. Lives as long as the engine.

    It has many attributes and collaborators because threads, slots, the user-code lock, attributes of modules and hooks
    of the caller begin, take turns and end together here.

    Args:
        engine: the context of the engine.
        interceptors: of the layers.
        finish: called behind each batch's step, in its last section of user code.
        account: called with what was recorded of several batches.

    Attributes:
        active: whether batches are in flight, or have not been shown.
        cancel_scope: their cancel scope.
    """

    def __init__(
        self, engine: EngineContext, interceptors: Sequence[Interceptor], finish: Callable[[], None],
        account: Callable[[Recorder], None],
    ) -> None:  # fmt: skip
        self.engine, self.active = engine, False
        self._interceptors, self._finish, self._account = interceptors, finish, account
        layers = zip(engine.model.layers, interceptors, strict=True)
        self.forwards = {layer.index: stand_in.run for layer, stand_in in layers}
        self._known: dict[Hashable, KnownStep] = {}
        self._around = contextlib.ExitStack()
        self._has_lock = False
        self._starting = threading.Lock()
        self.cancel_scope, self._attributes = CancelScope(), engine.learned.module_state
        self._hook_streams = contextlib.ExitStack()
        self._rounds: list[_Round] = []
        self._tasks: list[Task[None]] = []
        self._last: PipelinedBatch | None = None
        self._count = self._shown = self._in_flight = 0
        self._kind: Hashable = None

    # -- batches that run alone ---------------------------------------------------------------------------------------

    def knows(self, kind: Hashable) -> bool:
        """Return whether several batches of this kind of step may be in flight."""
        return kind in self._known

    @contextlib.contextmanager
    def alone(self, evaluation: Evaluation, kind: Hashable) -> Iterator[None]:
        """Context of a batch that runs alone. It shows what there is to know of ``kind``, unless that is empty."""
        self._known.pop(kind, None)
        random_state = GlobalRandomState(self.engine.worker_pool.devices)
        module_state = SharedAttributes(self.engine.model.module)
        kept = evaluation.view = AttributeView(module_state)
        with self._intercepted(), observed_writes():
            kept.enter()
            try:
                yield
            finally:
                kept.end()
        if kind != () and evaluation.called and not evaluation.alone and not random_state.has_moved():
            known = KnownStep(evaluation.called, [math.inf] * len(evaluation.called), module_state)
            known.see(evaluation.recorder)
            self._known[kind] = known

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[None]:
        with intercepted(self._interceptors), self.engine.worker_pool.devices[0].step_settings():
            yield

    # -- several batches ----------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def begin(self, kind: Hashable, in_flight: int) -> None:
        """Begin to run batches of ``kind``, at most ``in_flight`` at a time."""
        pool = self.engine.worker_pool
        self._kind, self._in_flight, self._count, self._shown = kind, in_flight, 0, 0
        self._attributes, self.cancel_scope = self._known[kind].module_state, CancelScope(pool.abort)
        self._attributes.begin()
        self._rounds, self._tasks, self._last = [], [], None
        self._around.enter_context(self._intercepted())
        self._around.enter_context(observed_writes())
        self.active = True

    @interrupts_deferred()
    def start(self, function: Callable[[], Any]) -> PipelinedBatch | None:
        """Start a batch's step. Return None if a batch has left the stages, so that no more may start."""
        with self._starting:
            if self._kind not in self._known or self.cancel_scope.failed:
                return None
            if not self._rounds or self._count not in self._rounds[-1].batches:
                self._add_round()
            index, self._count = self._count, self._count + 1
            known, round_ = self._known[self._kind], self._rounds[-1]
        batch = self._last = PipelinedBatch(self, index, known, round_, self._last, self.forwards)
        thread = self.engine.worker_pool.thread(index % self._in_flight)
        work = functools.partial(contextvars.copy_context().run, batch.run_on_thread, function, self._finish)
        self._tasks = [task for task in self._tasks if not task.finished] + [thread.submit(work)]
        return batch

    def _add_round(self) -> None:
        """Make the slots of the next batches, with the times that calls have taken so far."""
        pool, known, count = self.engine.worker_pool, self._known[self._kind], len(self.engine.worker_pool.workers)
        self._forget(self._shown)
        rooms = [worker.arena.buffer.numel() // BESIDE for worker in pool.workers if worker.arena.buffer is not None]
        nbytes = {layer.index: layer.nbytes for layer in known.layers}
        plan = plan_forward(
            known.seconds, [layer.index for layer in known.layers], nbytes, count, min(rooms, default=None)
        )
        batches = range(self._count, self._count + plan.round_batches(count, self._in_flight))
        recorder, slots = Recorder(), []
        for span in plan.forward:
            index, layers = pool.next_slot(), dict.fromkeys(known.layers[call] for call in span.calls())
            slots.append(
                Slot(
                    index, index % count, 0, "forward", span.calls(), list(layers), {}, batches, recorder=recorder,
                    cancel_scope=self.cancel_scope,
                )
            )  # fmt: skip
        turns = PlannedSlots([slots], plan, self.cancel_scope, self._close)
        self._rounds.append(_Round(batches, slots, turns, recorder))
        for worker, queue in enumerate(pool.queues):
            queue.append((slot for slot in slots if slot.worker == worker), self._close)

    def _close(self, slot: Slot) -> None:
        worker = self.engine.worker_pool.workers[slot.worker]
        worker.post(lambda: worker.close_slot(slot), self.cancel_scope)
        self.engine.worker_pool.queues[slot.worker].next()

    def _forget(self, ended: float) -> None:
        """Forget rounds whose batches have all ended, but for their times."""
        known = self._known.get(self._kind)
        for round_ in [r for r in self._rounds if r.batches.stop <= ended]:
            self._rounds.remove(round_)
            self._account(round_.recorder)
            if known is not None and not self.cancel_scope.failed:
                known.see(round_.recorder)

    def leave_stages(self) -> None:
        """Let no more batches start: one makes other calls than those that are known."""
        with self._starting:
            self._known.pop(self._kind, None)
        self.close_round()

    def close_round(self) -> None:
        """Give up the turns of batches that are not started, for which slots would wait. Others make a new round."""
        with self._starting:
            for round_ in self._rounds[-1:]:
                self._rounds[-1] = round_._replace(batches=range(round_.batches.start, self._count))
                for index in range(self._count, round_.batches.stop):
                    round_.turns.finish(index)

    def wait_until_closed(self, cancel_scope: CancelScope) -> None:
        """Wait until all slots are closed."""
        for round_ in list(self._rounds):
            for slot in round_.slots:
                slot.wait_until_closed(cancel_scope)

    # -- the caller, between batches ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End everything if an error comes up here, or has come up in the engine, and raise the first one."""
        try:
            yield
        except BaseException as error:
            self.cancel_scope.fail(error)
            self.end(given_up=not isinstance(error, Cancelled))
            self.cancel_scope.raise_error()
            raise

    @interrupts_deferred()
    @remedied()
    def wait_for(self, batch: PipelinedBatch) -> None:
        """Wait until ``batch``, the oldest one, has ended. Hooks have no turn any more."""
        self.pause_hooks()
        with self._failing():
            self.engine.worker_pool.wait(batch.ended, self.cancel_scope)
            batch.wait_for_devices()
            self.cancel_scope.check()
        self._shown = batch.index + 1

    @interrupts_deferred()
    @remedied()
    def show(self, batch: PipelinedBatch) -> None:
        """Let hooks find what ``batch`` has left, and no batch run user code until the next `wait_for` [4]."""
        with self._failing():
            self._give_turn(batch.kept)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of hooks that run while batches do."""
        self._give_turn()
        try:
            yield
        finally:
            self.pause_hooks()

    def _give_turn(self, batch: AttributeView | None = None) -> None:
        """Give the caller's hooks the user-code lock, a view of modules, and the streams that outputs are on."""
        with contextlib.suppress(Cancelled):  # the next `wait_for` raises the error
            self.engine.user_lock.acquire(_FIRST, _Caller(self.engine.worker_pool, self.cancel_scope))
            self._has_lock = True
        self._hook_streams.enter_context(self.engine.worker_pool.devices[0].activate())
        self._attributes.come_to(batch)

    def pause_hooks(self) -> None:
        """Let batches run user code."""
        self._attributes.hooks.leave()
        self._hook_streams.close()
        if self._has_lock:
            self._has_lock = False
            self.engine.user_lock.release()

    @remedied()
    def result(self, batch: PipelinedBatch) -> Any:
        """Return what the step of ``batch`` has returned, or raise what it has raised."""
        error, batch.error = batch.error, None  # the traceback refers to the batch
        try:
            if error is not None:
                raise error
            return batch.output
        finally:
            del error

    @interrupts_deferred()
    def end(self, *, given_up: bool = False) -> None:
        """Bring everything to rest [5]. Batches that have not ended are given up."""
        if not self.active:
            return
        self.active = False
        self.pause_hooks()
        pool, scope = self.engine.worker_pool, self.cancel_scope
        try:
            if self._last is not None and not self._last.ended.woken:
                scope.fail(Cancelled())
            if not scope.failed:
                self.close_round()
                self.wait_until_closed(_Caller(pool, scope))
        except BaseException as error:
            scope.fail(error)
        pool.rest(scope, self._tasks, given_up=given_up)
        if scope.failed:
            for queue in pool.queues:
                queue.clear()
            self.engine.gradients.drop()  # downloads into them may have been aborted
        self._forget(math.inf)
        self._attributes.come_to()
        self._attributes.hooks.leave()
        self._last, self._tasks = None, []
        self._around.close()
        if not scope.failed:
            self.engine.model.buffers.settle()
        self.engine.model.buffers.take_history()


class _Caller(CancelScope):
    """Waits of the caller's thread, which are under the watchdog."""

    def __init__(self, pool: WorkerPool, scope: CancelScope) -> None:
        super().__init__()
        self._pool, self._scope = pool, scope

    def wait(self, waiter: Waiter) -> None:
        self._pool.wait(waiter, self._scope, unless_failed=True)
        self._scope.check()
