"""``roundpipe-plan model=NAME hardware=NAME``: whether a model fits a machine, how fast it is, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from lightning_roundpipe.estimates.data_parallel import data_parallel_s
from lightning_roundpipe.estimates.hardware import SLOWER_LINKS, choose_machine
from lightning_roundpipe.estimates.model_shape import USUAL_LENGTH, ModelShape
from lightning_roundpipe.estimates.nominal import EMULATED
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning.carried import carrying_within
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import (
    Item,
    Memory,
    WorkerNeeds,
    boundary_bytes,
    device_bytes,
    least,
    total,
)
from lightning_roundpipe.planning.network import Network, gradient_bytes
from lightning_roundpipe.planning.partition import smallest_within
from lightning_roundpipe.planning.pipeline import SimulatedRun, run_steps
from lightning_roundpipe.planning.problem import Host, Problem
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import search_partition

MEMORY_SHARE = 0.9
"""Share of a device's memory for a worker, as in training without ``memory_budget``."""

_SIZES = (8, 4, 2, 1)
"""Numbers of sequences of a microbatch to try without ``microbatch_size``."""

_TRIAL = 1 / 8
"""Share of the search for each of these sizes. The fastest gets the rest."""

_STEPS = 8
"""Number of steps whose mean counts, after as many that fill the pipeline."""

_TURNS_PER_SECOND = 48_000
"""Most turns to simulate, with copies and updates, for the choice among the plans that a search finds, for each second
of it; fewer where steps repeat."""
_LEAST_TURNS = 30_000
"""The same for a short search."""

_HIDDEN = 0.01
"""Largest share of a step for which communication counts as hidden."""

_LENGTHS = 256
"""Precision of the longest sequence, in tokens."""

_EXACTLY = 64
"""Reciprocal of the relative precision, which applies to sequences shorter than `_LENGTHS` times as much."""


class Longest(NamedTuple):
    """The longest sequence that fits, and what limits it, in words."""

    tokens: int
    limited_by: str


class Communication(NamedTuple):
    """Communication of a step between machines: bytes that each sends and receives, seconds for which the network is
    busy, and those by which the step is longer than with an infinitely fast one. ``is_hidden``: these hardly count.
    """

    network: Network
    nbytes: float
    busy_s: float
    cost_s: float
    is_hidden: bool


@dataclass
class Trial:
    """Plans for one size of microbatches."""

    shape: ModelShape
    request: PlanRequest
    workers: int
    microbatches: int
    sequence_length: int
    microbatch_size: int

    @property
    def costs(self) -> Costs:
        return self.shape.costs(self.microbatch_size, self.sequence_length)

    @cached_property
    def problem(self) -> Problem:
        request, memory = self.request, memory_of(self.request, self.shape.hardware)
        searches = request.search_seconds > 0  # else few layers are fused, whatever the memory
        rules = replace(self.shape.rules(request.staleness, request.network), memory=memory)
        found = Problem.usual(
            self.costs, self.workers, self.microbatches, memory if searches else None, rules, host_of(self.shape)
        )
        found = replace(found, memory=memory, side_by_side=True)
        return replace(found, max_round=max(found.min_round, found.host_round()))

    @cached_property
    def smallest(self) -> Plan:
        """The plan that takes the least memory, or rounds side by side if only these fit.

        On the host, a single round has boundary tensors of all microbatches, but may not have gradients of all layers.
        """
        problem, cut = self.problem, smallest_within(self.problem)
        plans, whole = [cut], Plan.per_call(len(self.costs), self.microbatches)
        if problem.fits(whole):
            plans.append(whole)
        plans += [problem.keeping_least(plan) for plan in plans]
        smallest = min(plans, key=lambda plan: total(problem.host_items(plan)))
        return next((plan for plan in (cut, *problem.beside()) if problem.has_room_for(plan)), smallest)

    @cached_property
    def judge(self) -> Callable[[Plan], float]:
        """Returns the reported seconds of a step, by which plans are compared; infinite if the plan does not fit."""
        problem = self.problem
        return cache(lambda plan: problem.period_s(plan, _STEPS) if problem.has_room_for(plan) else math.inf)

    def best(self, part: float) -> Plan | None:
        """Return the plan after a share ``part`` of the search; None if no plan fits."""
        request, costs, problem = self.request, self.costs, self.problem
        if request.plan is not None:
            plan = Plan.parse(request.plan)
            plan.validate(costs.layers)
        elif not problem.has_room_for(self.smallest):
            return None
        else:
            turns, seconds = 2 * _STEPS * self.microbatches * (2 * len(costs) - 1), part * request.search_seconds
            judged = max(1, max(_LEAST_TURNS, int(_TURNS_PER_SECOND * seconds)) // turns)
            plan = search_partition(problem, seconds, self.judge, judged, also=[self.smallest])
            if seconds and request.carry_products:
                plan = carrying_within(plan, problem, self.judge, search_seconds=seconds, judged=judged)
        return plan if problem.has_room_for(plan) else None


@dataclass(kw_only=True)
class Outlook(Trial):
    """Plan and estimates for a `PlanRequest`.

    If nothing fits, ``plan`` is the one that takes the least memory, and ``run`` is None. ``longest`` is None if it was
    not looked for; ``assumed``: assumptions about the machine, in sentences.
    """

    plan: Plan
    run: SimulatedRun | None
    longest: Longest | None
    assumed: tuple[str, ...] = ()

    @cached_property
    def device_items(self) -> list[Item]:
        return self.items_of(self.worker)

    def items_of(self, worker: int | None) -> list[Item]:
        """Return the parts of a worker's memory; None: of every worker's."""
        return WorkerNeeds(self.plan, self.costs, self.workers, worker).items(self.memory_of(worker))

    def memory_of(self, worker: int | None) -> int | None:
        """Return the bytes that a worker may use; ``worker`` None: the first. The result is None without a limit."""
        memory = self.problem.memory
        return memory[worker or 0] if isinstance(memory, tuple) else memory

    @cached_property
    def worker(self) -> int | None:
        """The worker with the least room left, if workers have unequal memory; else None."""
        memory = self.problem.memory
        if not isinstance(memory, tuple):
            return None
        needs = [device_bytes(self.plan, self.costs, self.workers, worker) for worker in range(self.workers)]
        return max(range(self.workers), key=lambda worker: needs[worker] / memory[worker])

    @cached_property
    def host_items(self) -> list[Item]:
        return self.problem.host_items(self.plan)

    @property
    def memory(self) -> int | None:
        """Bytes of `worker`; None: no limit."""
        return self.memory_of(self.worker)

    @property
    def fits_device(self) -> bool:
        return self.problem.fits(self.plan)

    @property
    def fits_host(self) -> bool:
        return self.problem.fits_host(self.plan)

    @property
    def fits(self) -> bool:
        return self.problem.has_room_for(self.plan)

    @property
    def weights_fit(self) -> bool:
        """Whether a worker's arena and the host without boundary tensors fit: both are independent of microbatches."""
        arena, _ = WorkerNeeds(self.plan, self.costs, self.workers, self.worker).arena
        host = total(self.host_items) - boundary_bytes(self.plan, self.costs)
        return (self.memory is None or arena <= self.memory) and host <= self.shape.hardware.host_memory

    @property
    def step_tokens(self) -> int:
        return self.request.machines * self.microbatches * self.microbatch_size * self.sequence_length

    @property
    def period_s(self) -> float:
        """Seconds of each of many steps. The model must fit."""
        assert self.run is not None
        return self.run.period_s(_STEPS)

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.period_s

    @cached_property
    def data_parallel_tokens_per_s(self) -> float | None:
        """Tokens a second of data parallelism, at best; None if a GPU cannot hold the model, or without an estimate."""
        request, memory, machine = self.request, self.problem.memory, self.shape.hardware
        if request.machines > 1 or machine.kinds or not isinstance(memory, int):
            return None
        size = self.microbatch_size
        seconds = data_parallel_s(
            lambda size: self.shape.costs(size, self.sequence_length),
            [part for part in range(size, 0, -1) if (size & -size) % part == 0],
            self.shape.parameters, machine, self.workers, self.microbatches * size, memory,
        )  # fmt: skip
        return None if seconds is None else self.step_tokens / seconds

    def _period_with(self, **rules: Any) -> float:
        other = replace(self.problem, rules=replace(self.problem.rules, **rules))
        return other.period_s(self.plan, _STEPS)

    @cached_property
    def slower_links(self) -> dict[str, float]:
        """Tokens a second of the plan with slower links to all GPUs, by their names, if the links are assumed."""
        machine = self.shape.hardware
        if self.run is None or machine.emulated or machine.kinds or not self.assumed:
            return {}
        found = {}
        for name, rate in SLOWER_LINKS.items():
            if rate < machine.upload:
                slower = replace(machine, upload=rate, download=min(rate, machine.download))
                found[name] = self.step_tokens / self._period_with(links=slower.links())
        return found

    @cached_property
    def communication(self) -> Communication | None:
        """Communication of several machines; None if there is one, or if the model does not fit."""
        network = self.problem.rules.network
        if network is None or self.run is None:
            return None
        alone = self._period_with(network=replace(network, bytes_per_s=math.inf))
        wire = network.wire_bytes(sum(gradient_bytes(self.costs).values()))
        cost = max(0.0, self.period_s - alone)  # a difference of equal periods is rounded
        return Communication(network, wire, wire / network.bytes_per_s, cost, cost <= _HIDDEN * self.period_s)

    @property
    def bubble_pct(self) -> float:
        """Idle time of the workers in percent, for many steps. The model must fit."""
        assert self.run is not None
        busy = self.run.busy_s / len(self.run.ends_s)
        return 100 * (1 - busy / (self.workers * self.period_s))


def look(request: PlanRequest) -> Outlook:
    """Estimate costs, search the best plan within memory or take the request's own, and simulate it.

    Raises:
        ValueError: a setting is wrong. A model that does not fit is no error.
    """
    machine, assumed = choose_machine(request.hardware, request.gpu, request.gpus, request.workers, request.host_memory)
    return look_at(shape_of(request, machine), request, assumed)


def check(request: PlanRequest) -> None:
    """Check what does not depend on the machine, before `this_machine` measures it. Raises ``ValueError``."""
    if request.plan is not None:
        Plan.parse(request.plan)
    _length_of(request, shape_of(request, EMULATED))


def _length_of(request: PlanRequest, shape: ModelShape) -> int:
    """Return the tokens of a sequence."""
    length = min(USUAL_LENGTH, shape.longest) if request.sequence_length is None else request.sequence_length
    if length > shape.longest:
        raise ValueError(
            f"sequence_length={length} is longer than the {shape.longest} tokens that model={request.model} "
            f"has positions for (max_position_embeddings). Offer it more with max_positions={length}."
        )
    return length


def shape_of(request: PlanRequest, machine: Hardware) -> ModelShape:
    """Return the model of a request on the meta device, with estimates for ``machine``; see `ModelShape`."""
    shape = ModelShape(request, machine, least(memory_of(request, machine)))
    return shape if request.token_tiles is None else shape.in_tiles(request.token_tiles)


def memory_of(request: PlanRequest, machine: Hardware) -> Memory | None:
    """Return the bytes of each worker, one number if they are equal; None: no limit."""
    return request.memory or machine.of_each(
        lambda device: None if device.memory is None else int(MEMORY_SHARE * device.memory)
    )


def host_of(shape: ModelShape) -> Host:
    """Return the host's memory, and what of the model lies in it."""
    return Host(shape.hardware.host_memory, shape.parameters)


def look_at(shape: ModelShape, request: PlanRequest, assumed: tuple[str, ...] = (), *, longest: bool = True) -> Outlook:
    """Return the outlook of a model from `shape_of`; see `look`. ``longest``: whether to look for the longest one."""
    workers = request.workers or shape.hardware.workers
    microbatches = request.microbatches or 2 * workers
    sizes = _SIZES if request.microbatch_size is None else (request.microbatch_size,)
    trials = [Trial(shape, request, workers, microbatches, _length_of(request, shape), size) for size in sizes]
    chosen, plan = _fastest(trials)
    run = None
    if chosen.problem.has_room_for(plan):
        run = run_steps(plan, chosen.costs, workers, microbatches, chosen.problem.rules, 2 * _STEPS)
    memory = least(memory_of(request, shape.hardware))
    return Outlook(
        shape, request, workers, microbatches, chosen.sequence_length, chosen.microbatch_size, plan=plan,
        run=run, longest=find_longest(shape, workers, microbatches, memory) if longest else None, assumed=assumed,
    )  # fmt: skip


def _fastest(trials: list[Trial]) -> tuple[Trial, Plan]:
    """Return the size of microbatches with the most tokens a second, and its plan.

    Each size has a short search, and the fastest one the rest of the time. If no size fits, the result is the smallest
    size with the plan that takes the least memory.
    """
    last, found, part = trials[-1], list[tuple[Trial, Plan]](), _TRIAL if len(trials) > 1 else 1.0
    given = last.request.plan is not None
    if given or last.problem.has_room_for(last.smallest):  # larger sizes take even more memory
        found = [(one, plan) for one in trials if (plan := one.best(part)) is not None]
    if not found:
        return last, Plan.parse(str(last.request.plan)) if given else last.smallest

    def seconds(pair: tuple[Trial, Plan]) -> float:
        return pair[0].judge(pair[1]) / (pair[0].microbatch_size * pair[0].microbatches)

    best, plan = min(found, key=seconds)  # of equal ones, the largest size
    if len(trials) > 1 and (longer := best.best(1 - part * len(found))) is not None:
        return min((best, plan), (best, longer), key=seconds)
    return best, plan


def find_longest(shape: ModelShape, workers: int, microbatches: int, memory: int | None) -> Longest:
    """Return the longest sequence that fits. ``memory``: bytes of each worker; None: no limit.

    Microbatches have one sequence, stages have one call, and rounds are as small as needed.
    """

    def why_not(tokens: int) -> str | None:
        problem = Problem.usual(shape.costs(1, tokens), workers, microbatches, memory, host=host_of(shape))
        return _why_not(problem, shape.hardware)

    low, high = 0, max(shape.longest // _LENGTHS * _LENGTHS, min(shape.longest, _LENGTHS))
    reason = why_not(high)
    if reason is None:
        offered = shape.longest > shape.configured
        return Longest(high, f"max_positions={shape.longest}" if offered else "the model's max_position_embeddings")
    while high - low > max(1, min(_LENGTHS, low // _EXACTLY)):
        middle = (low + high) // 2
        if high - low > _LENGTHS:
            middle -= middle % _LENGTHS
        if (found := why_not(middle)) is None:
            low = middle
        else:
            high, reason = middle, found
    return Longest(low, reason)


def plan_of_longest(problem: Problem) -> Plan:
    """Return the plan that `find_longest` checks, whose problem has the usual limits."""
    plan = smallest_within(replace(problem, max_round=max(problem.workers, problem.host_round())))
    return plan if problem.fits_host(plan) else problem.keeping_least(plan)


def _why_not(problem: Problem, machine: Hardware) -> str | None:
    """Return what is too large, in words; None if the plan fits."""
    plan, memory = plan_of_longest(problem), least(problem.memory)
    if memory is not None and not problem.fits(plan):
        item = max(WorkerNeeds(plan, problem.costs, problem.workers).items(memory), key=lambda item: item.nbytes)
        part = item.name.partition(", of stage")[0].partition(", stage")[0]
        return f"memory={_size(memory)} of each worker, the largest part for {part}"
    if not problem.fits_host(plan):
        item = max(problem.host_items(plan), key=lambda item: item.nbytes)
        return f"host_memory={_size(machine.host_memory)} of {machine.title}, the largest part for {item.name}"
    return None


def _size(nbytes: int) -> str:
    """Return a size as an option takes it, except for commas."""
    return f"{nbytes / 2**30:,.2f}GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f}MiB"
