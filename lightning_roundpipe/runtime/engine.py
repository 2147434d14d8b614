"""What outlives a step: layers, workers, the trace and the plan, and the counter of slots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.layers import find_layers, parameters_outside
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import partition_within
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime import microbatch
from lightning_roundpipe.runtime.belongings import Belongings
from lightning_roundpipe.runtime.budget import check_layers_fit, check_plan_fits, worker_bytes
from lightning_roundpipe.runtime.calls import Runner
from lightning_roundpipe.runtime.crew import Crew
from lightning_roundpipe.runtime.evaluation import Evaluation
from lightning_roundpipe.runtime.events import Recorder
from lightning_roundpipe.runtime.gradients import StepGradients
from lightning_roundpipe.runtime.hints import Hints
from lightning_roundpipe.runtime.interception import Interceptor, intercepted, without_caches
from lightning_roundpipe.runtime.interrupts import allowed, held
from lightning_roundpipe.runtime.report import report_of
from lightning_roundpipe.runtime.rng import GlobalRandomState, Randomness
from lightning_roundpipe.runtime.samples import batch_size
from lightning_roundpipe.runtime.step import Step
from lightning_roundpipe.runtime.sums import GradientBuffers, HostGradients
from lightning_roundpipe.runtime.trace import Trace, TracedCall, distinct_layers
from lightning_roundpipe.runtime.units import units_of
from lightning_roundpipe.runtime.updates import Updates
from lightning_roundpipe.runtime.weights import HostLayer


class Engine:
    """Trains one LightningModule on a set of devices.

    Args:
        module: the user's LightningModule, with its weights on the CPU.
        devices: one per worker.
        options: checked options of the strategy.
        inform: called with what the user should know once.
    """

    def __init__(
        self, module: nn.Module, devices: list[Device], options: Options, inform: Callable[[str], None]
    ) -> None:
        self.module = module
        self.devices = devices
        self.options = options
        owned: dict[int, Any] = {}
        with allowed():  # copies all weights, and there is no thread yet
            self.layers = [
                HostLayer(i, name, layer, devices[0], owned, apart=bool(options.staleness))
                for i, (name, layer) in enumerate(find_layers(module, options.layers).items())
            ]
        self.units = units_of(self.layers, module.parameters(), apart=bool(options.staleness))
        self.unit_of = {id(p): unit for unit in self.units for p in unit.masters}
        self.updates: Updates | None = None
        """The optimizer's thread; None while gradients are handed to ``.grad`` and the caller steps."""
        types = {d.torch_device.type for d in devices}
        self.device_types = tuple(sorted({"cpu", *types}))
        self.accelerator = next(iter(types - {"cpu"}), None)
        self.recorder = Recorder()
        self.randomness = Randomness()
        self.trace: Trace | None = None
        self.recent: Trace | None = None
        """What the last batch of one microbatch called, as a guess at what the next one will."""
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.plans = False
        """Whether the running step is one that a plan will be made from."""
        self.in_order = False
        """Whether microbatches have to run one after another in every step."""
        self.probed: set[tuple[int, int]] = set()
        """Calls, by layer and use, of which it is known whether they compute other bits without grad."""
        self.walked: set[tuple[int, int]] = set()
        """Calls, by layer and use, whose graph was seen to stay inside the layer."""
        self.weights_uploaded = 0
        self._given: StepGradients | None = None
        """What the last batch's loss hands out."""
        self._looked_at = False
        """Whether somebody may have seen weights, or written to them, since the last batch."""
        self._interceptors = [Interceptor(layer) for layer in self.layers]
        self._buffers: dict[tuple[int, int], GradientBuffers] = {}
        self._slot_count = 0
        self._trainable = self._trainable_now()
        self.belongings = Belongings(module, self.layers)
        self._in_glue = parameters_outside(module, [x.module for x in self.layers])
        self.hints = Hints(module, inform)
        self._report: Callable[[], dict[str, Any]] | None = None
        check_layers_fit(self.layers, options, devices[0])
        self.crew = Crew(devices, options.watchdog_timeout)  # whose threads somebody has to stop from here on
        self.workers = self.crew.workers
        self.runners = [Runner(w, lambda: self.randomness) for w in self.workers]
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    # -- training -----------------------------------------------------------------------------------------------------

    @held()
    def train_batch(
        self,
        function: Callable[..., Any],
        batch: Any,
        rest: tuple[Any, ...],
        seed: tuple[int, ...],
        *,
        anew: bool = True,
    ) -> Any:
        """Run ``function`` (training_step) on the microbatches of ``batch``, and their backward.

        Args:
            function: called with a microbatch and ``rest``.
            batch: what the dataloader gave.
            rest: the other arguments of training_step, given to every microbatch.
            seed: numbers that identify the batch; all random states of the step derive from them.
            anew: whether gradients of earlier batches that no optimizer step has used are to be dropped.

        Returns:
            The merged output; the backward of its loss gives the masters their gradients, or has `updates` take them.
        """
        if self.updates is not None:
            if self._given is not None:
                self._given.arrive()  # should this step fail, the devices stop, and the update would be cut short
            self.updates.begin(anew=anew)
        elif self._given is not None and self._given.scale is None:
            self._given.let_go()  # nobody asked for them
        self._given = None
        self._begin()
        sizes = self._sizes(batch)
        parts = microbatch.split(batch, sizes)
        self.plans = self.plan is None and not self.in_order and (len(sizes) > 1 or self.options.plan is not None)
        step = Step(self, seed, sizes, self._given_weights(parts))
        args = [(part, *rest) for part in parts]
        started = time.perf_counter()
        random_state = GlobalRandomState(self.devices)
        try:
            with (
                self._failing_with_updates(step),
                intercepted(self._interceptors, step.control.fail),
                without_caches(self.module) as switched_off,
            ):
                random_state.park()
                try:
                    self._run(step, function, args)
                finally:
                    random_state.restore()
            output = step.finish()
            self.hints.after_step(self.layers, switched_off, len(sizes))
            self.weights_uploaded += sum(self.recorder.nbytes(("upload_weights",), len(self.workers)))
            self._report = report_of(step, time.perf_counter() - started)
            if self.plans and step.has_loss:
                self._make_plan(step)
            elif len(sizes) == 1:
                self.recent = step.runs[0].trace
            self._given = step.gradients
            if self.updates is not None and step.gradients is not None:
                self.updates.offer(step.gradients)
        finally:
            step.let_go()
        return output

    @contextlib.contextmanager
    def _failing_with_updates(self, step: Step) -> Iterator[None]:
        """An update that fails while the step runs fails the step; a step that fails leaves whole updates behind."""
        updates = self.updates
        if updates is not None:
            updates.accompany(step.control)
        try:
            yield
        except BaseException:
            self._buffers.clear()  # half a step is in them, or will never arrive
            if updates is not None:
                updates.drop()
            raise
        finally:
            if updates is not None:
                updates.accompany(None)

    def step_apart(self) -> None:
        """From now on gradients are not handed to ``.grad``: `updates` applies them when it is told to."""
        if self.updates is None:
            self.updates = Updates(self.units, self.options.staleness)

    def settle(self) -> None:
        """Before anybody looks at weights or at the optimizer's state, or writes to them: nothing is on its way."""
        self._looked_at = True
        if self.updates is not None:
            self.updates.settle()

    @held()
    def evaluate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` (a validation, test or predict step), forward only."""
        self._refuse_broken()
        if self.updates is not None:
            self.updates.settle()
        self._adopt(newest=True)
        recorder, self.recorder = self.recorder, Recorder()
        for worker in self.workers:
            worker.recorder = self.recorder
        try:
            with intercepted(self._interceptors):
                return Evaluation(self).run(function, args, kwargs)
        except BaseException:
            self._buffers.clear()  # what was on its way to them will not arrive
            raise
        finally:
            self.weights_uploaded += sum(self.recorder.nbytes(("upload_weights",), len(self.workers)))
            self.recorder = recorder

    def _run(self, step: Step, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        if self.plan is not None and self.trace is not None:
            self.randomness.learning = False
            step.run_planned(self.plan, self.trace, function, args)
        else:
            self.randomness.learning, self.randomness.comparing = True, self.plans
            step.run_one_by_one(function, args)

    def _begin(self) -> None:
        self._refuse_broken()
        if parameters_outside(self.module, [x.module for x in self.layers]) != self._in_glue:
            raise RoundPipeError(
                "the module has other parameters outside its layers than at the start of training (one was added, "
                "removed or replaced), and a new one would get no gradient. Change the model before fit(), or write "
                "new values into the parameters it has."
            )
        if (now := self._trainable_now()) != self._trainable:
            self._trainable = now
            self.settle()
            self._forget_plan()
        self._adopt(newest=False)
        self.recorder = Recorder()
        for worker in self.workers:
            worker.recorder = self.recorder
            worker.device.reset_peak()

    def _refuse_broken(self) -> None:
        if self.crew.broken:
            raise RoundPipeError(
                "a thread of an earlier step never came back, so this engine cannot go on: call the Trainer's fit() "
                "again, or better start a new process, because the thread may still hold what others need."
            )

    def _adopt(self, *, newest: bool) -> None:
        """What user code has done to weights since the last batch is what travels.

        Args:
            newest: whether all updates are to be seen, whatever the staleness. They are settled, then.
        """
        for layer in self.layers:
            layer.adopt()
        updates = self.updates
        if updates is None:
            for unit in self.units if self.options.staleness else ():
                unit.refresh()
        elif self._looked_at or (newest and updates.wanted != updates.submitted):
            updates.settle()
            updates.publish_all()
        self._looked_at = False
        for layer in self.layers:
            layer.remember()

    def _trainable_now(self) -> list[bool]:
        return [p.requires_grad for layer in self.layers for p in layer.masters]

    def _forget_plan(self) -> None:
        """Other parameters are trained now: gradients flow elsewhere, so everything is learned again."""
        self.trace, self.recent, self.plan, self.costs = None, None, None, None
        self.in_order = False
        self.probed.clear()
        self.walked.clear()
        self.belongings = Belongings(self.module, self.layers)
        self.randomness = Randomness()
        for layer in self.layers if self.options.staleness else ():
            layer.set_apart()
        self._buffers.clear()
        for worker in self.workers:
            worker.forget()
        self._reserve()

    def _sizes(self, batch: Any) -> list[int]:
        count, size = self.options.num_microbatches, self.options.microbatch_size
        if count == 1:
            try:
                return [batch_size(batch)]
            except ValueError:
                return [1]
        return microbatch.sizes_of(batch_size(batch), count, size, len(self.workers))

    def _given_weights(self, parts: Sequence[Any]) -> list[float] | None:
        function = self.options.loss_weight or getattr(self.module, "loss_weight", None)
        if not callable(function) or len(parts) == 1:
            return None
        with allowed():
            return microbatch.given_weights(function, parts)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _make_plan(self, step: Step) -> None:
        self.trace = trace = self.trace or Trace()
        if not trace.learn([run.trace for run in step.runs], self.recorder.call_seconds(), len(self.layers)):
            return
        if not trace.calls:
            raise RoundPipeError(
                "training_step called none of the layers that were found "
                f"({', '.join(layer.name for layer in self.layers)}): name the modules it calls with layers=[...]."
            )
        self.costs = trace.costs()
        size = self.options.round_microbatches
        if self.options.plan is not None:
            plan = Plan.parse(self.options.plan)
            plan.validate(trace.names)
            check_plan_fits(plan, self.costs, self.options, self.devices[0])
        else:
            limit = worker_bytes(self.options, self.devices[0])
            with allowed():  # it may take its time, and nothing has been changed yet
                plan = partition_within(self.costs, len(self.workers), len(step.sizes), size, limit)
        if buffer := trace.torn_buffer(plan):
            self._run_in_order(buffer)
            return
        self._reserve_for(plan, trace)
        self.plan = plan

    def _run_in_order(self, buffer: str) -> None:
        why = f"{buffer} is changed by several calls of each microbatch, and what is in it depends on their order"
        if self.options.plan is not None:
            raise ValueError(f"{why}: plan must have these calls in one forward stage, or be left out.")
        self.in_order = True
        self.hints.say("order", f"{why}, so microbatches run one after another, without a plan.")

    def _reserve_for(self, plan: Plan, trace: Trace) -> None:
        weights = gradients = 0
        for stage in plan.stages():
            calls = trace.calls[stage.first : stage.last + 1]
            loaded = [c for c in calls if stage.phase != "backward" or c.taped]
            weights = max(weights, sum(layer.nbytes for layer in distinct_layers(loaded)))
            if stage.phase != "forward":
                gradients = max(gradients, sum(HostGradients.bytes_of(c.layer) for c in calls if c.taped))
        for worker in self.workers:
            worker.reserve(weights, gradients)

    def _reserve(self) -> None:
        """Arenas for one layer at a time, which is what runs without a plan needs."""
        weights = max(layer.nbytes for layer in self.layers)
        gradients = max(HostGradients.bytes_of(layer) for layer in self.layers)
        for worker in self.workers:
            worker.reserve(weights, gradients)

    # -- shared by the microbatches -----------------------------------------------------------------------------------

    def next_slot(self) -> int:
        self._slot_count += 1
        return self._slot_count - 1

    def buffers_of(self, call: TracedCall) -> GradientBuffers:
        """The host memory for the gradients of a call; made when first needed."""
        key = (call.layer.index, call.use)
        known = self._buffers.get(key)
        if known is None:
            known = self._buffers[key] = GradientBuffers(call.layer, self.devices[0])
        return known

    @property
    def version(self) -> int:
        """The number of the last update that the next step has to see."""
        return self.updates.wanted if self.updates is not None else 0

    def locate(self, tensor: Tensor, newest: Device | None) -> Device | None:
        """The device that ``tensor`` lives on; None is the host. ``newest`` is where its microbatch ran last."""
        there = [d for d in self.devices if d.torch_device == tensor.device]
        if not there:
            return None
        return newest if newest in there else there[0]

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """See ``RoundPipeStrategy.report``."""
        return self._report() if self._report is not None else {}

    def close(self) -> None:
        """Stop all threads and give everything on the devices back. What was submitted is applied."""
        updates, self.updates = self.updates, None
        try:
            if updates is not None:
                updates.close()
        finally:
            self.crew.close()
