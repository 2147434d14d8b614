"""The engine: all that outlives a step, and the entry points for training and evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import is_sticky
from lightning_roundpipe.devices.thread_owner import context_of_thread
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.evaluation import Evaluations
from lightning_roundpipe.engine.evaluation_batches import Batch
from lightning_roundpipe.engine.manual import ManualStep
from lightning_roundpipe.engine.microbatch import Microbatch
from lightning_roundpipe.engine.planner import Planner
from lightning_roundpipe.engine.process_state import any_changes
from lightning_roundpipe.engine.report import Reports
from lightning_roundpipe.engine.step import Step, WindowResult, training_spec
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.faults.notes import remedied
from lightning_roundpipe.optim.partial_optimizer import bytes_elsewhere
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.bucket_stepper import BucketStepper
from lightning_roundpipe.updates.current_optimizer import CurrentOptimizer
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.updates.worker_place import WorkerPlace
from lightning_roundpipe.user_code.interception import without_caches
from lightning_roundpipe.user_code.module_state import observed_writes


class Engine:
    """Trains and evaluates one LightningModule on a set of devices.

    ``context``: its parts; see `make_context`.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.model = context, context.model
        self.updates: AsyncOptimizer | None = None
        """The optimizer's thread. None while gradients go to ``.grad`` and the caller runs the optimizer."""
        self.within_window: Callable[[], bool] = lambda: False
        self.planner = Planner(context)
        self.reports = Reports(len(context.pool.devices))
        self._step_in_flight: Step | None = None
        """The last window's step, if its outputs were returned and its backward may still run."""
        self._gradients: StepGradients | None = None
        """The gradients behind the losses that the last window returned."""
        self._looked_at = False
        """Whether user code may have read or written weights since the last window, or a step has failed."""
        self._settings: contextlib.ExitStack | None = None
        """What holds while a step is in flight."""
        self.evaluations = Evaluations(context, self.reports.count)
        try:
            self.planner.reserve_for_layers()
        except BaseException:
            self.close()
            raise

    # -- training -----------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    @remedied()
    def train_window(
        self, functions: Sequence[Callable[[], Any]], weights: LossWeights, seed: tuple[int, ...], *,
        zero_grad: bool = True,
    ) -> WindowResult:  # fmt: skip
        """Run ``training_step`` on the microbatches of a window, and their backward.

        Args:
            functions: ``training_step`` with the arguments of each microbatch.
            weights: how much the microbatches count.
            seed: numbers that identify the window. Every random state of the step is derived from them.
            zero_grad: whether to drop gradients that earlier windows accumulated and no optimizer step has used.

        Returns:
            The results of the microbatches. The backward of their losses puts gradients into ``.grad``, or sets the
            factor with which `AsyncOptimizer` takes them.
        """
        with self.context.pool.main.away():
            return self._train_window(functions, weights, seed, zero_grad=zero_grad)

    def _train_window(
        self, functions: Sequence[Callable[[], Any]], weights: LossWeights, seed: tuple[int, ...], *, zero_grad: bool
    ) -> WindowResult:
        self._prepare(zero_grad=zero_grad)
        context = self.context
        shares_state = self._shares_state
        overlaps = self._may_overlap and not (shares_state and context.exchange is not None)
        if not overlaps or (self._step_in_flight is not None and self._step_in_flight.spec.scope.failed):
            self._drain()
        plan, before = context.learned.plan, self._step_in_flight
        spec = training_spec(
            context, seed, weights, self.updates, plan, overlaps=overlaps, shares_state=shares_state,
            measures=plan is None and context.options.overlap and not context.learned.in_order,
        )  # fmt: skip
        step = Step(context, spec, before)
        self._enter_settings()
        context.gradients.pool.begin_window(keeps=not spec.measures)
        runs: list[Microbatch] = []
        try:
            with self._failing(step):
                with context.user.intercepted(spec.scope.fail):
                    try:
                        step.run(functions, in_order=plan is None or not context.options.overlap)
                    finally:
                        runs = step.microbatches
                before, self._step_in_flight = self._step_in_flight, step
                if before is not None:
                    self._end(before)
                self.model.buffers.settle()
                result = step.result(runs)
                context.user.bring_metrics_to_host()
            self.planner.learn(step, self._drain)
            self._gradients = step.gradients
            if self.updates is not None and step.gradients is not None:
                self.updates.offer(step.gradients)
        except Exception as error:
            failed = next((run.index for run in runs if run.result.error is error), None)
            if failed is None or is_sticky(error):  # it is not user code's, or devices cannot give results any more
                raise
            result = step.result(runs[: failed + 1], error)
            if not failed:  # no result comes before it
                result.show(0)
                raise
            return result
        finally:
            if not (overlaps and step.gradients is not None):
                self._drain()
        return result

    @interrupts_deferred()
    @remedied()
    def train_manually(self, function: Callable[[], Any], seed: tuple[int, ...]) -> Any:
        """Return what ``function()`` returns, a ``training_step`` that calls backward and optimizers itself.

        ``seed``: numbers that identify the batch.
        """
        self._prepare(zero_grad=False)
        context = self.context
        step = ManualStep(context, seed, self.updates)
        self._enter_settings()
        context.gradients.pool.begin_window(keeps=True)
        try:
            with self._failing(step), context.user.intercepted(step.spec.scope.fail):
                context.pool.randomness.learning = True
                output = step.run_batch(function)
                self.model.buffers.settle()
                self.model.buffers.take_history()
            self._end(step)
            context.user.bring_metrics_to_host()
        finally:
            self._drain()
        return output

    def current_log(self) -> LogRecorder:
        """Return the recorder of the microbatch whose user code runs on this thread."""
        context = context_of_thread()
        if isinstance(context, Microbatch) and context.runner.inside is not None:
            raise RoundPipeError(
                f"self.log was called in layer {context.runner.inside[0]!r}, which runs once for each microbatch and "
                "again for its backward. Let the layer return what is to be logged, and call self.log in "
                "training_step itself."
            )
        if not isinstance(context, Microbatch):
            raise RoundPipeError(
                "self.log was called from a thread that the user's code started inside training_step; log from "
                "training_step itself."
            )
        self.context.learned.logs_in_backward |= context.ready.is_set
        return context.logs

    def _prepare(self, *, zero_grad: bool) -> None:
        """Settle the last window's gradients, then prepare the weights for a new one."""
        self.evaluations.end()
        gradients, self._gradients = self._gradients, None
        unused = gradients is not None and not gradients.handed_out
        if self.updates is not None:
            if unused:
                self._drain()
            if gradients is not None and self._step_in_flight is None:
                gradients.arrive()  # if this step fails, the devices stop, and the update would be incomplete
            try:
                self.updates.begin(zero_grad=zero_grad)
            except Exception:
                with contextlib.suppress(Exception):  # an update has failed the step in flight, too
                    self._drain()
                raise
        elif gradients is not None and unused:
            gradients.release()
        self.context.pool.refuse_broken()
        if self.planner.is_outdated():
            self.settle()
            self.planner.forget()
            self._reserve_for_updates()
            if self.updates is not None:
                self.planner.share_weights()
        self._sync_weights(newest=False)
        self.context.user.watch_gradients()
        for device in self.context.pool.devices:
            device.reset_peak()

    @property
    def _may_overlap(self) -> bool:
        """Whether a step's backward may go on when its outputs were returned, beside the next step.

        Updates must go through the optimizer's thread, not for the first time, and there must be a plan. Each other
        condition rules out something that the main thread changes meanwhile: attributes of which each microbatch has
        its own, the results that logs go to, and the ``forward`` of layers.
        """
        context = self.context
        return (
            self.updates is not None
            and self.updates.begun
            and context.learned.plan is not None
            and not context.user.shared.restored
            and not context.learned.logs_in_backward
            and not context.learned.calls_in_backward
        )

    @property
    def _shares_state(self) -> bool:
        """Whether a step depends on state of the process that the main thread changes between steps.

        Generators that it draws from or puts back, and torch's default dtype. The main thread then holds the baton
        between steps. With several machines it might wait there for another machine, which waits for microbatches here,
        so these steps do not overlap.
        """
        return bool(self.context.pool.randomness.draws) or any_changes() or self.model.formats.sets_default

    @contextlib.contextmanager
    def _failing(self, step: Step) -> Iterator[None]:
        """Tie ``step`` to the optimizer's thread, and clean up if it fails, together with the one before it."""
        updates = self.updates
        if updates is not None:
            updates.attach(step.spec.scope)
        try:
            yield
        except BaseException as error:
            if step.spec.overlaps and not step.spec.scope.failed:
                step.stop(error)  # its microbatches go on, and would wait for what is dropped here
            self._looked_at = True
            self.context.gradients.drop()  # they hold part of a step, or wait for downloads that will never finish
            self.model.buffers.drop()
            before, self._step_in_flight, self._gradients = self._step_in_flight, None, None
            for broken in (before, step):
                if broken is not None:
                    self._end(broken, failed=True)
            if updates is not None:
                updates.drop(error)
            raise

    def _drain(self) -> None:
        """Wait for the step in flight, if any, and raise its error."""
        step = self._step_in_flight
        try:
            if step is not None:
                main = self.context.pool.main
                with main.away() if main.holds else contextlib.nullcontext(), self._failing(step):
                    if step.spec.overlaps:
                        step.drain()
                    self._step_in_flight = None
                self._end(step)
        finally:
            if self._settings is not None:
                self._settings.close()
                self._settings = None

    def _end(self, step: Step, *, failed: bool = False) -> None:
        """Account for ``step``, of which nothing is in flight any more, and release it."""
        if self.updates is not None:
            self.updates.detach(step.spec.scope)
        if not failed:
            self.reports.finished(step)
        step.release()

    def _enter_settings(self) -> None:
        """Enter what holds until no step is in flight: the devices' settings, and those of the user's module."""
        devices = self.context.pool.devices
        for device in devices:
            device.follow_caller()
        if self._settings is None:
            with contextlib.ExitStack() as around:
                self.context.hints.of_settings(around.enter_context(without_caches(self.model.module)))
                around.enter_context(observed_writes())
                self._settings = around.pop_all()

    # -- the optimizer ------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def enable_async_optimizer(self, optimizer: Callable[[], Optimizer | None] | None) -> None:
        """Choose who applies gradients from now on.

        ``optimizer``: returns the one that `AsyncOptimizer` steps, on its own thread. None: gradients go to ``.grad``,
        and the caller runs the optimizer. What an open accumulation window has gathered moves to ``.grad``.
        """
        if (optimizer is not None) == (self.updates is not None):
            return
        exchange = self.context.exchange
        if exchange is not None:
            exchange.set_asynchronous(optimizer is not None)
        self._drain()
        before, self.updates = self.updates, None
        if optimizer is not None:
            self.updates = _async_optimizer_of(self.context, optimizer)
            self._reserve_for_updates()
            self.planner.share_weights()
        if before is not None:
            before.retire()
            for bucket in self.model.buckets:
                bucket.unshare()
            gradients = before.gradients.current()
            for master in self.model.masters:
                if (gradient := gradients.get(id(master))) is not None:
                    master.grad = gradient.to(master)

    def _reserve_for_updates(self) -> None:
        """Let plans leave room for optimizer steps on devices."""
        if self.updates is not None and self.updates.optimizer.places:
            for device in self.context.pool.devices:
                device.update_bytes = bytes_elsewhere(self.updates.optimizer.get())

    @property
    def machine(self) -> int:
        """The number of this machine."""
        return 0 if self.context.exchange is None else self.context.exchange.peers.rank

    def owner_of(self, master: nn.Parameter) -> int | None:
        """Return the machine that has the optimizer's state of ``master``; None if each has that of all."""
        exchange = self.context.exchange
        if exchange is None or self.updates is None or not exchange.owner:
            return None
        bucket = self.model.bucket_of.get(id(master))
        return exchange.owner[bucket] if bucket is not None else 0

    @interrupts_deferred()
    @remedied()
    def settle(self) -> None:
        """Wait until nothing is in flight, so that the caller may read and write weights and optimizer state."""
        running = context_of_thread()
        if self.model.formats.hidden and isinstance(running, Batch):
            running.weights.touched()
        elif self.model.formats.hidden and isinstance(running, Microbatch):
            raise RoundPipeError(
                "training_step asks for all weights (state_dict() or save_checkpoint()) while they are on their way to "
                "workers in bf16. Do it in a hook, such as on_train_batch_end."
            )
        self._looked_at = True
        self._drain()
        if self.updates is not None:
            self.updates.settle(within_window=self.within_window())
            self.updates.optimizer.release_masters()
        if self.model.formats.hidden:  # a layer's masters exist twice while they join: instead of gradients in flight
            self.context.gradients.pool.give_up_free()
        self.model.join()

    def publish_seen(self) -> None:
        """Let the next step compute with what user code has seen or written within this window. Then submit the update.

        With staleness 1, the next step computes with the weights from before that update. The window's uploads are
        over: `settle` has waited for them.
        """
        if self._looked_at and self.updates is not None and self.updates.staleness:
            self._sync_weights(newest=False)

    def _sync_weights(self, *, newest: bool) -> None:
        """Bring what user code did to weights since the last window into the buffers that uploads read.

        ``newest``: whether uploads must see all updates, whatever the staleness. They are settled first.
        """
        updates = self.updates
        renews = updates is not None and (self._looked_at or (newest and updates.wanted != updates.submitted))
        if updates is not None and renews:
            updates.settle(within_window=self.within_window())
            updates.optimizer.release_masters()  # `reattach` counts the tensors that share a master's memory
        for layer in self.model.layers:
            layer.weights.reattach()
        self.model.undisturbed = updates is None or self._looked_at or not updates.begun
        if updates is None:
            self.model.formats.scales.fix(0)
            for bucket in self.model.buckets:
                bucket.refresh()
        elif renews:
            updates.publish_all()
        self._looked_at = False
        for layer in self.model.layers:
            layer.check.snapshot()

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    @remedied()
    def evaluate(self, function: Callable[..., Any], *args: Any, kind: Hashable = ()) -> Any:
        """Return what ``function(*args)`` returns, a validation, test or predict step of one batch, which runs alone.

        ``kind``: under which `evaluations` will know the step's calls; empty if it need not.
        """
        self.begin_evaluations(kind, 1, exclusive=True)
        try:
            batch = self.evaluations.start(functools.partial(function, *args))
            assert batch is not None
            self.evaluations.wait_for(batch)
            self.evaluations.show(batch)
            return self.evaluations.result(batch)
        finally:
            self.evaluations.end()

    @interrupts_deferred()
    @remedied()
    def begin_evaluations(self, kind: Hashable, in_flight: int, *, exclusive: bool = False) -> None:
        """Let `evaluations` run several batches of ``kind`` at a time, or one exclusively."""
        self.evaluations.end()
        self.context.pool.refuse_broken()
        self._drain()
        if self.updates is not None:
            self.updates.settle(within_window=self.within_window())
        self._sync_weights(newest=True)
        for device in self.context.pool.devices:
            device.follow_caller()
        version = self.updates.submitted if self.updates is not None else 0
        self.evaluations.begin(kind, version, in_flight, exclusive=exclusive)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Apply the updates that were submitted, stop all threads, and free all device memory."""
        with contextlib.ExitStack() as rest:  # runs in reverse order, and each callback even if another one raises
            rest.callback(self.context.pool.close)
            rest.callback(self.model.join)
            rest.callback(self.context.user.end)
            if self.updates is not None:
                rest.callback(self.updates.close)
            rest.callback(self._drain)
            rest.callback(self.evaluations.end)


def _async_optimizer_of(context: Context, optimizer: Callable[[], Optimizer | None]) -> AsyncOptimizer:
    options, model, devices = context.options, context.model, context.pool.devices
    places = [WorkerPlace(device) for device in devices] if options.optimizer_device == "worker" else []
    current = CurrentOptimizer(optimizer, model.buckets, options.optimizer_state, places)
    pool, scales = context.gradients.pool, model.formats.scales
    stepper = BucketStepper(model.buckets, pool, current, options.staleness, scales, context.exchange)
    return AsyncOptimizer(stepper, devices[0].host_thread_settings)
