"""A training step: the microbatches of one window, their slots, and what they give.

    begin ── the plan's stages become slots, behind those of the step before ── microbatches begin in order ── [1]
    the losses ── returned as soon as all are known, if the backward may go on beside the next step ── [2]
    the end ── all microbatches have ended, and all slots are closed ── [3]

Without a plan, in the first window, microbatches run one after another, and each call has a slot of its own. The first
error on any thread fails the step: all its threads return, the devices come to rest, and the main thread raises it.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.microbatch import Microbatch, MicrobatchResult
from lightning_roundpipe.engine.slots import Slot, StepSpec
from lightning_roundpipe.engine.step_slots import StepSlots, Turns
from lightning_roundpipe.engine.sync import CancelScope
from lightning_roundpipe.faults.notes import add_waiting_note
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.threads.task_thread import Task
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.user_code.thread_state import apply_context


def training_spec(
    context: Context, seed: tuple[int, ...], weights: LossWeights, updates: AsyncOptimizer | None,
    plan: Plan | None = None, *, measures: bool = False, overlaps: bool = False, shares_state: bool = False,
) -> StepSpec:  # fmt: skip
    """Return what is fixed for a step of training; for the arguments see `StepSpec`."""
    peers, count = context.exchange.peers if context.exchange is not None else None, weights.count
    return StepSpec(
        seed=(*seed, count * (peers.size if peers is not None else 1)),
        first=count * (peers.rank if peers is not None else 0),
        version=updates.wanted if updates is not None else 0,
        plan=plan,
        measures=measures,
        overlaps=overlaps,
        shares_state=shares_state,
        undisturbed=context.model.undisturbed,
        updates=updates,
        readiness=GradReadiness(context.model.buckets, reports_uploads=bool(context.options.staleness)),
        loss_weights=weights,
        thread_state=context.user.thread_state(),
        scope=CancelScope(),
    )


@dataclass
class WindowResult:
    """What the microbatches of a window have given.

    Attributes:
        microbatches: those that have a result: all, or those before the one that failed.
        gradients: the gradients behind their losses; None if there are none.
        error: what ``training_step`` of the microbatch behind them has raised.
        show: lets hooks find what a microbatch has left on modules. Call it for each, in order, the failed one last.
    """

    microbatches: list[MicrobatchResult] = field(default_factory=list)
    gradients: StepGradients | None = None
    error: Exception | None = None
    show: Callable[[int], None] = lambda microbatch: None


class Step:
    """See above.

    Args:
        spec: what its slots and microbatches have in common.
        before: the step before, if it is still in flight.

    Attributes:
        started, seconds: its time on the clock of ``time.perf_counter()``.
    """

    slots_type: type[StepSlots] = StepSlots
    microbatch_type: type[Microbatch] = Microbatch

    def __init__(self, context: Context, spec: StepSpec, before: Step | None = None) -> None:
        self.context, self.spec, self.before, plan = context, spec, before, spec.plan
        assert spec.readiness is not None
        self._readiness, spec.scope.on_failure = spec.readiness, self._failed
        workers, count = len(context.pool.workers), spec.loss_weights.count
        trace, own_sums = None, False
        if plan is not None:
            trace, own_sums = context.learned.trace, plan.side_by_side(workers, count)
        self.slots = self.slots_type(context, spec, trace, own_sums=own_sums)
        self.microbatches: list[Microbatch] = []
        self.gradients: StepGradients | None = None
        self.started, self.seconds = time.perf_counter(), 0.0
        self.retries_before = [device.allocation_retries() for device in context.pool.devices]
        self._tasks: list[Task[None]] = []
        self._running = count
        if before is not None:  # which may fail at any time, and this step with it, so this comes last
            spec.scope.follow(before.spec.scope)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, functions: Sequence[Callable[[], Any]], *, in_order: bool) -> None:
        """Run ``training_step`` of all microbatches.

        ``in_order``: whether each begins when the one before has ended.
        """
        contexts = [contextvars.copy_context() for _ in functions]

        def wait() -> None:
            self._begin(functions, contexts, in_order=in_order)
            if self.spec.overlaps:
                self._wait_for_outputs()
                if self.spec.shares_state:
                    self.context.pool.main.take(self.spec.scope)
            else:
                self._wait_for_end()

        try:
            self._end_behind(wait, overlaps=self.spec.overlaps)
        finally:
            apply_context(contexts[-1])

    def _begin(
        self, functions: Sequence[Callable[[], Any]], contexts: Sequence[contextvars.Context], *, in_order: bool
    ) -> None:
        """Lay out slots, and start the microbatches [1]."""
        pool, count = self.context.pool, len(functions)
        with self.context.pool.main.holding(self.spec.scope):
            size, rounds = count, [list[Slot]()]
            if self.spec.plan is not None:
                size = min(self.spec.plan.round_microbatches, count)
                rounds = self._lay_out(self.spec.plan, size, count)
            for index in range(count):
                before = self.microbatches[-1] if index else None
                after = None if before is None else before.ended if in_order else before.sections.begun
                turns = Turns(self.context, self.slots, rounds[index // size], index, len(pool.workers))
                microbatch = self.microbatch_type(turns, after)
                if before is not None and self.spec.plan is not None and index % size == 0:
                    microbatch.turns.predecessor_progress = before.turns.progress
                microbatch.ended.then(self._microbatch_ended)
                self.microbatches.append(microbatch)
        # A thread may still run a microbatch of the step before; so may all others of this step begin only later.
        for index, (microbatch, function) in enumerate(zip(self.microbatches, functions, strict=True)):
            work = functools.partial(contexts[index].run, microbatch.run, function, self.microbatches[:index])
            self._tasks.append(pool.thread(index).submit(work))

    def _lay_out(self, plan: Plan, size: int, count: int) -> list[list[Slot]]:
        """Return the slots of each round of ``size`` microbatches."""
        costs = self.context.learned.costs
        if costs is not None and costs.unequal:
            self.context.pool.align_slots()
        starts = range(0, count, size)
        rounds = [
            self.slots.lay_out(plan.stages(), range(start, min(start + size, count)), number)
            for number, start in enumerate(starts)
        ]
        self.slots.enqueue()
        return rounds

    def _microbatch_ended(self) -> None:
        self._running -= 1
        if not self._running:
            self.spec.copies.clear()
            self._readiness.ended()
            self.seconds = time.perf_counter() - self.started

    # -- the end ------------------------------------------------------------------------------------------------------

    def _wait_for_outputs(self) -> None:
        """Wait until all outputs are there [2], and the step before, which nothing else waits for, is over."""
        for microbatch in self.microbatches:
            self.context.pool.wait_for(microbatch.ready, self.spec.scope)
        if self.before is not None and not self.spec.scope.failed:
            self.before._wait_for_end()
            self.started = max(self.started, self.before.started + self.before.seconds)
            self.before = None
            self.spec.scope.unfollow()
        for microbatch in self.microbatches:
            for event in microbatch.result.computed if not self.spec.scope.failed else ():
                event.wait()

    def _wait_for_end(self) -> None:
        """Wait until all microbatches have ended; then all slots are closed [3]."""
        for task in self._tasks:
            self.context.pool.wait(task.waiter, self.spec.scope)

    def drain(self) -> None:
        """Wait for the end of an overlapping step, and raise its error if it has failed since `run`."""
        self._end_behind(self._wait_for_end)

    def _end_behind(self, wait: Callable[[], None], *, overlaps: bool = False) -> None:
        """Call ``wait``. Behind it nothing of the step runs, unless it ``overlaps``. Raises the step's error."""
        given_up = False
        try:
            wait()
        except BaseException as error:  # most likely a KeyboardInterrupt, or the watchdog's TimeoutError
            add_waiting_note(error, [slot for slot in self.slots.all if slot.opened])
            self.spec.scope.fail(error)
            given_up = True
        if not overlaps or self.spec.scope.failed:
            self._rest(given_up=given_up)
            self.spec.scope.raise_error()

    def stop(self, error: BaseException) -> None:
        """Fail an overlapping step after an error of the main thread, and wait until its threads have returned."""
        self.spec.scope.fail(error)
        self._rest(given_up=False)
        self.spec.scope.error = None

    def _failed(self) -> None:
        """Stop the threads, and the devices unless the step before still needs them. The failing thread calls this."""
        self._readiness.fail()
        self.context.pool.baton.wake(self.spec.scope)
        if self.before is None or self.before.spec.scope.failed:
            self.context.pool.fail(self.spec.scope)

    def _rest(self, *, given_up: bool) -> None:
        """Wait for all threads to return. After a failure, let the step before finish first, with its gradients."""
        pool, tasks = self.context.pool, self._tasks
        self.context.pool.main.hand_on()
        if self.spec.scope.failed:
            if self.before is not None:
                self.before._end_whole()
                tasks = [*self.before._tasks, *tasks]
            pool.fail(self.spec.scope)
        pool.rest(self.spec.scope, tasks, given_up=given_up)

    def _end_whole(self) -> None:
        """Finish this step, with its downloads of gradients, although the step after it has failed."""
        try:
            if not self.spec.scope.failed:
                self._wait_for_end()
                for worker in self.context.pool.workers:
                    self.context.pool.wait(worker.sender.fence(), self.spec.scope)
                for sums in self.slots.sums.values():
                    sums.wait()
        except BaseException as error:  # a second Ctrl-C, or an error of this step
            self.spec.scope.fail(error)
        self.spec.scope.error = None  # the step after raises its own error, which may be this one

    # -- the outcome --------------------------------------------------------------------------------------------------

    def result(self, runs: Sequence[Microbatch], error: Exception | None = None) -> WindowResult:
        """Return what ``runs``, its microbatches, have given. ``error``: what the last one has raised."""
        shared, buffers = self.context.user.shared, self.context.model.buffers.take_history()
        shared.show(None)
        gradients, given = (self._finish(), runs) if error is None else (None, runs[:-1])
        result = WindowResult([run.result for run in given], gradients, error)
        kept = [run.sections.attributes for run in runs if run.sections.attributes is not None]
        if kept:
            if error is None and any(run.turns.ended_early for run in runs):
                shared.store_latest(kept)
            shared.rewind()
            buffers.show(-1)

            def show(microbatch: int) -> None:
                kept[microbatch].put()
                buffers.show(microbatch)

            result.show = show
        return result

    def _finish(self) -> StepGradients | None:
        """Return the gradients behind the losses, once all are known; None if no microbatch returned a loss."""
        microbatches = self.microbatches
        if all(microbatch.result.loss is None for microbatch in microbatches):
            self._readiness.forward_ended(set())
            return None
        context, learned = self.context, self.context.learned
        read = set().union(*(microbatch.weights.read for microbatch in microbatches))
        learned.read_by_user_code |= read  # makes a new frozenset: other threads may be iterating over the old one
        self._readiness.forward_ended(learned.read_by_user_code)
        sums = [self.slots.sums[key] for key in sorted(self.slots.sums)]  # an order that does not depend on the plan
        proxies = [microbatch.weights.mode.proxies for microbatch in microbatches]
        counts = [microbatch.result.weight for microbatch in microbatches]
        factor = self.spec.loss_weights.factor(counts) / context.model.formats.scales.outside(self.spec.version)
        readiness, share = self._readiness if self.spec.updates is not None else None, None
        if context.exchange is not None:
            share = functools.partial(context.exchange.share, self.spec.loss_weights.contribution(counts))
        self.gradients = StepGradients(sums, proxies, factor, readiness, share)
        return self.gradients

    def release(self) -> None:
        """Break reference cycles, and release the sums if no optimizer step will use them."""
        for microbatch in self.microbatches:
            del microbatch.weights.mode  # which knows these
        self.microbatches, self.before = [], None
        self.spec.scope.end()
        for sums in self.slots.sums.values():
            if self.gradients is None:
                sums.release()
