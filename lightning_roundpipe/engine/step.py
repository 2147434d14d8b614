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
from typing import Any

from torch import nn

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.engine.alloc_retries import so_far
from lightning_roundpipe.engine.context import Context, StepSpec
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.microbatch import Microbatch
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.sync import CancelScope, Runner
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.faults.notes import add_waiting_note
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.threads.task_thread import Task
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.user_code.thread_state import apply_context

_ALONE = 1_000_000
"""Added to the uses of a layer by calls that the plan does not have, for each microbatch: their sums are apart."""


class Step:
    """See above.

    It has many collaborators because a step joins plan, slots, microbatches and gradients.

    Args:
        context: the parts of the engine that outlive the step.
        seed: numbers that identify the step.
        weights: how much the microbatches count; also says how many there are.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        before: the step before, if it is still in flight.
        overlaps: whether the backward may go on when the losses are returned.

    Attributes:
        plan: the plan that it runs under; None if each call has a slot of its own.
        trace: the calls of the plan.
        measures: whether a plan is to be made from it.
        slots: the slots of the plan, in order, or those that calls were given.
        runs: the microbatches.
        late: parameters that user code has registered outside the layers, and computed with.
        started, seconds: its time on the clock of ``time.perf_counter()``.
    """

    def __init__(
        self, context: Context, seed: tuple[int, ...], weights: LossWeights, updates: AsyncOptimizer | None,
        before: Step | None, *, overlaps: bool,
    ) -> None:  # fmt: skip
        self.context, self.weights, self.before = context, weights, before
        peers, count = context.exchange.peers if context.exchange is not None else None, weights.count
        scope = CancelScope(self._failed, before.spec.scope if before is not None else None)
        self.spec: StepSpec = StepSpec(
            seed=(*seed, count * (peers.size if peers is not None else 1)),
            first=count * (peers.rank if peers is not None else 0),
            version=updates.wanted if updates is not None else 0,
            several=count > 1,
            overlaps=overlaps,
            undisturbed=context.model.undisturbed,
            updates=updates,
            thread_state=context.thread_state(),
            recorder=Recorder(),
            scope=scope,
        )
        learned = context.learned
        self.plan: Plan | None = learned.plan
        self.trace: Trace | None = learned.trace if learned.plan is not None else None
        self.ahead = self.plan is not None and self.plan.recompute_ahead
        self.measures = self.plan is None and context.options.overlap
        self.readiness = GradReadiness(context.model.buckets)
        self.slots: list[Slot] = []
        self.runs: list[Microbatch] = []
        self.gradients: StepGradients | None = None
        self.late: list[nn.Parameter] = []
        self.started, self.seconds = time.perf_counter(), 0.0
        self.retries = so_far(context.pool.devices)
        self._sums: dict[tuple[int, int], HostGradSums] = {}
        self._adding: dict[int, Slot] = {}
        """The last slot that adds to each sum, by the sum's id."""
        self._rounds: list[list[Slot]] = []
        self._round_size, self._apart = count, False
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._tasks: list[Task[None]] = []
        self._running = count

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, functions: Sequence[Callable[[], Any]], *, in_order: bool) -> None:
        """Run ``training_step`` of all microbatches.

        Args:
            functions: ``training_step`` with the arguments of each microbatch.
            in_order: whether each begins when the one before has ended.
        """
        given_up = False
        contexts = [contextvars.copy_context() for _ in functions]
        try:
            self._begin(functions, contexts, in_order=in_order)
            if self.spec.overlaps:
                self._wait_for_outputs()
            else:
                self._wait_for_end()
        except BaseException as error:  # most likely a KeyboardInterrupt, or the watchdog's TimeoutError
            self._fail(error)
            given_up = True
        apply_context(contexts[-1])
        if self.spec.overlaps and not self.spec.scope.failed:
            return  # `drain` waits for the rest
        self._rest(given_up=given_up)
        self.spec.scope.raise_error()

    def _begin(
        self, functions: Sequence[Callable[[], Any]], contexts: Sequence[contextvars.Context], *, in_order: bool
    ) -> None:
        """Lay out slots, and start the microbatches [1]."""
        pool, count = self.context.pool, len(functions)
        runner = Runner(self.spec.scope, -1)
        pool.baton.acquire(runner, lambda: pool.wait(runner, self.spec.scope))
        try:
            if self.plan is not None and self.trace is not None:
                self._round_size = min(self.plan.round_microbatches, count)
                self._apart = self.plan.side_by_side(len(pool.workers), count)
                self._lay_out(self.plan.stages(), self.trace, count)
            else:
                self.readiness.expect([], uploads=False)
            for index in range(count):
                slots = self._rounds[index // self._round_size] if self._rounds else []
                after = None
                if index:
                    after = self.runs[-1].ended if in_order else self.runs[-1].begun
                self.runs.append(Microbatch(self.context, self, index, slots, after))
                if index and slots and index % self._round_size == 0:
                    self.runs[index].follows = self.runs[index - 1].trail
        finally:
            pool.baton.release()
        # A thread may still run a microbatch of the step before; so may all others of this step begin only later.
        for run, function, around in zip(self.runs, functions, contexts, strict=True):
            work = functools.partial(around.run, run.run, function, self.runs[: run.index])
            self._tasks.append(pool.thread(run.index).submit(work))

    def _lay_out(self, stages: Sequence[Stage], trace: Trace, count: int) -> None:
        pool, costs = self.context.pool, self.context.learned.costs
        if costs is not None and costs.unequal:
            self.context.align_slots(len(pool.workers))
        for number, start in enumerate(range(0, count, self._round_size)):
            served = range(start, min(start + self._round_size, count))
            self._rounds.append([self._slot(stage, trace, served, number) for stage in stages])
        for position, stage in enumerate(stages):
            calls = range(stage.first, stage.last + 1)
            if stage.phase != "backward":
                self._forward.update(dict.fromkeys(calls, position))
            if stage.phase != "forward":
                self._backward.update(dict.fromkeys(calls, position))
        self.slots = [slot for slots in self._rounds for slot in slots]
        self.readiness.expect(self.slots, uploads=bool(self.context.options.staleness))
        for slot in self.slots:
            slot.readiness = self.readiness
        for slot in self.slots:
            pool.workers[slot.worker].add(slot)

    def _slot(self, stage: Stage, trace: Trace, microbatches: range, number: int) -> Slot:
        calls = range(stage.first, stage.last + 1)
        needed = [trace.calls[i] for i in calls if stage.phase != "backward" or trace.calls[i].taped]
        layers = {call.layer.index: call.layer for call in needed}
        sums = {}
        for i in calls if stage.phase != "forward" else ():
            call = trace.calls[i]
            if call.taped and (found := self.sums_of(call.layer, call.use, None)) is not None:
                sums[i] = found
        index = next(self.context.slots)
        slot = Slot(
            index, index % len(self.context.pool.workers), stage.phase, calls, list(layers.values()), sums,
            microbatches, self.spec.version, self.spec.recorder, self.spec.scope, number,
            apart=self._apart, unpacks_once=stage.unpacks_once,
        )  # fmt: skip
        self._follow(slot)
        return slot

    def _follow(self, slot: Slot) -> None:
        """Let a slot go on with the sums of those that add to them before."""
        for sums in slot.sums.values():
            if (before := self._adding.get(id(sums))) is not None:
                slot.after.append(before)
            self._adding[id(sums)] = slot

    # -- what microbatches ask ----------------------------------------------------------------------------------------

    def forward_slot(self, microbatch: int, call: int) -> int:
        return self._forward[call]

    def backward_slot(self, microbatch: int, call: int) -> int | None:
        position = self._backward[call]
        slot = self._rounds[microbatch // self._round_size][position]
        assert self.trace is not None
        layer = self.trace.calls[call].layer
        # A call that no backward followed in the first window has no memory for weights or gradients there.
        return position if call in slot.sums or (slot.has(layer) and not any(layer.trainable())) else None

    def on_demand(
        self, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None, microbatch: int, worker: int
    ) -> Slot:
        slot = Slot(
            next(self.context.slots) if self.plan is None else -1, worker, phase, [call], [layer],
            {} if sums is None else {call: sums}, [microbatch], self.spec.version, self.spec.recorder, self.spec.scope,
        )  # fmt: skip
        self._follow(slot)
        if self.plan is None:
            self.slots.append(slot)
        else:
            self.readiness.expect([slot], uploads=bool(self.context.options.staleness))
            slot.readiness = self.readiness
        return slot

    def sums_of(self, layer: HostLayer, use: int, microbatch: int | None) -> HostGradSums | None:
        use += _ALONE * (microbatch + 1) if microbatch is not None else 0
        key = layer.index, use
        if (known := self._sums.get(key)) is None:
            known = self._sums[key] = self.context.gradients.of(layer, use).begin(apart=self._apart)
        return known if known.layout.nbytes else None

    def give_up(self, slot: Slot) -> None:
        """Leave out a slot of `on_demand` that has not opened."""
        if slot.readiness is not None:
            slot.readiness.closed(slot)

    def microbatch_ended(self) -> None:
        self._running -= 1
        if not self._running:
            self.readiness.ended()
            self.seconds = time.perf_counter() - self.started

    # -- the end ------------------------------------------------------------------------------------------------------

    def _wait(self, signals: Sequence[Any]) -> None:
        for signal in signals:
            waiter = Waiter()
            if signal.then(waiter.wake):
                self.context.pool.wait(waiter, self.spec.scope)

    def _wait_for_outputs(self) -> None:
        """Wait until all outputs are there [2], and the step before, which nothing else waits for, is over."""
        self._wait([run.ready for run in self.runs])
        if self.before is not None and not self.spec.scope.failed:
            self.before._wait_for_end()
            self.started = max(self.started, self.before.started + self.before.seconds)
            self.before = None
            self.spec.scope.part()
        for run in self.runs:
            if run.computed is not None and not self.spec.scope.failed:
                run.computed.wait()
        if any(run.late for run in self.runs):
            self._wait_for_end()  # gradients are needed before the next step

    def _wait_for_end(self) -> None:
        """Wait until all microbatches have ended; then all slots are closed [3]."""
        for task in self._tasks:
            self.context.pool.wait(task.waiter, self.spec.scope)

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
        self._rest(given_up=given_up)
        self.spec.scope.raise_error()

    def stop(self, error: BaseException) -> None:
        """Fail an overlapping step after an error of the main thread, and wait until its threads have returned."""
        self.spec.scope.fail(error)
        self._rest(given_up=False)
        self.spec.scope.error = None

    def _fail(self, error: BaseException) -> None:
        add_waiting_note(error, [s for s in self.slots if s.opened])
        self.spec.scope.fail(error)

    def _failed(self) -> None:
        """Stop the threads, and the devices unless the step before still needs them. The failing thread calls this."""
        self.readiness.fail()
        self.context.pool.baton.wake(self.spec.scope)
        if self.before is None or self.before.spec.scope.failed:
            self.context.pool.fail(self.spec.scope)

    def _rest(self, *, given_up: bool) -> None:
        """Wait for all threads to return. After a failure, let the step before finish first, with its gradients."""
        pool, tasks = self.context.pool, self._tasks
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
                    self.context.pool.wait(worker.fence(), self.spec.scope)
                for sums in self._sums.values():
                    sums.wait()
        except BaseException as error:  # a second Ctrl-C, or an error of this step
            self.spec.scope.fail(error)
        self.spec.scope.error = None  # the step after raises its own error, which may be this one

    # -- the outcome --------------------------------------------------------------------------------------------------

    def finish(self) -> StepGradients | None:
        """Return the gradients behind the losses, once all are known; None if no microbatch returned a loss."""
        if not any(run.loss is not None for run in self.runs):
            self.readiness.passed(set())
            return None
        context, learned = self.context, self.context.learned
        read = set().union(*(run.read for run in self.runs))
        learned.read_by_user_code |= read  # makes a new frozenset: other threads may be iterating over the old one
        self.readiness.passed(learned.read_by_user_code)
        sums = [self._sums[key] for key in sorted(self._sums)]  # an order that does not depend on the plan
        proxies = [run.mode.proxies for run in self.runs]
        factor = self.weights.factor(self.runs) / context.model.formats.scales.outside(self.spec.version)
        # The optimizer's thread does not know late parameters, so gradients of this batch go to `.grad`.
        self.late = list({id(p): p for run in self.runs for p in run.late}.values())
        readiness = self.readiness if self.spec.updates is not None and not self.late else None
        if context.exchange is None:
            self.gradients = StepGradients(sums, proxies, factor, readiness)
        else:
            contribution = self.weights.contribution(self.runs)
            self.gradients = StepGradients(sums, proxies, factor, readiness, contribution, context.exchange.share)
        return self.gradients

    def release(self) -> None:
        """Break reference cycles, and release the sums if no optimizer step will use them."""
        for run in self.runs:
            del run.mode  # which knows the microbatch
        self.runs, self.before = [], None
        self.spec.scope.end()
        for sums in self._sums.values():
            if self.gradients is None:
                sums.release()


__all__ = ["Step", "nn"]
