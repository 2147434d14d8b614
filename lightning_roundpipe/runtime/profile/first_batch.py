"""Makes a plan from the traces of the first batch, and the arenas that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.memory import (
    BESIDE,
    Memory,
    Reserved,
    ahead_within,
    boundary_bytes,
    fits,
    partition_within,
    reserved_within,
    unpacked_within,
)
from lightning_roundpipe.planning.meter import Counter
from lightning_roundpipe.planning.nominal import nominal, with_times_of_bytes
from lightning_roundpipe.planning.pipeline import Rules, period_of_ends, step_ends
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, partly_fused, search_partition, unpacking_plans
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.learned import Learned
from lightning_roundpipe.runtime.core.trace import OtherCalls, Trace
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.memory.budget import (
    check_plan_fits,
    libraries_note,
    memory_of_workers,
    worker_bytes,
)
from lightning_roundpipe.runtime.memory.grad_buffers import GradientLayout
from lightning_roundpipe.runtime.memory.host_layer import begin_to_train
from lightning_roundpipe.runtime.profile.autocast_weights import send_rounded
from lightning_roundpipe.runtime.profile.speeds import worker_speeds
from lightning_roundpipe.runtime.reporting.events import Recorder

WORTH_S = 0.5
"""A step that takes at least this many seconds is worth a search for a better plan, however few steps follow."""
_SHORTEST_SEARCH_S = 2.0
"""Its search may take so long, which is what it needs to come within 3 % of what a longer one finds."""
_SEARCH_STEPS = 2.0
"""A search may take as long as so many steps, where that is longer."""
_SEARCH_SHARE = 0.1
"""For shorter steps it may take this share of the training that follows, as far as that is known."""
_LEAST_SEARCH_S = 0.1
"""A shorter one finds too little."""
_STEPS = 4
"""Plans are compared by the mean of so many steps, after as many that fill the pipeline."""
_MOST_TURNS = 60_000
"""Most turns that are simulated, to choose among the plans that the search has found, if no steps repeat."""


def needs_offloading(plan: Plan, costs: Costs, workers: int, limit: Memory | None) -> bool:
    """Return whether ``plan`` does not fit into workers if the outputs of waiting microbatches stay there."""
    return not fits(plan, costs.without_offloading(), workers, limit, ahead=True, most=True)


class Planner:
    """Makes plans, and reserves the memory that they need on the workers and the host.

    It is where the `planning` package meets the runtime, so it imports from both.

    Args:
        engine: the context of the engine.
        windows_left: returns how many windows will be trained on; infinite if nothing says when training ends.
    """

    def __init__(self, engine: EngineContext, windows_left: Callable[[], float]) -> None:
        self._engine, self._options, self._learned = engine, engine.options, engine.learned
        self._windows_left = windows_left
        self._devices, self._workers = engine.worker_pool.devices, engine.worker_pool.workers

    def plan_from(self, recorder: Recorder, traces: Sequence[Trace], microbatches: int) -> None:
        """Make a plan from a finished step, if its traces show all calls and microbatches may run side by side.

        Args:
            recorder: the events of the step.
            traces: the layer calls of each microbatch.
            microbatches: their number.

        Raises:
            RoundPipeError: if training_step called no layer.
            DoesNotFit: if no plan fits the memory budget.
            ValueError: if the plan in the options does not fit the trace or the memory budget, or a buffer allows none.
        """
        options, learned, layers = self._options, self._learned, self._engine.model.layers
        learned.trace = trace = learned.trace or Trace()
        static = options.plan == "static"
        alike = {layer.name: (type(layer.module), layer.nbytes) for layer in layers}
        speeds = [] if static else worker_speeds(recorder, self._devices, alike)
        seconds = recorder.nominal_seconds if static else recorder.call_seconds(speeds)
        try:
            complete = trace.learn(traces, seconds, len(layers))
        except OtherCalls as error:
            return self.run_in_order(error.why, "each microbatch of a plan must call the layers in one order.")
        if not complete or learned.awaits_calls():
            return
        if not trace.calls:
            raise RoundPipeError(
                "training_step called none of the layers that were found "
                f"({', '.join(layer.name for layer in layers)}): name the modules it calls with layers=[...]."
            )
        if send_rounded(layers, self._workers):
            self.reserve_for_layers()
        self._devices[0].settle_libraries(self._devices, microbatches)
        for worker in self._workers:
            worker.warm_up()
        rates = rates_of(self._devices[0])
        costs = trace.costs(self._engine.gradients.reduction.dtype, lambda nbytes: rates.product_s(0.0, nbytes, "fp32"))
        if static:
            costs = with_times_of_bytes(costs, rates)
        elif speeds:
            costs = costs.at_speeds(speeds)
        learned.costs = costs
        limit = memory_of_workers(options, self._devices)
        if (text := options.plan_text) is not None:
            plan = Plan.parse(text)
            try:
                plan.validate(trace.names)
            except ValueError as error:
                if cuts := self._engine.hints.cuts:
                    finer = f" A plan made with more memory does not know that layers are cut here: {cuts}."
                    raise ValueError(f"{error}{finer}") from None
                raise
            check_plan_fits(plan, costs, options, self._devices)
        else:
            try:
                with interrupts_allowed():  # the search may be long, and an interrupt leaves nothing half done
                    plan = self._cut(costs, trace, microbatches, limit)
                    if not plan.unpack_once:  # beside the largest arena, stages unpack once wherever there is room
                        plan = unpacked_within(plan, costs, len(self._workers), microbatches, limit, most=True)
            except ValueError as error:
                raise DoesNotFit(f"{error}{libraries_note(options, self._devices)}") from None
        if buffer := trace.torn_buffer(plan):
            why = f"{buffer} is changed by several calls of each microbatch, and what is in it depends on their order"
            self.run_in_order(why, "plan must have these calls in one forward stage, or be left out.")
            return
        learned.offloads = needs_offloading(plan, costs, len(self._workers), limit)
        if not learned.offloads:
            learned.costs = costs = costs.without_offloading()
        self._reserve_for(plan, costs, limit)
        learned.plan = plan

    def _cut(self, costs: Costs, trace: Trace, microbatches: int, limit: Memory | None) -> Plan:
        """Return the plan of the paper's algorithm, or a better one where the training is long enough for a search."""
        options, workers, size = self._options, len(self._workers), self._options.round_microbatches
        stage_s = options.stage_seconds
        plan = partition_within(costs, workers, microbatches, size, limit, stage_s=stage_s)
        plan = ahead_within(plan, costs, workers, limit)
        stale = bool(options.staleness)
        rules = replace(self._rules(costs), memory=limit)

        def step_s(plan: Plan) -> float:
            """Seconds of each of several steps, with their copies and updates, as `roundpipe-plan` counts them."""
            ends = step_ends(plan, costs, workers, microbatches, rules, 2 * _STEPS)
            return period_of_ends(ends, _STEPS)

        [seconds] = step_ends(plan, costs, workers, microbatches)
        limits = Limits.usual(costs, workers, microbatches, limit)
        if size is None and stage_s is None:
            others = unpacking_plans([plan], costs, workers, microbatches, limits, ahead=True)
            plan = min((one for one in others if one is plan or not trace.torn_buffer(one)), key=step_s)
            if not plan.forward:
                others = partly_fused(costs, workers, microbatches, limits)
                plan = min([plan, *(one for one in others if not trace.torn_buffer(one))], key=step_s)
        if workers == 1 or size is not None or stage_s is not None:
            return plan
        if trace.torn_buffer() is not None:
            limits = replace(limits, side_by_side=False)
        if beside := limits.beside(costs, workers, microbatches):
            plan = min([plan, *beside], key=step_s)
        search_s = min(SEARCH_SECONDS, max(_SHORTEST_SEARCH_S, _SEARCH_STEPS * seconds))
        # The paper's algorithm knows no unequal workers.
        if seconds >= WORTH_S or costs.unequal or isinstance(limit, tuple):
            self._say_search(seconds, search_s)
        else:
            search_s = min(search_s, _SEARCH_SHARE * seconds * self._windows_left())
            if search_s < _LEAST_SEARCH_S:
                return plan
        turns = 2 * _STEPS * microbatches * (2 * len(costs) - 1)
        found = search_partition(
            costs, workers, microbatches, limits, 1 if stale else 0, rules.host, search_s,
            judge=lambda plan: math.inf if trace.torn_buffer(plan) else step_s(plan),
            judged=max(1, min(16, _MOST_TURNS // turns)),
        )  # fmt: skip
        return found if step_s(found) < step_s(plan) and not trace.torn_buffer(found) else plan

    def _say_search(self, seconds: float, search_s: float) -> None:
        text = "searching for a faster plan by the shapes of the calls, which takes some seconds."
        if self._options.plan != "static":
            text = f"a step takes {seconds:.3g} s: searching for a faster plan, which takes about {search_s:.0f} s."
        self._engine.hints.say("plan", text)

    def _rules(self, costs: Costs) -> Rules:
        """Return what takes time beside computing. It is not measured, and has its nominal rates.

        Emulated devices have the links of the options. Whether gradients are clipped shows only later.
        """
        options = self._options
        trained = [parameter for parameter in self._engine.model.masters if parameter.requires_grad]
        copied = [master for master in trained if self._engine.model.formats.differ(master)]
        copy_bytes = max((self._engine.model.formats.of(master).itemsize for master in copied), default=0)
        reduced = any(call.reduced_bytes is not None for call in costs)
        dtype = self._engine.gradients.reduction.dtype
        rules = rates_of(self._devices[0]).rules(
            1 if options.staleness else 0, copy_bytes, dtype.itemsize if reduced and dtype is not None else None
        )
        if self._devices[0].torch_device.type != "cpu":
            return rules
        rate = options.emulation.bandwidth
        links = None if rate is None else Links(float(rate), float(rate))
        host = HostTime(hop_s=2 * options.emulation.latency)  # from the device to the host, and to the next device
        return replace(rules, host=host, links=links)

    def run_in_order(self, why: str, remedy: str) -> None:
        """Run microbatches one after another without a plan, from the next window on.

        Raises:
            ValueError: if the options give a plan; the message is ``why`` and ``remedy``.
        """
        if self._options.plan_text is not None:
            raise ValueError(f"{why}: {remedy}")
        self._learned.in_order = True
        self._engine.hints.say("order", f"{why}, so microbatches run one after another, without a plan.")

    def _reserve_for(self, plan: Plan, costs: Costs, limit: Memory | None) -> None:
        """Reserve what the stages need that come to each worker: to any of them, unless their memory is unequal."""
        workers = len(self._workers)
        for worker in self._workers:
            own = worker.index if isinstance(limit, tuple) else None
            budget = limit[worker.index] if isinstance(limit, tuple) else limit
            worker.reserve(reserved_within(plan, costs, workers, budget, worker.device.lead_bytes, own))
        self._devices[0].reserve_host(boundary_bytes(plan, costs))

    def reserve_for_layers(self) -> None:
        """Make the arenas large enough for a layer: without a plan, workers hold one layer at a time.

        They have room for the weights of the next one, unless a memory budget would have less than half of it left for
        activations.
        """
        layers = self._engine.model.layers
        weights = max((layer.nbytes for layer in layers), default=0)
        arena = weights + max((GradientLayout(layer).nbytes for layer in layers), default=0)
        limit = worker_bytes(self._options, self._devices)
        if limit is None or 2 * BESIDE * arena <= limit:
            arena *= BESIDE
        for worker in self._workers:
            worker.reserve(Reserved(arena), at_least=limit is None)

    def learn_again(self) -> None:
        """Drop the plan, but not the trace: microbatches have left the plan, or are to run one after another."""
        self._learned.plan = self._learned.costs = None
        self._learned.offloads = False
        for worker in self._workers:
            worker.forget()
        self.reserve_for_layers()

    def forget(self) -> None:
        """Drop traces and plan, to learn them again.

        Called when other parameters require grad, so that gradients flow elsewhere, when a layer has used a weight that
        is uploaded in low precision otherwise, and when batches are cut in another way.
        """
        self._engine.gradients.drop()
        self._learned.forget()
        model = self._engine.model
        for layer in model.layers:
            layer.borrows = layer.reaches_out = None
        begin_to_train(model.layers, model.buckets[0].masters, model.formats, apart=bool(self._options.staleness))
        for worker in self._workers:
            worker.forget()
        self.reserve_for_layers()


def rates_of(device: Device) -> Hardware:
    """Return the rates that the times of a static plan are computed from."""
    return nominal(device.torch_device.type)


def counter_of(options: Options, learned: Learned, device: Device) -> Counter | None:
    """Return a mode that counts a call's operations, if a static plan is to be made from this step; else None."""
    return Counter(rates_of(device)) if learned.plans and options.plan == "static" else None
