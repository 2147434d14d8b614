"""Makes a plan from what the first window has shown, and the arenas that it needs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lightning_roundpipe.config import OPTIMIZER_STATES, Options, RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.devices.host_memory import SHARE, free_bytes
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.events import DOWNLOADS, UPLOADS, Recorder
from lightning_roundpipe.engine.step import Step
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.estimates.nominal import nominal, with_times_of_bytes
from lightning_roundpipe.faults.interrupts import deliver_interrupts
from lightning_roundpipe.memory.budget import (
    capacity_of,
    check_plan_fits,
    device_for,
    libraries_note,
    library_bytes,
    memory_of_workers,
    worker_bytes,
)
from lightning_roundpipe.memory.grad_buffers import GradientLayout
from lightning_roundpipe.memory.host_layer import HostLayer, begin_to_train
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.carried import carrying_within
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.links import HostTime, Links
from lightning_roundpipe.planning.memory import (
    BESIDE,
    Reserved,
    WorkerNeeds,
    boundary_bytes,
    carried_bytes,
    size_text,
)
from lightning_roundpipe.planning.partition import TooSmall, partition_within
from lightning_roundpipe.planning.pipeline import Rules, step_ends
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, partly_fused, search_partition, unpacking_plans
from lightning_roundpipe.planning.updates import adamw_bytes

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

_ALIKE = 0.05
"""Kinds that differ by less are equally fast."""


class Planner:
    """It is where `planning` meets the engine.

    Attributes:
        windows_left: returns how many windows will be trained on.
        clips: returns whether gradients will be clipped by norm.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._options = context, context.options
        self.windows_left: Callable[[], float] = lambda: 0.0
        self.clips: Callable[[], bool] = lambda: False
        self._trained = context.model.trainable()
        self._workers, self._devices, self._hints = context.pool.workers, context.pool.devices, context.hints

    def learn(self, step: Step, drain: Callable[[], None]) -> None:
        """Make a plan after a window without one, or find that microbatches have to follow one another.

        Raises:
            RoundPipeError: ``training_step`` called no layer.
            DoesNotFit: no plan fits the memory budget.
            ValueError: the plan in the options does not fit the calls or the budget, or their order.
        """
        runs, randomness = step.microbatches, self._context.pool.randomness
        if self._context.learned.in_order or not self._options.overlap:
            return
        if len(runs) > 1 and (buffer := next(filter(None, (run.weights.mode.met_buffer for run in runs)), "")):
            late = "which this window is the first to do, " if step.spec.plan is not None else ""
            drain()
            self._run_in_order(
                f"{buffer} changes in calls of its layer, and code between layers reads or writes it, {late}and what "
                "is in it depends on their order",
                "leave plan out.",
            )
        elif step.spec.plan is None and all(run.result.loss is not None for run in runs):
            self._plan_from(step, share=step.spec.updates is not None and self._may_share)
            randomness.learning = False

    @property
    def _may_share(self) -> bool:
        """Whether masters may share memory with what uploads read; with staleness 1, they change meanwhile."""
        return self._context.exchange is None and not self._options.staleness

    def share_weights(self) -> None:
        """Let masters and what uploads read share memory before the first window, where that needs nothing it shows.

        Under ``bf16-true`` all weights travel in bf16, and user code reads what layers compute with. Otherwise copies
        would lie beside the masters while all gradients exist.
        """
        if self._may_share and self._context.model.formats.low is not None:
            for layer in self._context.model.layers:
                layer.weights.round({}, share=True)

    def _plan_from(self, step: Step, *, share: bool) -> None:
        """Make a plan from a window's calls and events.

        ``share``: whether masters and what uploads read share memory, where user code between layers reads neither.
        """
        learned, workers, microbatches = self._context.learned, len(self._workers), len(step.microbatches)
        trace, speeds = self._trace_of(step)
        layers = self._context.model.layers
        read = learned.read_by_user_code if self._context.model.formats.low is None else frozenset()
        if send_rounded(layers, self._workers, {layer for layer in layers if share and layer.bucket not in read}):
            self.reserve_for_layers()
        self._devices[0].settle_libraries(self._devices, microbatches)
        costs, limit = self._costs_of(trace, speeds), memory_of_workers(self._options, self._devices)
        if self._options.plan_text is not None:
            plan = self._given(Plan.parse(self._options.plan_text), trace, costs)
        else:
            rules = rules_of(self._context, costs, clips=self.clips(), blocking=step.spec.updates is None)
            rules = replace(rules, memory=limit)
            plan = self._found(costs, rules, step)
        if microbatches > 1 and (buffer := _torn(plan, trace)):
            why = f"{buffer} is changed by several calls of each microbatch, and what is in it depends on their order"
            return self._run_in_order(why, "plan must have these calls in one forward stage, or be left out.")
        for worker in self._workers:
            own = worker.device.index if isinstance(limit, tuple) else None
            budget = limit[worker.device.index] if isinstance(limit, tuple) else limit
            worker.reserve(WorkerNeeds(plan, costs, workers, own).reserved(budget, worker.device.lead_bytes))
        self._devices[0].reserve_host(boundary_bytes(plan, costs) + carried_bytes(plan, costs, workers))
        learned.trace, learned.costs, learned.plan = trace, costs, plan

    def _trace_of(self, step: Step) -> tuple[Trace, list[float]]:
        """Return the calls of a window with their times, and the workers' speeds if these are not equal."""
        recorder, layers, static = step.spec.recorder, self._context.model.layers, self._options.plan == "static"
        alike = {layer.name: (type(layer.module), layer.weights.nbytes) for layer in layers}
        speeds = [] if static else worker_speeds(recorder, self._devices, alike)
        seconds = recorder.nominal_seconds if static else recorder.call_seconds(speeds)
        traces = [microbatch.layer_calls.trace for microbatch in step.microbatches]
        for microbatch, trace in enumerate(traces):
            trace.measure(seconds, microbatch)
        trace = Trace.of(traces)
        if not trace.calls:
            names = ", ".join(layer.name for layer in layers)
            raise RoundPipeError(
                f"training_step called none of the layers that were found ({names}): name the modules it calls with "
                "layers=[...]."
            )
        return trace, speeds

    def _costs_of(self, trace: Trace, speeds: Sequence[float]) -> Costs:
        dtype, rates = self._context.gradients.reduction.dtype, nominal(self._devices[0].torch_device.type)
        costs = Costs(tuple(c.cost(dtype, lambda nbytes: rates.product_s(0.0, nbytes, "fp32")) for c in trace.calls))
        if self._options.plan == "static":
            return with_times_of_bytes(costs, rates)
        return costs.at_speeds(speeds) if speeds else costs

    def _given(self, plan: Plan, trace: Trace, costs: Costs) -> Plan:
        """Check the plan of the options."""
        try:
            plan.validate(trace.names)
        except ValueError as error:
            if cuts := self._hints.cuts:
                finer = f" A plan made with more memory does not know that layers are cut here: {cuts}."
                raise ValueError(f"{error}{finer}") from None
            raise
        if without := [call for call in plan.carry if not costs.calls[call].product_bytes(plan.carry_least)]:
            self._hints.say(
                "carry",
                f"plan: {plural(len(without), 'call')} of carry have nothing that can be carried, as is so with "
                "compiled layers, and are recomputed.",
            )
        check_plan_fits(plan, costs, self._options, self._devices)
        return plan

    def _found(self, costs: Costs, rules: Rules, step: Step) -> Plan:
        """Search a plan. ``rules`` have the bytes of workers."""
        options, microbatches = self._options, len(step.microbatches)
        try:
            plan = self._cut(costs, microbatches, rules)
            if options.carry_products and options.plan != "static":
                plan = self._carry(plan, costs, microbatches, rules, step.spec.recorder)
            if plan.unpack_once:
                return plan
            # Beside the largest arena, stages unpack once wherever there is room.
            problem = Problem.usual(costs, len(self._workers), microbatches, rules.memory)
            return problem.unpacking_once(plan, most=True)
        except ValueError as error:
            samples = step.spec.loss_weights.fewest_samples
            remedy = _remedies(error, options, self._devices, samples) if isinstance(error, TooSmall) else ""
            raise DoesNotFit(f"{error}{remedy}{libraries_note(options, self._devices)}") from None

    def _cut(self, costs: Costs, microbatches: int, rules: Rules) -> Plan:
        """Return the plan of the paper's algorithm, or a better one where the training is long enough for a search."""
        workers, size, stage_s = len(self._workers), self._options.round_microbatches, self._options.stage_seconds
        problem = Problem.usual(costs, workers, microbatches, rules.memory, rules)

        step_s = partial(_step_s, problem)
        plan = problem.ahead(partition_within(problem, size, stage_s))
        [seconds] = step_ends(plan, costs, workers, microbatches)
        if size is None and stage_s is None:
            plan = min(unpacking_plans([plan], problem), key=step_s)
            if not plan.forward:
                plan = min([plan, *partly_fused(problem)], key=step_s)
        if workers == 1 or size is not None or stage_s is not None:
            return plan
        if beside := problem.beside():
            plan = min([plan, *beside], key=step_s)
        search_s = min(SEARCH_SECONDS, max(_SHORTEST_SEARCH_S, _SEARCH_STEPS * seconds))
        # The paper's algorithm knows no unequal workers.
        if seconds >= WORTH_S or costs.unequal or isinstance(rules.memory, tuple):
            self._say_search(seconds, search_s)
        else:
            search_s = min(search_s, _SEARCH_SHARE * seconds * self.windows_left())
            if search_s < _LEAST_SEARCH_S:
                return plan
        turns = 2 * _STEPS * microbatches * (2 * len(costs) - 1)
        found = search_partition(problem, search_s, step_s, max(1, min(16, _MOST_TURNS // turns)))
        return found if step_s(found) < step_s(plan) else plan

    def _carry(self, plan: Plan, costs: Costs, microbatches: int, rules: Rules, recorder: Recorder) -> Plan:
        """Return a plan that carries products, if it is faster and the host has room for them, else ``plan``.

        How fast a GPU's link is shows in the first window. Nothing is known of emulated links without a rate.
        """
        options, workers = self._options, len(self._workers)
        if (links := rules.links) is None or isinstance(links, tuple):
            return plan
        if self._devices[0].torch_device.type != "cpu":
            up, down = (recorder.bytes_per_s(kinds) for kinds in (UPLOADS, DOWNLOADS))
            rules = replace(rules, links=Links(min(links.upload, up), min(links.download, down)))
        problem = Problem.usual(costs, workers, microbatches, rules.memory, rules)
        room = self._room_on_host()

        def step_s(plan: Plan) -> float:
            if not problem.fits(plan) or carried_bytes(plan, costs, workers) > room:
                return math.inf
            return _step_s(problem, plan)

        long = step_s(plan) >= WORTH_S
        return carrying_within(
            plan, problem, step_s, search_seconds=_SHORTEST_SEARCH_S if long and workers > 1 else 0.0,
            cuts=options.round_microbatches is None and options.stage_seconds is None,
        )  # fmt: skip

    def _room_on_host(self) -> int:
        """Return the bytes of host memory that carried products may take.

        It is a share of what is free, less what the optimizer's moments may take, which the first window has not made.
        """
        trained = sum(p.numel() for p in self._context.model.masters if p.requires_grad)
        moments = int(2 * OPTIMIZER_STATES[self._options.optimizer_state] * trained)
        return int(SHARE * max(0, free_bytes() - moments))

    def _say_search(self, seconds: float, search_s: float) -> None:
        text = "searching for a faster plan by the shapes of the calls, which takes some seconds."
        if self._options.plan != "static":
            text = f"a step takes {seconds:.3g} s: searching for a faster plan, which takes about {search_s:.0f} s."
        self._hints.say("plan", text)

    def reserve_for_layers(self) -> None:
        """Make the arenas large enough for a layer and the next one: without a plan, each call has a slot."""
        limit = worker_bytes(self._options, self._devices)
        reserved = reserved_for_layers(self._context.model.layers, limit)
        for worker in self._workers:
            worker.reserve(reserved, at_least=limit is None)

    def _run_in_order(self, why: str, remedy: str) -> None:
        """Run microbatches one after another from the next window on; an error if the options give a plan."""
        if self._options.plan_text is not None:
            raise ValueError(f"{why}: {remedy}")
        if self._context.learned.plan is not None:
            self.forget()
        self._context.learned.in_order = True
        self._hints.say("order", f"{why}, so microbatches run one after another, without a plan.")

    def is_outdated(self) -> bool:
        """Return whether other parameters are trained, or weights are used otherwise, than when the plan was made."""
        layers, now = self._context.model.layers, self._context.model.trainable()
        surprised = any(layer.weights.rounded - layer.seen.uses.only_cast().keys() for layer in layers)
        before, self._trained = self._trained, now
        return surprised or now != before

    def forget(self) -> None:
        """Drop the plan, to learn it again: other parameters are trained, or weights are used otherwise."""
        context = self._context
        context.gradients.drop()
        learned = context.learned
        learned.plan = learned.costs = learned.trace = None
        context.pool.randomness.learning = True
        model = context.model
        begin_to_train(
            model.layers, model.buckets[0].masters, model.formats, double_buffered=bool(self._options.staleness)
        )
        for worker in self._workers:
            worker.forget()
        self.reserve_for_layers()


def _step_s(problem: Problem, plan: Plan) -> float:
    """Return the seconds of each of several steps, with their copies and updates, as `roundpipe-plan` counts them."""
    deliver_interrupts()  # a search asks for many plans, and takes long
    return problem.period_s(plan, _STEPS)


def reserved_for_layers(layers: Sequence[HostLayer], limit: int | None) -> Reserved:
    """Return the memory of a worker for a layer and the next one, or if the ``limit`` is too small, for one."""
    weights = max((layer.weights.nbytes for layer in layers), default=0)
    arena = weights + max((GradientLayout(layer).nbytes for layer in layers), default=0)
    return Reserved(arena * BESIDE if limit is None or 2 * BESIDE * arena <= limit else arena)


def rules_of(context: Context, costs: Costs, *, clips: bool, blocking: bool) -> Rules:
    """Return what takes time beside computing. It is not measured, and has its nominal rates.

    Emulated devices have the links of the options. ``blocking``: whether updates begin after the whole backward.
    """
    options, model, reduction, device = (
        context.options,
        context.model,
        context.gradients.reduction,
        context.pool.devices[0],
    )
    flats = [flat for layer in model.layers for flat in layer.weights.flats if flat.trained and not flat.shares]
    copies = [place.dtype.itemsize for flat in flats if flat.copied for place in flat.places]
    reduced = reduction.dtype is not None and any(call.reduced_bytes is not None for call in costs)
    reduced_bytes = reduction.dtype.itemsize if reduced and reduction.dtype else None
    rules = nominal(device.torch_device.type).rules(
        1 if options.staleness else 0,
        adamw_bytes(options.optimizer_state, max(copies, default=0), reduced_bytes, scales=clips),
        at_once=clips or model.formats.scales.scale is not None, blocking=blocking,
    )  # fmt: skip
    if device.torch_device.type != "cpu":
        return rules
    rate = options.emulation.bandwidth
    links = None if rate is None else Links(float(rate), float(rate))
    host = HostTime(hop_s=2 * options.emulation.latency)  # from the device to the host, and to the next device
    return replace(rules, host=host, links=links)


def send_rounded(layers: Iterable[HostLayer], workers: Iterable[Worker], sharing: Collection[HostLayer]) -> bool:
    """From here on, upload weights in low precision that autocast casts at every use.

    ``sharing``: layers whose masters and what uploads read share memory. Returns whether the size of a layer has
    changed. Then the workers have dropped their copies of layers.
    """
    rounding = {layer: formats for layer in layers if (formats := layer.seen.uses.only_cast())}
    for layer in layers:
        if layer in rounding or layer in sharing:
            layer.weights.round(rounding.get(layer, {}), share=layer in sharing)
    for worker in workers if rounding else ():
        worker.forget()
    return bool(rounding)


def _remedies(error: TooSmall, options: Options, devices: Sequence[Device], samples: int) -> str:
    """Return a sentence with settings for which a plan fits, by the costs that have just been measured.

    ``samples``: of the smallest microbatch, which cannot be cut into more parts.
    """
    ways, enough, capacity = [], error.enough + library_bytes(devices), capacity_of(devices)
    if options.memory_budget is not None and (capacity is None or enough <= capacity):
        ways.append(f'memory_budget="{size_text(enough)}"')
    if error.round_microbatches is not None:
        ways.append(f"round_microbatches={error.round_microbatches}")
    if error.parts is None or error.parts > samples:
        pass
    elif options.microbatch_size is not None:
        ways.append(f"microbatch_size={max(1, options.microbatch_size // error.parts)}")
    else:
        count = (options.num_microbatches or 1) * error.parts
        ways.append(f"num_microbatches={count} (of batches with as many samples)")
    device = size_text(device_for(enough, options))
    said = f"Set {', or '.join(ways)}." if ways else f"Use devices with {device} (emulated ones: emulation.memory)."
    return f" {said} Or name smaller modules in layers= so that the layer is split."


def _torn(plan: Plan, trace: Trace) -> str:
    """Return a buffer that a layer changes in calls of several forward stages; empty if there is none.

    A microbatch's second call would find what the first calls of later ones have left.
    """
    stages = {call: s for s in plan.stages() if s.phase != "backward" for call in range(s.first, s.last + 1)}
    for layer in {call.layer.index: call.layer for call in trace.calls}.values():
        if len({stages[i].first for i, call in enumerate(trace.calls) if call.layer is layer}) > 1:
            for module, name in layer.buffers.mutable.values():
                return f"buffer {name!r} of {type(module).__name__} in {layer.title}"
    return ""


def worker_speeds(recorder: Recorder, devices: Sequence[Device], alike: Mapping[str, Hashable]) -> list[float]:
    """Return how many times faster than the slowest each worker is; empty if they are equally fast.

    In the first batch each call goes to the next worker, so a call may never have run on some of them. Layers that are
    alike are compared then: for these, ``alike`` has equal values, by name. Workers of one kind count as equally fast,
    whatever noise there is between them.
    """
    kinds = [device.kind for device in devices]
    if len(set(kinds)) == 1:
        return []
    calls: dict[Hashable, dict[str, float]] = defaultdict(dict)
    layers: dict[Hashable, dict[str, float]] = defaultdict(dict)
    for kind, worker, _, where, seconds in recorder.computations():
        for found, key in ((calls, (kind, where.call)), (layers, (kind, alike.get(where.layer)))):
            of_kinds, name = found[key], kinds[worker]
            of_kinds[name] = min(seconds, of_kinds.get(name, math.inf))
    slowness = {name: _slowness(name, kinds[0], calls) or _slowness(name, kinds[0], layers) or 1.0 for name in kinds}
    slowest = max(slowness.values())
    speeds = [slowest / slowness[name] for name in kinds]
    return speeds if max(speeds) > 1 + _ALIKE else []


def _slowness(name: str, other: str, found: Mapping[Hashable, Mapping[str, float]]) -> float | None:
    """Return how many times longer a kind of worker takes than another, in the median; None if that is not known."""
    pairs = [(times[name], times[other]) for times in found.values() if name in times and other in times]
    ratios = [seconds / others for seconds, others in pairs if others > 0]
    return statistics.median(ratios) if ratios else None
