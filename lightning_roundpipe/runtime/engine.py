"""What outlives a step: layers, workers, the trace and the plan, and the counter of slots."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.layers import find_layers
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import partition_within
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime import microbatch
from lightning_roundpipe.runtime.belongings import Belongings
from lightning_roundpipe.runtime.budget import check_layers_fit, check_plan_fits, worker_bytes
from lightning_roundpipe.runtime.calls import Runner
from lightning_roundpipe.runtime.crew import Crew
from lightning_roundpipe.runtime.evaluation import Evaluation
from lightning_roundpipe.runtime.events import DOWNLOADS, UPLOADS, Recorder, bubble_percent
from lightning_roundpipe.runtime.hints import Hints
from lightning_roundpipe.runtime.interception import Interceptor, intercepted, without_caches
from lightning_roundpipe.runtime.interrupts import allowed, held
from lightning_roundpipe.runtime.rng import GlobalRandomState, Randomness
from lightning_roundpipe.runtime.samples import batch_size
from lightning_roundpipe.runtime.step import Step
from lightning_roundpipe.runtime.trace import Trace, TracedCall, distinct_layers
from lightning_roundpipe.runtime.weights import HostGradients, HostLayer


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
        owned: set[int] = set()
        with allowed():  # copies all weights, and there is no thread yet
            self.layers = [
                HostLayer(i, name, layer, devices[0], owned)
                for i, (name, layer) in enumerate(find_layers(module, options.layers).items())
            ]
        self.master_ids = {id(p) for p in module.parameters()}
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
        self._interceptors = [Interceptor(layer) for layer in self.layers]
        self._sums: dict[tuple[int, int], HostGradients] = {}
        self._slot_count = 0
        self._trainable = self._trainable_now()
        self.belongings = Belongings(module, self.layers)
        self._in_glue = self._glue_parameters()
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
        self, function: Callable[..., Any], batch: Any, rest: tuple[Any, ...], seed: tuple[int, ...]
    ) -> Any:
        """Run ``function`` (training_step) on the microbatches of ``batch``, and their backward.

        Args:
            function: called with a microbatch and ``rest``.
            batch: what the dataloader gave.
            rest: the other arguments of training_step, given to every microbatch.
            seed: numbers that identify the batch; all random states of the step derive from them.

        Returns:
            The merged output; the backward of its loss gives the masters their gradients.
        """
        self._begin()
        sizes = self._sizes(batch)
        parts = microbatch.split(batch, sizes)
        self.plans = self.plan is None and not self.in_order and (len(sizes) > 1 or self.options.plan is not None)
        step = Step(self, seed, sizes, self._given_weights(parts))
        args = [(part, *rest) for part in parts]
        started = time.perf_counter()
        random_state = GlobalRandomState(self.devices)
        with intercepted(self._interceptors, step.control.fail), without_caches(self.module) as switched_off:
            random_state.park()
            try:
                self._run(step, function, args)
            except BaseException:
                self._sums.clear()  # half a step is in them, or will never arrive
                step.let_go()
                raise
            finally:
                random_state.restore()
        output = step.finish()
        self.hints.after_step(self.layers, switched_off, len(sizes))
        self._finish_report(step, time.perf_counter() - started)
        if self.plans and step.has_loss:
            self._make_plan(step)
        elif len(sizes) == 1:
            self.recent = step.runs[0].trace
        step.let_go()
        return output

    @held()
    def evaluate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` (a validation, test or predict step), forward only."""
        self._refuse_broken()
        self._adopt()
        recorder, self.recorder = self.recorder, Recorder()
        for worker in self.workers:
            worker.recorder = self.recorder
        try:
            with intercepted(self._interceptors):
                return Evaluation(self).run(function, args, kwargs)
        except BaseException:
            self._sums.clear()  # what was on its way to them will not arrive
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
        if self._glue_parameters() != self._in_glue:
            raise RoundPipeError(
                "the module has other parameters outside its layers than at the start of training (one was added, "
                "removed or replaced), and a new one would get no gradient. Change the model before fit(), or write "
                "new values into the parameters it has."
            )
        if (now := self._trainable_now()) != self._trainable:
            self._trainable = now
            self._forget_plan()
        self._adopt()
        self._used: dict[int, HostGradients] = {}
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

    def _adopt(self) -> None:
        for layer in self.layers:
            layer.adopt()
        for layer in self.layers:
            layer.remember()

    def _glue_parameters(self) -> list[int]:
        """Ids of the parameters that belong to no layer."""
        inside = {id(layer.module) for layer in self.layers}
        found, left = [], [self.module]
        while left:
            module = left.pop()
            found += [id(p) for p in module._parameters.values() if p is not None]
            left += [m for m in module._modules.values() if m is not None and id(m) not in inside]
        return found

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
        self._sums.clear()
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
                totals = [self.sums_of(c) for c in calls if c.taped]
                gradients = max(gradients, sum(t.layout.nbytes for t in totals if t is not None))
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

    def sums_of(self, call: TracedCall) -> HostGradients | None:
        """Where the gradients of a call are summed; made when first needed, begun anew in each step."""
        key = (call.layer.index, call.use)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = HostGradients(call.layer, self.devices[0])
        if not known.layout.nbytes:
            return None
        order = key[0] * 1_000_000 + key[1]
        if order not in self._used:
            self._used[order] = known
            known.restart()
        return known

    def used_sums(self) -> list[HostGradients]:
        """The sums of this step, in an order that no plan changes."""
        return [self._used[order] for order in sorted(self._used)]

    def locate(self, tensor: Tensor, newest: Device | None) -> Device | None:
        """The device that ``tensor`` lives on; None is the host. ``newest`` is where its microbatch ran last."""
        there = [d for d in self.devices if d.torch_device == tensor.device]
        if not there:
            return None
        return newest if newest in there else there[0]

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _finish_report(self, step: Step, seconds: float) -> None:
        recorder, plan, workers, costs = self.recorder, self.plan, len(self.workers), self.costs
        peaks = [d.peak_bytes() for d in self.devices]
        # Only rows are kept: the step itself holds every boundary tensor.
        slots = [
            {
                "slot": s.index,
                "worker": s.worker,
                "round": s.round,
                "phase": s.phase,
                "layers": [x.name for x in s.layers],
            }
            for s in step.slots
        ]
        microbatches = len(step.sizes)
        self.weights_uploaded += sum(recorder.nbytes(("upload_weights",), workers))
        total = self.weights_uploaded
        text = str(plan) if plan is not None else str(Plan.per_call(len(step.runs[0].trace.calls) or 1))

        def report() -> dict[str, Any]:
            rows = recorder.rows()
            return {
                "plan": text,
                "profiled": plan is None,
                "workers": workers,
                "microbatches": microbatches,
                "slots": slots,
                "bytes_uploaded": recorder.nbytes(UPLOADS, workers),
                "bytes_downloaded": recorder.nbytes(DOWNLOADS, workers),
                "weights_bytes_uploaded_total": total,
                "peak_device_bytes": peaks,
                "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "bubble_pct": bubble_percent(rows, workers),
                "step_time_s": seconds,
                "costs": costs.to_dict() if costs is not None else None,
                "events": rows,
            }

        self._report = report

    def report(self) -> dict[str, Any]:
        """See ``RoundPipeStrategy.report``."""
        return self._report() if self._report is not None else {}

    def close(self) -> None:
        """Stop all threads and give everything on the devices back."""
        self.crew.close()
