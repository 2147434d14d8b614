"""The engine: all that outlives a step, and the entry points for training, evaluation and manual optimization."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_roundpipe.batches.logs import LogRecorder
from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.machines.peers import Peers
from lightning_roundpipe.model.structure import Structure
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.off_plan import OffPlan
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.core.worker_pool import WorkerPool
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed, interrupts_deferred
from lightning_roundpipe.runtime.faults.notes import remedied
from lightning_roundpipe.runtime.layer_calls.compiling import forwards_of
from lightning_roundpipe.runtime.layer_calls.token_tiles import TokenTiles
from lightning_roundpipe.runtime.memory.budget import layers_that_fit, room_for_calls
from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.grad_buffers import GradientMemory, Reduction
from lightning_roundpipe.runtime.memory.host_model import HostModel
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_pipeline import EvaluationPipeline
from lightning_roundpipe.runtime.modes.manual import ManualStep
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.gradient_exchange import GradientExchange
from lightning_roundpipe.runtime.optimizer.loss_handle import StepGradients
from lightning_roundpipe.runtime.profile.autocast_weights import is_surprised, is_watched
from lightning_roundpipe.runtime.profile.first_batch import Planner, counter_of
from lightning_roundpipe.runtime.report import Report, report_of
from lightning_roundpipe.runtime.reporting.alloc_retries import Retries
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.reporting.hints import Hints
from lightning_roundpipe.runtime.threads.sync import UserLock
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Accumulators
from lightning_roundpipe.runtime.user_code.host_metrics import HostMetrics
from lightning_roundpipe.runtime.user_code.interception import Interceptor, current, intercepted, without_caches
from lightning_roundpipe.runtime.user_code.module_state import AttributeView
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState
from lightning_roundpipe.runtime.user_code.thread_state import thread_locals_of


@dataclass
class MicrobatchResult:
    """What one microbatch of a window has given.

    Attributes:
        output: what ``training_step`` returned, detached.
        loss: the value of its loss; None if it returned none.
        weight: how much the loss counts.
        differentiable: whether the loss requires grad.
        logs: what it has logged.
        state: what it has set on modules; None if it was the only microbatch.
    """

    output: Any
    loss: torch.Tensor | None
    weight: float
    differentiable: bool
    logs: LogRecorder
    state: AttributeView | None


@dataclass
class WindowResult:
    """What the microbatches of a window have given.

    Attributes:
        microbatches: those that have a result: all, or those before the one that failed.
        gradients: the gradients behind their losses; None if there are none.
        error: what ``training_step`` of the microbatch behind them has raised.
        show: lets hooks find what a microbatch has left on modules. Call it for each, in order.
    """

    microbatches: list[MicrobatchResult] = field(default_factory=list)
    gradients: StepGradients | None = None
    error: Exception | None = None
    show: Callable[[int], None] = lambda microbatch: None


class Engine:
    """Trains and evaluates one LightningModule on a set of devices.

    The class is large because it is the composition root: it builds every long-lived part of the runtime, and keeps
    the order of their calls around a batch in one place (gradients of the last batch, weights, the step, its failure,
    the optimizer's thread).

    Args:
        module: the user's LightningModule, with its weights on the CPU.
        devices: one device per worker.
        options: the strategy's options, already checked.
        inform: function that shows a message to the user; each message is shown once.
        formats: number formats of layers and user code.
        fitting: whether the module will be trained. A module without layers is an error only then.
        peers: the other machines that train the same model; None if there are none.
    """

    def __init__(
        self, module: nn.Module, devices: list[Device], options: Options, inform: Callable[[str], None],
        formats: Formats | None = None, *, fitting: bool = True, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        forwards = forwards_of(options)
        formats = formats or Formats()
        self.options, self.formats = options, formats
        with interrupts_allowed():  # copies all weights, and no thread has been started yet
            found = layers_that_fit(module, options, devices, formats, fitting=fitting)
            model = HostModel(module, found.layers, devices[0], formats, apart=bool(options.staleness))
        self.model, self.learned = model, (learned := Learned(module, in_order=not options.overlap))
        self._accumulators = Accumulators()
        self.updates: AsyncOptimizer | None = None
        """The optimizer's thread. None while gradients go to ``.grad`` and the caller runs the optimizer."""
        thread_locals = thread_locals_of(module)
        self.weights_uploaded = 0
        self._step_in_flight: Step | None = None
        """The last batch's step, if its outputs were returned and its backward may still be running."""
        self._around = contextlib.ExitStack()
        self._switched_off: list[str] | None = None
        self._given: StepGradients | None = None
        """The gradients behind the loss that the last batch returned."""
        self._looked_at = False
        """Whether user code may have read or written weights since the last batch, or a step has failed."""
        self.windows_left: Callable[[], float] = lambda: 0.0
        """Function that returns how many windows will be trained on, as far as it is known: a search has to pay."""
        self.within_window: Callable[[], bool] = lambda: False
        """Function that returns whether a window has begun of which Lightning has not finished all batches."""
        self._trainable = model.trainable()
        self._named = list(module.named_parameters())
        self.structure = Structure(module, [x.module for x in model.layers])
        self.hints = Hints(inform)
        self._retries = Retries(devices, self.hints)
        self._report: Callable[[], Report] | None = None
        self.hints.of_cuts(found)
        if options.compile_layers:
            self.hints.of_compiled(model.layers)
        dtype, limit = options.reduce_dtype, options.watchdog_timeout
        self.worker_pool = WorkerPool(
            devices, limit, prefetch=bool(options.prefetch), elsewhere=peers.liveness.says if peers is not None else str
        )  # has started threads: from here on, a failing constructor must call close()
        reduction = Reduction(getattr(torch, dtype) if dtype is not None else None, self.worker_pool.summing)
        watched = functools.partial(is_watched, options, formats, learned)
        counter = functools.partial(counter_of, options, learned, devices[0])
        tile = options.token_tiles
        self._told_tiles = False
        self.tiles = None if tile is None else TokenTiles(tile, room_for_calls(model.layers, options, devices))
        given = (lambda: learned.randomness, formats, watched, forwards, model.bucket_of, counter, self.tiles)
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
            exchange=_exchange_of(peers, model, options) if peers is not None else None,
        )
        self._gradients = self.context.gradients
        self._interceptors = layers = [Interceptor(x) for x in model.layers]
        self.evaluations = EvaluationPipeline(
            self.context, layers, lambda: self._metrics.bring_to_host(), self._count_uploads
        )
        self._planner = Planner(self.context, lambda: self.windows_left())
        self._metrics = HostMetrics(module if self.worker_pool.accelerator is not None else nn.Module())
        try:
            self._planner.reserve_for_layers()
        except BaseException:
            self.close()
            raise

    # -- training -----------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    @remedied()
    def train_window(
        self,
        functions: Sequence[Callable[[], Any]],
        weights: LossWeights,
        seed: tuple[int, ...],
        *,
        zero_grad: bool = True,
    ) -> WindowResult:
        """Run ``training_step`` on the microbatches of a window, and their backward.

        Args:
            functions: ``training_step`` with the arguments of each microbatch.
            weights: how much the microbatches count.
            seed: numbers that identify the window. Every random state of the step is derived from them.
            zero_grad: whether to drop gradients that earlier windows accumulated and no optimizer step has used.

        Returns:
            The results of the microbatches. The backward of their losses, which the result's ``gradients`` make, puts
            gradients into ``.grad``, or sets the factor with which `AsyncOptimizer` takes them.
        """
        self._prepare(zero_grad=zero_grad)
        learned, several, wants_plan = self.learned, len(functions) > 1, self.options.plan_text is not None
        learned.plans = learned.plan is None and not learned.in_order and (several or wants_plan)
        overlaps = self._may_overlap
        if not overlaps or (self._step_in_flight is not None and self._step_in_flight.cancel_scope.failed):
            self._drain()
        step = Step(self.context, seed, weights, self.updates, self._step_in_flight, overlaps=overlaps)
        random_state = GlobalRandomState(self.worker_pool.devices)
        switched_off = self._set_up_step()
        runs: list[MicrobatchTask] = []
        try:
            with self._failing(step):
                with intercepted(self._interceptors, step.cancel_scope.fail):
                    random_state.park()
                    learned.module_state.begin()
                    try:
                        self._run(step, functions)
                    finally:
                        random_state.restore()
                        runs = step.runs
                before, self._step_in_flight = self._step_in_flight, step
                if before is not None:
                    self._end(before)
                self.model.buffers.settle()
                result = self._result_of(runs, step, None)
                self._metrics.bring_to_host()
            self.hints.after_step(switched_off)
            if not several and learned.plan is None and len(self.worker_pool.workers) > 1:
                self.hints.of_one_microbatch(len(self.worker_pool.workers))
            self._say_tiles()
            measured = self.tiles is None or not self.tiles.came  # else some calls were measured without tiles
            if several and not learned.in_order and (buffer := step.met_buffer):
                late = "which this window is the first to do, " if learned.plan is not None else ""
                self._planner.run_in_order(
                    f"{buffer} changes in calls of its layer, and code between layers reads or writes it, {late}and "
                    "what is in it depends on their order",
                    "leave plan out.",
                )
            elif learned.plans and measured and step.has_loss:
                self._plan_from(step, len(functions))
            elif not several:
                learned.recent = step.traces[0]
            if step.late:
                self._refuse_late(step)
            if step.off_plan is not None and step.off_plan.left:
                self._learn_from(step.off_plan)
            self._given = step.gradients
            if self.updates is not None and step.gradients is not None and not step.late:
                self.updates.offer(step.gradients)
        except Exception as error:
            failed = next((run.index for run in runs if run.error is error), 0)
            if not failed:
                raise
            return self._result_of(runs[:failed], step, runs[failed].error)
        finally:
            if not (step.spec.overlaps and step.gradients is not None):
                self._drain()
        if step.late:
            self.enable_async_optimizer(None)  # until the engine is set up again, before the next batch
        return result

    def _result_of(self, runs: Sequence[MicrobatchTask], step: Step, error: Exception | None) -> WindowResult:
        """Return what the microbatches of a finished forward have given, with modules as the last one has left them.

        Args:
            runs: the microbatches; after an ``error``, those before the one that has raised it.
            step: their step.
            error: see `WindowResult`.
        """
        state, buffers = self.learned.module_state, self.model.buffers.take_history()
        state.show(None)
        results = [MicrobatchResult(r.output, r.loss, r.weight, r.differentiable, r.logs, r.kept) for r in runs]
        result = WindowResult(results, step.finish() if error is None else None, error)
        kept = [run.kept for run in runs if run.kept is not None]
        if kept:
            if any(run.ended_early for run in runs):
                state.leave_latest(kept)
            state.rewind()
            buffers.show(-1)

            def show(microbatch: int) -> None:
                kept[microbatch].put()
                buffers.show(microbatch)

            result.show = show
        return result

    def _refuse_late(self, step: Step) -> None:
        """Raise if the step's late parameters cannot be trained from here on.

        Raises:
            RoundPipeError: an option needs to know all parameters before the step, or microbatches have computed with
                a parameter that others have replaced.
        """
        registered = f"training_step registered parameter {self.model.name_of(step.late[0])!r}"
        if self.options.staleness or self.context.exchange is not None:
            why = "with staleness=1" if self.options.staleness else "on several machines"
            raise RoundPipeError(
                f"{registered} and computes with it, which is not possible {why}: the optimizer knows its parameters "
                "before a step. Register it between steps, for example in on_train_batch_start."
            )
        assert step.gradients is not None
        now = set(map(id, self.model.module.parameters()))
        gone = [p for p in step.gradients.masters if id(p) not in now]
        if step.spec.several and gone:
            name = next((name for name, p in self._named if p is gone[0]), "")
            raise RoundPipeError(
                f"{registered} and replaced {name!r}, with which other microbatches of the batch have computed. "
                "Replace it between steps, for example in on_train_batch_start, or set overlap=False."
            )

    def _plan_from(self, step: Step, microbatches: int) -> None:
        """Make a plan; or turn tiles on, with which the next batch is learned, if no plan fits without them."""
        tiles = self.tiles
        try:
            self._planner.plan_from(step.spec.recorder, step.traces, microbatches)
        except DoesNotFit:
            if tiles is None or tiles.on:
                raise
            tiles.turn_on()

    def _learn_from(self, off_plan: OffPlan) -> None:
        """Learn the next batches anew, as microbatches have made calls that the plan does not have."""
        again = self.options.plan_text is None and self.learned.learns_again
        self.hints.of_other_calls(off_plan.what, again=again)
        if again:
            self.learned.unseen += off_plan.left.values()

    @interrupts_deferred()
    @remedied()
    def train_manually(self, function: Callable[[], Any], seed: tuple[int, ...]) -> Any:
        """Run ``function()``, a ``training_step`` under manual optimization.

        Args:
            function: ``training_step`` with its arguments bound. It calls backward and optimizers itself.
            seed: numbers that identify the batch.

        Returns:
            What ``function`` returned.
        """
        self._prepare(zero_grad=False)
        step, switched_off = ManualStep(self.context, seed, self.updates), self._set_up_step()
        try:
            with self._failing(step), intercepted(self._interceptors, step.cancel_scope.fail):
                output = step.run(function)
                self.model.buffers.settle()
                self.model.buffers.take_history()
            self._end(step)
            self._metrics.bring_to_host()
        finally:
            self._drain()
        self.hints.after_step(switched_off)
        self._say_tiles()
        return output

    def _say_tiles(self) -> None:
        """Say which modules run in tiles of tokens, or that none does, though the options ask for it."""
        tiles = self.tiles
        if tiles is not None and not self._told_tiles and (tiles.ran or tiles.compared):
            self._told_tiles = True
            why_not = {layer.name: tiles.why_not(layer) for layer in self.model.layers}
            self.hints.of_tiles(tiles.tile, tiles.ran, {} if self.options.token_tiles == "auto" else why_not)

    def _prepare(self, *, zero_grad: bool) -> None:
        """Settle the last batch's gradients, then prepare the weights for a new batch.

        By now it is known whether the last losses were differentiated, and whether an optimizer step followed.
        """
        given, self._given = self._given, None
        unused = given is not None and not given.handed_out
        if self.updates is not None:
            if unused:
                self._drain()
            if given is not None and self._step_in_flight is None:
                given.arrive()  # if this step fails, the devices stop, and the update would be incomplete
            self.updates.begin(zero_grad=zero_grad)
        elif given is not None and unused:
            given.release()
        self._begin()

    @property
    def _may_overlap(self) -> bool:
        """Whether a step's backward may continue after its outputs were returned, beside the next step.

        Updates must go through the optimizer's thread, and there must be a plan. Each other condition rules out
        something that the main thread changes in the meantime:

        * attributes that each microbatch has its own value of: code in its backward may read them;
        * random generators, if backward draws: the main thread uses them;
        * logging in backward: logs are issued when ``training_step`` returns;
        * torch's default dtype, with a precision that sets it within a step only.
        """
        return (
            self.updates is not None
            and self.learned.plan is not None
            and not self.learned.module_state.put_back
            and not self.learned.randomness.draws_in_backward
            and not self.learned.logs_in_backward
            and not self.formats.sets_default
        )

    @contextlib.contextmanager
    def _failing(self, step: Step) -> Iterator[None]:
        """Tie ``step`` to the optimizer's thread, and clean up if it fails.

        An update that fails while the step runs fails the step. A step that fails is ended together with the one
        before it; the optimizer's thread then finishes the updates that were submitted.
        """
        updates = self.updates
        if updates is not None:
            updates.accompany(step.cancel_scope)
        try:
            yield
        except BaseException as error:
            if step.spec.overlaps and not step.cancel_scope.failed:
                step.stop(error)  # its microbatches go on, and would wait for what is dropped here
            self._looked_at = True  # versions may lag behind the submitted updates: publish again before the next step
            self._gradients.drop()  # they hold part of a step, or wait for downloads that will never finish
            self.model.buffers.drop()
            before, self._step_in_flight = self._step_in_flight, None
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
                with self._failing(step):
                    if step.spec.overlaps:
                        step.drain()
                    self._step_in_flight = None
                self._end(step)
        finally:
            self._switched_off = None
            self._around.close()

    def _end(self, step: Step, *, failed: bool = False) -> None:
        """Account for ``step``, of which nothing is in flight any more, and release it."""
        if self.updates is not None:
            self.updates.leave(step.cancel_scope)
        if not failed:
            self._gradients.give_back()
            self._count_uploads(step.spec.recorder)
            self._retries.after_step(step.plan, step.retries)
            self._report = report_of(step, self._retries.last, self.weights_uploaded)
        step.release()

    def _count_uploads(self, recorder: Recorder) -> None:
        self.weights_uploaded += sum(recorder.nbytes(("upload_weights",), len(self.worker_pool.workers)))

    def _follow_caller(self) -> None:
        for device in self.worker_pool.devices:
            device.follow_caller()

    def _set_up_step(self) -> list[str]:
        """Enter the settings that hold until no step is in flight.

        Returns:
            The list that `without_caches` yields: what it has switched off.
        """
        self._follow_caller()
        if self._switched_off is None:
            self._switched_off = self._around.enter_context(without_caches(self.model.module))
            self._around.enter_context(self.worker_pool.devices[0].step_settings())
        return self._switched_off

    @interrupts_deferred()
    def enable_async_optimizer(self, optimizer: Callable[[], Optimizer | None] | None) -> None:
        """Choose who applies gradients from now on.

        Args:
            optimizer: returns the one that `AsyncOptimizer` steps, on its own thread. None: gradients go to ``.grad``,
                and the caller runs the optimizer. What an open accumulation window has gathered so far moves to
                ``.grad``.
        """
        if (enabled := optimizer is not None) != (self.updates is not None):
            if (exchange := self.context.exchange) is not None:
                exchange.step_apart(enabled)
            self._drain()
            before, scales = self.updates, self.formats.scales
            around = self.worker_pool.devices[0].host_thread_settings
            staleness, exchange = self.options.staleness, self.context.exchange
            self.updates = (
                AsyncOptimizer(self.model.buckets, optimizer, staleness, scales, around, exchange)
                if optimizer is not None
                else None
            )
            if before is not None:
                before.retire()
                gradients = before.accumulated()  # the accumulation window stays open
                for master in self.model.masters:
                    if (gradient := gradients.get(id(master))) is not None:
                        master.grad = gradient.to(master)

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
        """Wait until nothing is in flight, so that the caller may read and write weights and optimizer state.

        Within ``training_step`` only the submitted updates are waited for, as the step itself is in flight.
        """
        self._looked_at = True
        if isinstance(run := current(), MicrobatchTask):  # called by training_step
            if self.updates is not None:
                run.segments.aside(self.updates.settle)
            return
        self._drain()
        if self.updates is not None:
            self.updates.settle(within_batch=self.within_window())

    @interrupts_deferred()
    @remedied()
    def evaluate(self, function: Callable[..., Any], *args: Any, kind: Hashable = ()) -> Any:
        """Run ``function(*args)``, a validation, test or predict step of one batch, alone and forward only.

        Args:
            function: the step.
            args: its arguments.
            kind: under which `evaluations` will know the step's calls; empty if it need not.

        Returns:
            What ``function`` returned.
        """
        self._prepare_evaluation()
        evaluation = Evaluation(self.context, self.evaluations.forwards)
        try:
            with self.evaluations.alone(evaluation, kind):
                output = evaluation.run(function, args, {})
            self.model.buffers.settle()
            self.model.buffers.take_history()
            self._metrics.bring_to_host()
            return output
        except BaseException:
            self._gradients.drop()  # downloads into them may have been aborted
            raise
        finally:
            self._count_uploads(evaluation.recorder)

    @interrupts_deferred()
    @remedied()
    def begin_evaluations(self, kind: Hashable, in_flight: int) -> None:
        """Let `evaluations` run several batches of ``kind`` at a time."""
        self._prepare_evaluation()
        self.evaluations.begin(kind, in_flight)

    def _prepare_evaluation(self) -> None:
        self.evaluations.end()
        self.worker_pool.refuse_broken()
        self._drain()
        if self.updates is not None:
            self.updates.settle(within_batch=self.within_window())
        self._sync_weights(newest=True)
        self._follow_caller()

    def _run(self, step: Step, functions: Sequence[Callable[[], Any]]) -> None:
        learned, randomness = self.learned, self.learned.randomness
        if learned.plan is not None and learned.trace is not None:
            randomness.learning = False
            step.run_planned(learned.plan, learned.trace, functions)
        else:
            randomness.learning, randomness.comparing = True, learned.plans
            step.run_one_by_one(functions)

    def _begin(self) -> None:
        self.evaluations.end()
        self.worker_pool.refuse_broken()
        tiles_came = self.tiles is not None and self.tiles.came
        if (now := self.model.trainable()) != self._trainable or is_surprised(self.model.layers) or tiles_came:
            self._trainable = now
            if self.tiles is not None:
                self.tiles.came = False
            self.settle()
            self._planner.forget()
            with interrupts_allowed():  # as in `reserve_gradients`
                self._gradients.reserve_again()
        elif self.learned.plan is not None and (self.learned.unseen or self.learned.in_order):
            self.settle()
            self._planner.learn_again()
        self._sync_weights(newest=False)
        self._accumulators.watch(self.model.masters)
        for device in self.worker_pool.devices:
            device.reset_peak()

    def _sync_weights(self, *, newest: bool) -> None:
        """Bring what user code did to weights since the last batch into the buffers that uploads read.

        Args:
            newest: whether uploads must see all updates, whatever the staleness. They are settled first.
        """
        updates = self.updates
        if updates is not None and self._looked_at:
            updates.settle()
            # `reattach` counts the tensors that share a master's memory: the optimizer's aliases are not user code's.
            updates.release_masters()
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
        """Allocate host memory for the gradients of one call of each layer.

        Called before the first batch, whose times are measured: page-locking memory within it would distort them.
        """
        with interrupts_allowed():  # may allocate half of the memory that training takes, and nothing runs yet
            self._gradients.reserve()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return the report of the last finished step, see ``RoundPipeStrategy.report``; empty before there is one."""
        return self._report() if self._report is not None else Report()

    def close(self) -> None:
        """Apply the updates that were submitted, stop all threads, and free all device memory."""
        with contextlib.ExitStack() as rest:  # runs in reverse order, and each callback even if another one raises
            rest.callback(self.worker_pool.close)
            rest.callback(self._metrics.end)
            rest.callback(self._accumulators.end)
            if self.updates is not None:
                rest.callback(self.updates.close)
            rest.callback(self._drain)
            rest.callback(self.evaluations.end)


def _exchange_of(peers: Peers, model: HostModel, options: Options) -> GradientExchange:
    dtype = None if options.network_dtype is None else getattr(torch, options.network_dtype)
    return GradientExchange(peers, model.buckets, dtype, shards=options.shard_optimizer)
