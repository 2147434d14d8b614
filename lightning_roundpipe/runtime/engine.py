"""What outlives a step: layers, workers, the trace and the plan, and the counter of slots."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.reachable import listed
from lightning_roundpipe.model.structure import Structure
from lightning_roundpipe.runtime.batch.cutting import Cut, Cutter
from lightning_roundpipe.runtime.batch.logs import HostMetrics
from lightning_roundpipe.runtime.batch.microbatches import memory_of
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.core.worker_pool import WorkerPool
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed, interrupts_deferred
from lightning_roundpipe.runtime.faults.notes import remedied
from lightning_roundpipe.runtime.layer_calls.compiling import forwards_of
from lightning_roundpipe.runtime.memory.budget import layers_that_fit
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.grad_buffers import GradientMemory, Reduction
from lightning_roundpipe.runtime.memory.host_model import HostModel
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_parts import Parting
from lightning_roundpipe.runtime.modes.manual import ManualStep
from lightning_roundpipe.runtime.modes.model_step import ModelStep
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.loss_handle import StepGradients
from lightning_roundpipe.runtime.profile.autocast_weights import is_surprised, is_watched
from lightning_roundpipe.runtime.profile.first_batch import Planner, counter_of
from lightning_roundpipe.runtime.profile.scope import Scope
from lightning_roundpipe.runtime.report import Report, report_of
from lightning_roundpipe.runtime.reporting.alloc_retries import Retries
from lightning_roundpipe.runtime.reporting.hints import Hints
from lightning_roundpipe.runtime.threads.sync import UserLock
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Accumulators
from lightning_roundpipe.runtime.user_code.interception import (
    Interceptor,
    current,
    intercepted,
    models_in,
    without_caches,
)
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState
from lightning_roundpipe.runtime.user_code.thread_state import thread_locals_of

_LOOKS = 4
"""Batches whose memory is compared with that of the one before."""


class Engine:
    """Trains one LightningModule on a set of devices.

    Args:
        module: the user's LightningModule, with its weights on the CPU.
        devices: one per worker.
        options: checked options of the strategy.
        inform: called with what the user should know once.
        formats: that layers and user code compute in.
        fitting: whether there is going to be training, without which a module needs no layers.
    """

    def __init__(
        self, module: nn.Module, devices: list[Device], options: Options, inform: Callable[[str], None],
        formats: Formats | None = None, *, fitting: bool = True,
    ) -> None:  # fmt: skip
        forwards = forwards_of(options)
        formats = formats or Formats()
        self.options, self.formats = options, formats
        with interrupts_allowed():  # copies all weights, and there is no thread yet
            found = layers_that_fit(module, options, devices, formats, fitting=fitting)
            model = HostModel(module, found.layers, devices[0], formats, apart=bool(options.staleness))
        self.model, self.learned = model, (learned := Learned(model))
        self._accumulators = Accumulators()
        self.updates: AsyncOptimizer | None = None
        """The optimizer's thread; None while gradients are handed to ``.grad`` and the caller steps."""
        thread_locals = thread_locals_of(module)
        self.weights_uploaded = 0
        self._step_in_flight: Step | None = None
        """The last batch's step, if its outputs have been given out and its backward has not been waited for."""
        self._around = contextlib.ExitStack()
        self._switched_off: list[str] | None = None
        self._given: StepGradients | None = None
        """What the last batch's loss hands out."""
        self._moves = self._refills = False
        """Whether layers read what changes from step to step; whether batches come in the same memory."""
        self._looks, self._batch = 0, dict[int, tuple[Any, int]]()
        self._looked_at = False
        """Whether somebody may have seen weights, or written to them, since the last batch."""
        self.rehearsing: Callable[[], contextlib.AbstractContextManager[Iterable[tuple[str, Any]]]] = lambda: (
            contextlib.nullcontext(())
        )
        """Around a rehearsal: yields, by name, what user code may change that is not the module's."""
        self._trainable = model.trainable()
        self.structure = Structure(module, [x.module for x in model.layers])
        self.hints = Hints(module, inform)
        self.cutter = Cutter(options, module, len(devices), self.hints)
        self._retries = Retries(devices, self.hints)
        self._report: Callable[[], Report] | None = None
        self.hints.of_cuts(found)
        dtype, limit = options.reduce_dtype, options.watchdog_timeout
        self.worker_pool = WorkerPool(
            devices, limit, sums=dtype is not None, prefetch=bool(options.prefetch)
        )  # whose threads somebody has to stop from here on
        summing = self.worker_pool.summing
        reduction = Reduction(getattr(torch, dtype), summing) if summing is not None else None
        watched = functools.partial(is_watched, options, formats, learned)
        counter = functools.partial(counter_of, options, learned, devices[0])
        given = (lambda: learned.randomness, formats, watched, forwards, model.bucket_of, counter)
        self.context = EngineContext(
            options=options,
            model=model,
            worker_pool=self.worker_pool,
            executors=[LayerExecutor(worker, *given) for worker in self.worker_pool.workers],
            gradients=GradientMemory(model.layers, devices[0], reduction),
            learned=learned,
            hints=self.hints,
            user_lock=UserLock(),
            thread_locals=thread_locals,
            next_step=itertools.count().__next__,
        )
        self._gradients = self.context.gradients
        layers, models = [Interceptor(x) for x in model.layers], models_in(module, [x.module for x in model.layers])
        self._parting = Parting(self.context)
        self._evaluating = [*layers, *(models if self._parting.possible else ())]
        self._planner = Planner(self.context)
        self._scope = Scope(self.context, self.cutter, self._planner, layers, models, self._rehearsal)
        self._metrics = HostMetrics(module if self.worker_pool.accelerator is not None else nn.Module())
        try:
            self._planner.reserve_for_layers()
        except BaseException:
            self.close()
            raise

    # -- training -----------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    @remedied()
    def train_batch(
        self,
        function: Callable[..., Any],
        batch: Any,
        rest: tuple[Any, ...],
        seed: tuple[int, ...],
        *,
        zero_grad: bool = True,
    ) -> Any:
        """Run ``function`` (training_step) on the microbatches of ``batch``, and their backward.

        Args:
            function: called with a microbatch and ``rest``.
            batch: what the dataloader gave.
            rest: the other arguments of training_step, given to every microbatch.
            seed: numbers that identify the batch; all random states of the step derive from them.
            zero_grad: whether gradients of earlier batches that no optimizer step has used are to be dropped.

        Returns:
            The merged output; the backward of its loss gives the masters their gradients, or has `async_optimizer` take
            them.
        """
        self._prepare(zero_grad=zero_grad)
        self._look_at(batch)
        learned, wants_plan = self.learned, self.options.plan_text is not None
        cut = self._scope.cut(function, batch, rest, seed)
        learned.plans = learned.plan is None and not learned.in_order and (cut.several or wants_plan)
        overlaps = self._may_overlap
        if not overlaps or (self._step_in_flight is not None and self._step_in_flight.cancel_scope.failed):
            self._drain()
        step = self._step_of(cut, seed, overlaps=overlaps)
        args = [(part, *rest) for part in cut.parts]
        random_state = GlobalRandomState(self.worker_pool.devices)
        switched_off = self._set_up_step()
        try:
            with self._failing(step):
                with intercepted(self._scope.interceptors, step.cancel_scope.fail):
                    random_state.park()
                    try:
                        self._run(step, function, args)
                    finally:
                        random_state.restore()
                before, self._step_in_flight = self._step_in_flight, step
                if before is not None:
                    self._end(before)
                try:
                    self.model.buffers.settle()
                    output = step.finish()
                    self._metrics.bring_to_host()
                except BaseException as error:
                    if overlaps:
                        step.stop(error)
                    raise
            microbatches = len(step.sizes)
            self.hints.after_step(self.model.layers, switched_off, microbatches)
            if learned.plans and step.has_loss and (microbatches > 1 or wants_plan):
                fuses = not self._scope.cuts_calls
                self._planner.plan_from(step.spec.recorder, step.traces, microbatches, fuses=fuses)
            elif microbatches == 1:
                learned.recent = step.traces[0]
            self._scope.refuse()
            self._given = step.gradients
            if self.updates is not None and step.gradients is not None:
                self.updates.offer(step.gradients)
        finally:
            if not (step.spec.overlaps and step.gradients is not None) or self._state_moves():
                self._drain()
        return output

    def _step_of(self, cut: Cut, seed: tuple[int, ...], *, overlaps: bool) -> Step:
        """The step that runs ``cut``."""
        context, updates, before = self.context, self.updates, self._step_in_flight
        if cut.sizes is None:
            return ModelStep(context, seed, self.cutter.sizes_of, updates, before, overlaps=overlaps)
        return Step(context, seed, cut.sizes, cut.weights, updates, before, overlaps=overlaps)

    @contextlib.contextmanager
    def _rehearsal(self) -> Iterator[Iterable[tuple[str, Any]]]:
        """Layers may be called as in evaluation, before a batch is trained; see `rehearsing`."""
        self._drain()
        if self.updates is not None:  # where an error stops the devices, gradients on their way would be lost
            self.updates.settle()
        self._set_up_step()
        try:
            with self.rehearsing() as others:
                yield others
        except BaseException:
            self._drain()
            raise
        finally:
            self._looked_at = True
        self._sync_weights(newest=False)
        for device in self.worker_pool.devices:
            device.reset_peak()

    @interrupts_deferred()
    @remedied()
    def train_manually(self, function: Callable[[], Any], seed: tuple[int, ...]) -> Any:
        """``function()``, a training_step that differentiates and steps by itself."""
        self._prepare(zero_grad=False)
        step, switched_off = ManualStep(self.context, seed, self.updates), self._set_up_step()
        try:
            with self._failing(step), intercepted(self._scope.interceptors, step.cancel_scope.fail):
                output = step.run(function)
                self.model.buffers.settle()
            self._end(step)
            self._metrics.bring_to_host()
        finally:
            self._drain()
        self.hints.after_step(self.model.layers, switched_off, 1)
        return output

    def _prepare(self, *, zero_grad: bool) -> None:
        """Before a batch: what became of the last one's gradients is known now."""
        given, self._given = self._given, None
        unused = given is not None and given.scale is None  # nobody asked for them
        if self.updates is not None:
            if unused:
                self._drain()
            if given is not None and self._step_in_flight is None:
                given.arrive()  # should this step fail, the devices stop, and the update would be cut short
            self.updates.begin(zero_grad=zero_grad)
        elif given is not None and unused:
            given.release()
        self._begin()

    @property
    def _may_overlap(self) -> bool:
        """Whether a step's backward may go on while the main thread does other things, such as to begin the next one.

        Not if it draws random numbers, for generators are the main thread's then; if user code keeps things on modules,
        which are what training_step finds next; if it logs, which ends with training_step; or if a layer goes by
        torch's default format, which is another one then; nor if a layer reads what changes meanwhile, or the next
        batch is fetched into the memory of this one.
        """
        return (
            self.updates is not None
            and self.learned.plan is not None
            and not self.learned.module_state.places
            and not self.learned.randomness.draws_in_backward
            and not self.learned.logs_in_backward
            and not self.formats.default_matters
            and not self._refills
            and not self._moves
        )

    def _state_moves(self) -> bool:
        """Whether a layer was seen to read what user code changes from step to step."""
        moving = (layer for layer in self.model.layers if layer.moving)
        if not self._moves and (layer := next(moving, None)) is not None:
            self._moves = True
            self.hints.of_moving_state(layer.name, listed(layer.moving))
        return self._moves

    def _look_at(self, batch: Any) -> None:
        """Whether a batch is in the memory of another one before it, which is looked at for the first ones only."""
        if self._looks == _LOOKS:
            return
        self._looks += 1
        held, self._batch = self._batch, memory_of(batch) if self._looks < _LOOKS else {}
        if not self._refills and any(held[key][1] != self._batch[key][1] for key in held.keys() & self._batch.keys()):
            self._refills = True
            self.hints.of_refilled_batches()

    @contextlib.contextmanager
    def _failing(self, step: Step) -> Iterator[None]:
        """An update that fails while the step runs fails the step; a step that fails leaves whole updates behind."""
        updates = self.updates
        if updates is not None:
            updates.accompany(step.cancel_scope)
        try:
            yield
        except BaseException as error:
            self._looked_at = True  # versions are not what was submitted
            self._gradients.drop()  # half a step is in them, or will never arrive
            self.model.buffers.drop()
            before, self._step_in_flight = self._step_in_flight, None
            for broken in (before, step):
                if broken is not None:
                    self._end(broken, failed=True)
            if updates is not None:
                updates.drop(error)
            raise

    def _drain(self) -> None:
        """Wait for a step that is on its way, and raise what has gone wrong with it."""
        step = self._step_in_flight
        try:
            if step is not None:
                with self._failing(step):
                    if step.spec.overlaps:
                        step.drain()
                    self._step_in_flight = None
                self._end(step)
        finally:
            self._switched_off = None
            self._around.close()

    def _end(self, step: Step, *, failed: bool = False) -> None:
        """Nothing of the step is on its way any more."""
        if self.updates is not None:
            self.updates.leave(step.cancel_scope)
        if not failed:
            self._gradients.give_back()
            self.weights_uploaded += sum(step.spec.recorder.nbytes(("upload_weights",), len(self.worker_pool.workers)))
            self._retries.after_step(step.plan, step.retries)
            self._report = report_of(step, self._retries.last, self.weights_uploaded)
        step.release()

    def _set_up_step(self) -> list[str]:
        """What holds until nothing is on its way. Returns what `without_caches` does."""
        if self._switched_off is None:
            self._switched_off = self._around.enter_context(without_caches(self.model.module))
            self._around.enter_context(self.worker_pool.devices[0].step_settings())
        return self._switched_off

    @interrupts_deferred()
    def enable_async_optimizer(self, enabled: bool) -> None:
        """From now on `async_optimizer` applies gradients when it is told to; or, if not, they are handed to
        ``.grad``.
        """
        if enabled != (self.updates is not None):
            self._drain()
            before, scales = self.updates, self.formats.scales
            around = self.worker_pool.devices[0].host_thread_settings
            self.updates = (
                AsyncOptimizer(self.model.buckets, self.options.staleness, scales, around) if enabled else None
            )
            if before is not None:
                before.retire()
                gradients = before.accumulated()  # of an accumulation window that goes on
                for master in self.model.masters:
                    if (gradient := gradients.get(id(master))) is not None:
                        master.grad = gradient.to(master)

    @interrupts_deferred()
    @remedied()
    def settle(self) -> None:
        """Before anybody looks at weights or at the optimizer's state, or writes to them: nothing is on its way."""
        self._looked_at = True
        if isinstance(run := current(), MicrobatchTask):  # in training_step itself
            if self.updates is not None:
                run.segments.aside(self.updates.settle)
            return
        self._drain()
        if self.updates is not None:
            self.updates.settle()

    @interrupts_deferred()
    @remedied()
    def evaluate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` (a validation, test or predict step), forward only."""
        self.worker_pool.refuse_broken()
        self._drain()
        if self.updates is not None:
            self.updates.settle()
        self._sync_weights(newest=True)
        evaluation = Evaluation(self.context, self._parting)
        try:
            with intercepted(self._evaluating), self.worker_pool.devices[0].step_settings():
                output = evaluation.run(function, args, kwargs)
            self.model.buffers.settle()
            self._metrics.bring_to_host()
            return output
        except BaseException:
            self._gradients.drop()  # what was on its way to them will not arrive
            raise
        finally:
            self.weights_uploaded += sum(evaluation.recorder.nbytes(("upload_weights",), len(self.worker_pool.workers)))

    def _run(self, step: Step, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        learned, randomness = self.learned, self.learned.randomness
        if learned.plan is not None and learned.trace is not None:
            randomness.learning = False
            step.run_planned(learned.plan, learned.trace, function, args)
        else:
            randomness.learning, randomness.comparing = True, learned.plans
            step.run_one_by_one(function, args)

    def _begin(self) -> None:
        self.worker_pool.refuse_broken()
        if (now := self.model.trainable()) != self._trainable or is_surprised(self.model.layers):
            self._trainable = now
            self.settle()
            self._planner.forget()
            with interrupts_allowed():  # as in `reserve_gradients`
                self._gradients.reserve_again()
        self._sync_weights(newest=False)
        self._accumulators.watch(self.model.masters)
        for device in self.worker_pool.devices:
            device.reset_peak()

    def _sync_weights(self, *, newest: bool) -> None:
        """What user code has done to weights since the last batch is what travels.

        Args:
            newest: whether all updates are to be seen, whatever the staleness. They are settled, then.
        """
        updates = self.updates
        if updates is not None and self._looked_at:
            updates.settle()
            updates.release_masters()  # whose memory user code may hold: it must be alone with it, or with nothing
        for layer in self.model.layers:
            layer.reattach()
        self.model.undisturbed = updates is None or self._looked_at or not updates.begun
        if updates is None:
            self.formats.scales.fix(0)
            for bucket in self.model.buckets:
                bucket.refresh()
        elif self._looked_at or (newest and updates.wanted != updates.submitted):
            updates.settle()
            updates.publish_all()
        self._looked_at = False
        for layer in self.model.layers:
            layer.snapshot()

    @interrupts_deferred()
    def reserve_gradients(self) -> None:
        """Before the first batch, which is measured: host memory for the gradients of a call of each layer."""
        with interrupts_allowed():  # it may be half of what training takes, and nothing runs yet
            self._gradients.reserve()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """See ``RoundPipeStrategy.report``."""
        return self._report() if self._report is not None else Report()

    def close(self) -> None:
        """Stop all threads and give everything on the devices back. What was submitted is applied."""
        with contextlib.ExitStack() as rest:  # in reverse, each of them even if another one fails
            rest.callback(self.worker_pool.close)
            rest.callback(self._metrics.end)
            rest.callback(self._accumulators.end)
            if self.updates is not None:
                rest.callback(self.updates.close)
            rest.callback(self._drain)
