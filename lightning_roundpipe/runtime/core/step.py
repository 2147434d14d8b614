"""The microbatches of one accumulation window: their slots, and what they give.

    window ──► microbatch threads (`microbatch`) ──► `turns` ──► workers (`worker`)
                                                                       │
    losses and outputs ◄── weights of the microbatches ◄── sums on the host ◄┘

If possible (`Engine._may_overlap`), a step ``overlaps`` the next one: its outputs are returned as soon as all losses
are known, while its backward continues on other threads. At most two steps are in flight.

The first error on any thread fails the step: all its threads return, the devices come to rest, and the main thread
raises the error. It also fails the step after, but not the one before, which ends first so that its update is complete.
"""

from __future__ import annotations

import contextvars
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_roundpipe.batches.logs import recorded_logs
from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.off_plan import OFF_PLAN, OffPlan
from lightning_roundpipe.runtime.core.recompute_ahead import RecomputeAhead
from lightning_roundpipe.runtime.core.slots_on_arrival import SlotsOnArrival
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall, distinct_layers
from lightning_roundpipe.runtime.core.turns import MicrobatchOrder, PlannedSlots, Slot
from lightning_roundpipe.runtime.faults.notes import add_waiting_note
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.grad_readiness import GradReadiness
from lightning_roundpipe.runtime.optimizer.loss_handle import StepGradients
from lightning_roundpipe.runtime.reporting.alloc_retries import so_far
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task
from lightning_roundpipe.runtime.user_code.interception import Inside, current
from lightning_roundpipe.runtime.user_code.module_state import observed_writes
from lightning_roundpipe.runtime.user_code.thread_state import apply_context


class Step:
    """A training step: makes slots, runs microbatches, and waits for them.

    The class is large because it ties the subjects of one step together (slots, microbatches, sums of gradients,
    failure), and its subclass for manual optimization replaces single parts.

    Args:
        engine: the parts of the engine that outlive the step.
        seed: numbers that identify the step.
        weights: how much the microbatches count; also says how many there are.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        before: the step before, if it is still in flight.
        overlaps: whether the backward may continue after the outputs were returned.
        recorder: records calls and copies; by default a new one.
        cancel_scope: the step's cancel scope; by default a new one, which fails with that of the step before.

    Attributes:
        readiness: tells the optimizer's thread which buckets have all their gradients.
        slots: all slots so far, in the global order.
        plan: the plan that the step runs under; None if each call has a slot of its own.
        started: start of the step on the clock of ``time.perf_counter()``, or end of the step before if that is later.
        seconds: duration from ``started``, once the step is over.
        runs: the microbatches, for whom it has the attributes of `TaskStep`.
    """

    def __init__(
        self,
        engine: EngineContext,
        seed: tuple[int, ...],
        weights: LossWeights,
        updates: AsyncOptimizer | None = None,
        before: Step | None = None,
        *,
        overlaps: bool = False,
        recorder: Recorder | None = None,
        cancel_scope: CancelScope | None = None,
    ) -> None:
        self.engine = engine
        self.before = before
        self.seconds = 0.0
        self.readiness = GradReadiness(engine.model.buckets)
        self.weights = weights
        peers, count = engine.exchange.peers if engine.exchange is not None else None, weights.count
        if cancel_scope is None:
            cancel_scope = CancelScope(self._failed, before.cancel_scope if before is not None else None)
        self.spec = StepSpec(
            number=engine.next_step(),
            seed=(*seed, count * (peers.size if peers is not None else 1)),
            version=updates.wanted if updates is not None else 0,
            several=count > 1,
            overlaps=overlaps,
            undisturbed=engine.model.undisturbed,
            updates=updates,
            thread_state=engine.thread_state(),
            module_state=engine.learned.module_state,
            recorder=recorder or Recorder(),
            cancel_scope=cancel_scope,
            first=count * (peers.rank if peers is not None else 0),
        )
        self.slots: list[Slot] = []
        self._sums: dict[tuple[int, int], HostGradSums] = {}
        self._adding: dict[int, Slot] = {}
        """Without a plan, the last slot that adds to each sum, by the sum's id."""
        self.plan: Plan | None = None
        self._unclosed = self._running = 0
        self._counting = threading.Lock()
        self._all_closed = Waiter()
        self._tasks: list[Task[None]] = []
        self._side_by_side = False
        """Whether rounds run side by side; see `Slot`."""
        self.started = time.perf_counter()
        self.retries = so_far(engine.worker_pool.devices)
        """Number of allocation retries of each device before the step."""
        self.runs: list[MicrobatchTask] = []
        self.off_plan: OffPlan | None = None
        self._when_closed: Callable[[], None] | None = None
        self.gradients: StepGradients | None = None
        """The gradients behind the losses; None until these exist."""
        self.late: list[nn.Parameter] = []
        """Trained parameters that training_step has registered outside the layers in this step, and computed with."""
        self.has_loss = False
        """Whether every microbatch returned a loss; ``training_step`` may also skip a batch."""

    @property
    def cancel_scope(self) -> CancelScope:
        return self.spec.cancel_scope

    @property
    def everybody(self) -> Sequence[MicrobatchTask]:
        """All microbatches whose user code may read masters, in an order that does not depend on the plan."""
        return self.runs

    @property
    def traces(self) -> list[Trace]:
        """The calls of each microbatch."""
        return [run.trace for run in self.runs]

    @property
    def met_buffer(self) -> str:
        """A buffer that calls change and that user code of a microbatch reads or writes; empty if there is none."""
        return next((m.mode.met_buffer for m in self.everybody if m.index >= 0 and m.mode.met_buffer), "")

    # -- running ------------------------------------------------------------------------------------------------------

    def run_planned(self, plan: Plan, trace: Trace, functions: Sequence[Callable[[], Any]]) -> None:
        """Run all microbatches concurrently under ``plan``.

        Args:
            plan: the stages.
            trace: the calls that the stages consist of.
            functions: the user's ``training_step`` with the arguments of each microbatch.
        """
        self.plan = plan
        workers = len(self.engine.worker_pool.workers)
        self._side_by_side = plan.side_by_side(workers, len(functions)) and trace.torn_buffer() is None
        costs = self.engine.learned.costs
        unequal = costs is not None and costs.unequal
        self.engine.worker_pool.align_slots(workers if unequal else math.gcd(len(plan.stages()), workers))
        rounds = self._make_rounds(plan.stages(), trace, len(functions), plan.round_microbatches)
        self.slots = [slot for slots in rounds for slot in slots]
        order = MicrobatchOrder(range(len(functions))) if self._side_by_side else None
        slots = PlannedSlots(rounds, plan, self.cancel_scope, self._close, self._ahead().look, order)
        self._unclosed, self._running = len(self.slots), len(functions)
        self._allow_other_calls(len(functions))
        self.readiness.expect(self.slots, uploads=bool(self.engine.options.staleness))
        self.runs = [MicrobatchTask(self.engine, self, m, trace, slots) for m in range(len(functions))]
        for index, queue in enumerate(self.engine.worker_pool.queues):
            queue.append((slot for slot in self.slots if slot.worker == index), self._close)
        self._join(functions, together=True)

    def _allow_other_calls(self, microbatches: int) -> None:
        """Let microbatches leave the plan; not on several machines, which share plans and the order of gradients."""
        if self.engine.exchange is not None:
            return
        slots = SlotsOnArrival(
            self._make_slot_off_plan, lambda _: None, self._cancel, self._open, self._close, ahead=False
        )  # `Worker.open` prepares a slot, on behalf of the microbatch that makes the call
        before = self.before is not None and self.before.plan is not None
        self.off_plan = OffPlan(microbatches, slots, 1 + before)
        if self.before is not None and before:
            self.before.when_closed(self.off_plan.closed)

    def run_one_by_one(self, functions: Sequence[Callable[[], Any]]) -> None:
        """Run one microbatch after another, with a slot for each call; records a trace.

        Args:
            functions: the user's ``training_step`` with the arguments of each microbatch.
        """
        slots = SlotsOnArrival(self._make_slot, self._prepare, self._cancel, self._open, self._close)
        recent = self.engine.learned.recent if len(functions) == 1 else None
        self._running = len(functions)
        self.runs = [MicrobatchTask(self.engine, self, m, None, slots, recent) for m in range(len(functions))]
        self._join(functions, together=False)

    def _join(self, functions: Sequence[Callable[[], Any]], *, together: bool) -> None:
        worker_pool, given_up = self.engine.worker_pool, False
        contexts = [contextvars.copy_context() for _ in functions]
        trainer = getattr(self.engine.model.module, "_trainer", None)
        with recorded_logs(trainer, self._current_log), observed_writes():
            try:
                for index, (run, function, context) in enumerate(zip(self.runs, functions, contexts, strict=True)):
                    before = self.runs[:index]
                    thread = worker_pool.thread(index if together else 0)
                    work = functools.partial(context.run, self._run_task, run, function, before)
                    self._tasks.append(thread.submit(work))
                    if not together:
                        worker_pool.wait(self._tasks[-1].waiter, self.cancel_scope)
                        if self.cancel_scope.failed:
                            break
                if self.spec.overlaps:
                    self._wait_for_outputs()
                else:
                    self._wait_for_end()
            except BaseException as error:  # most likely a KeyboardInterrupt, or the watchdog's TimeoutError
                self._fail(error)
                given_up = True
            apply_context(contexts[-1])
            if self.spec.overlaps and not self.cancel_scope.failed:
                return  # `drain` waits for the rest
            self._rest(given_up)
        self.cancel_scope.raise_error()

    def _run_task(
        self, run: MicrobatchTask, function: Callable[[], Any], predecessors: Sequence[MicrobatchTask]
    ) -> None:
        try:
            run.run(function, predecessors)
        finally:
            if (off_plan := self.off_plan) is not None:
                off_plan.ended(run.index)
            self.ended()

    def _ahead(self) -> RecomputeAhead:
        return RecomputeAhead(self.engine, self.cancel_scope, lambda: self.runs)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _wait_for_outputs(self) -> None:
        """Wait until all outputs are computed and the step before, which nothing else waits for, is over."""
        for run in self.runs:
            self.engine.worker_pool.wait(run.passed, self.cancel_scope)
        if self.before is not None and not self.cancel_scope.failed:
            self.before._wait_for_end()
            self.started = max(self.started, self.before.started + self.before.seconds)
            self.before = None
            self.cancel_scope.part()
        if not self.cancel_scope.failed:
            for run in self.runs:
                if run.computed is not None:
                    run.computed.wait()
        if any(run.late for run in self.everybody) or (self.off_plan is not None and self.off_plan.left):
            self._wait_for_end()  # the next step's slots would come between those of these microbatches

    def _wait_for_end(self) -> None:
        worker_pool = self.engine.worker_pool
        for task in self._tasks:
            worker_pool.wait(task.waiter, self.cancel_scope)
        if self.plan is not None:  # slots that no microbatch entered may still have to open and close
            worker_pool.wait(self._all_closed, self.cancel_scope, unless_failed=True)

    def drain(self) -> None:
        """Wait for the end of an overlapping step.

        Raises:
            BaseException: the step's error, if it failed after its outputs were returned.
        """
        given_up = False
        try:
            self._wait_for_end()
        except BaseException as error:
            self._fail(error)
            given_up = True
        self._rest(given_up)
        self.cancel_scope.raise_error()

    def stop(self, error: BaseException) -> None:
        """Fail an overlapping step after an error of the main thread, and wait until its threads have returned.

        The caller raises ``error`` itself.
        """
        self.cancel_scope.fail(error)
        self._rest(given_up=False)
        self.cancel_scope.error = None

    def _fail(self, error: BaseException) -> None:
        add_waiting_note(error, [s for s in self.slots if s.opened and not s.closed])
        self.cancel_scope.fail(error)

    def _failed(self) -> None:
        """Stop the devices, unless the step before still needs them. Runs in the thread that fails the step."""
        self.readiness.fail()
        before = self.before
        if before is None or before.cancel_scope.failed:
            self.engine.worker_pool.abort()

    def _rest(self, given_up: bool) -> None:
        """Wait for all threads to return. After a failure, let the step before finish first, with its gradients."""
        worker_pool, tasks = self.engine.worker_pool, self._tasks
        if self.cancel_scope.failed:
            if self.before is not None:
                self.before._end_whole()
                tasks = [*self.before._tasks, *tasks]
            worker_pool.abort()
        worker_pool.rest(self.cancel_scope, tasks, given_up=given_up)
        if self.cancel_scope.failed:
            for queue in self.engine.worker_pool.queues:
                queue.clear()

    def _end_whole(self) -> None:
        """Finish this step, including its downloads of gradients, although the step after it has failed."""
        try:
            if not self.cancel_scope.failed:
                self._wait_for_end()
                for sums in self._sums.values():
                    sums.wait()
        except BaseException as error:  # a second Ctrl-C, or an error of this step
            self.cancel_scope.fail(error)
        self.cancel_scope.error = None  # the step after raises its own error, which may be this one

    def ended(self) -> None:
        """Count a microbatch as ended. Its thread calls this."""
        with self._counting:
            self._running -= 1
            last = not self._running
        if last:
            self.readiness.ended()
            self.seconds = time.perf_counter() - self.started

    @staticmethod
    def _current_log() -> Any:
        context = current()
        if isinstance(context, Inside):
            raise RoundPipeError(
                f"self.log was called in layer {context.name!r}, which runs once for each microbatch and again for its "
                "backward. Let the layer return what is to be logged, and call self.log in training_step itself."
            )
        if not isinstance(context, MicrobatchTask):
            raise RoundPipeError(
                "self.log was called from a thread that the user's code started inside training_step; log from "
                "training_step itself."
            )
        context.engine.learned.logs_in_backward |= context.walking
        return context.logs

    # -- slots --------------------------------------------------------------------------------------------------------

    def is_fused(self, call: int) -> bool:
        return self.plan is not None and call >= self.plan.fused.first

    def _new_slot(
        self,
        phase: Phase,
        calls: range,
        layers: Sequence[HostLayer],
        sums: dict[int, HostGradSums],
        microbatches: Sequence[int],
        round_: int = 0,
        predecessor: Slot | None = None,
        *,
        unpacks_once: bool = False,
    ) -> Slot:
        """Make the next slot of the global sequence."""
        index = self.engine.worker_pool.next_slot()
        return Slot(
            index, self._worker_of(index, layers), round_, phase, calls, layers, sums, microbatches, predecessor,
            self.spec.version, self.spec.recorder, self.cancel_scope, side_by_side=self._side_by_side,
            unpacks_once=unpacks_once,
        )  # fmt: skip

    def _make_rounds(
        self, stages: Sequence[Stage], trace: Trace, microbatches: int, round_microbatches: int
    ) -> list[list[Slot]]:
        """Make the slots of all rounds, indexed by round and stage, in their order in the global sequence."""
        rounds: list[list[Slot]] = []
        for number, start in enumerate(range(0, microbatches, round_microbatches)):
            served = range(start, min(start + round_microbatches, microbatches))
            before = rounds[-1] if rounds else [None] * len(stages)
            rounds.append(
                [
                    self._slot_of(stage, trace, served, number, predecessor)
                    for stage, predecessor in zip(stages, before, strict=True)
                ]
            )
        return rounds

    def _slot_of(self, stage: Stage, trace: Trace, microbatches: range, round_: int, predecessor: Slot | None) -> Slot:
        calls = range(stage.first, stage.last + 1)
        loaded = [trace.calls[c] for c in calls if stage.phase != "backward" or trace.calls[c].taped]
        sums = {}
        if stage.phase != "forward":
            for c in calls:
                if trace.calls[c].taped and (total := self.sums_of(trace.calls[c])) is not None:
                    sums[c] = total
        layers = distinct_layers(loaded)
        once = stage.unpacks_once
        return self._new_slot(stage.phase, calls, layers, sums, microbatches, round_, predecessor, unpacks_once=once)

    def _worker_of(self, index: int, layers: Sequence[HostLayer]) -> int:
        """Return the worker of a slot. Without a plan, or one to be made, a layer always runs on the same worker."""
        pinned = self.plan is None and not self.engine.learned.plans
        return (layers[0].index if pinned else index) % len(self.engine.worker_pool.workers)

    def _close(self, slot: Slot) -> None:
        worker = self.engine.worker_pool.workers[slot.worker]
        planned = self.plan is not None and slot.round != OFF_PLAN

        def close_it() -> None:
            worker.close_slot(slot)
            if self.plan is not None:
                self.readiness.closed(slot)
            if planned:
                self._closed()

        worker.post(close_it, self.cancel_scope)
        if planned:
            self.engine.worker_pool.queues[slot.worker].next()

    def sent(self, slot: Slot, call: int) -> None:
        """Note that the gradients of ``call`` are on their way to the host before ``slot`` is closed."""
        if self.plan is not None:
            self.readiness.sent(slot, call)

    def _closed(self) -> None:
        with self._counting:
            self._unclosed -= 1
            last, act, off_plan = not self._unclosed, self._when_closed, self.off_plan
        if last:
            self.seconds = time.perf_counter() - self.started
            self._all_closed.wake()  # from here on, the main thread may release the step
            if act is not None:
                act()
            if off_plan is not None:
                off_plan.closed()

    def when_closed(self, act: Callable[[], None]) -> None:
        """Call ``act`` when all slots of the plan are closed."""
        with self._counting:
            if self._unclosed:
                self._when_closed = act
                return
        act()

    def _make_slot(
        self, phase: Phase, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None, round_: int = 0
    ) -> Slot:  # fmt: skip
        totals = {call: sums} if sums is not None else {}
        return self._new_slot(phase, range(call, call + 1), [layer], totals, [microbatch], round_)

    def _make_slot_off_plan(
        self, phase: Phase, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None
    ) -> Slot:  # fmt: skip
        slot = self._make_slot(phase, microbatch, call, layer, sums, OFF_PLAN)
        self.readiness.expect([slot], uploads=bool(self.engine.options.staleness))
        return slot

    def _prepare(self, slot: Slot) -> None:
        worker = self.engine.worker_pool.workers[slot.worker]
        worker.post(lambda: worker.prepare(slot), self.cancel_scope)

    def _cancel(self, slot: Slot) -> None:
        worker = self.engine.worker_pool.workers[slot.worker]
        worker.post(lambda: worker.cancel(slot), self.cancel_scope)

    def _open(self, slot: Slot) -> None:
        self.slots.append(slot)
        for sums in slot.sums.values():
            slot.predecessor, self._adding[id(sums)] = self._adding.get(id(sums)), slot
        worker = self.engine.worker_pool.workers[slot.worker]
        worker.run(lambda: worker.open(slot), self.cancel_scope)

    def sums_of(self, call: TracedCall) -> HostGradSums | None:
        """Return the host sums of a call's gradients; None if nothing in its layer is trained."""
        key = (call.layer.index, call.use)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = self.engine.gradients.of(call.layer, call.use).begin(apart=self._side_by_side)
        return known if known.layout.nbytes else None

    # -- the outcome ---------------------------------------------------------------------------------------------------

    def finish(self) -> StepGradients | None:
        """Return the gradients behind the losses, once all are known; None if no microbatch returned a loss."""
        if not any(run.loss is not None for run in self.runs):
            return None
        self.has_loss = all(run.loss is not None for run in self.runs)
        self.gradients = self._gradients()
        return self.gradients

    def release(self) -> None:
        """Break the reference cycle with the microbatches, which would keep their tensors until a garbage collection.

        If there was no loss, also release the sums: no optimizer step will use them.
        """
        self.runs, self.before, self.off_plan, self._when_closed = [], None, None, None
        self.cancel_scope.end()
        for sums in self._sums.values():
            sums.end()
            if self.gradients is None:
                sums.consumed.wake()

    def _gradients(self) -> StepGradients:
        factor = self.weights.factor(self.runs)
        sums = [self._sums[key] for key in sorted(self._sums)]  # an order that does not depend on the plan
        proxies = [run.mode.proxies for run in self.everybody]
        read = set().union(*(run.segments.read for run in self.everybody))
        learned = self.engine.learned
        learned.read_by_user_code |= read  # makes a new frozenset: other threads may be iterating over the old one
        self.readiness.passed(learned.read_by_user_code)  # earlier batches have shown what backward reads
        # The optimizer's thread does not know late parameters, so gradients of this batch go to `.grad`.
        self.late = list({id(p): p for run in self.everybody for p in run.late}.values())
        readiness = self.readiness if self.spec.updates is not None and not self.late else None
        scale = self.engine.model.formats.scales.outside(self.spec.version)
        if (exchange := self.engine.exchange) is None:
            return StepGradients(sums, proxies, factor / scale, readiness)
        contribution = self.weights.contribution(self.runs)
        return StepGradients(sums, proxies, factor / scale, readiness, contribution, exchange.share)
