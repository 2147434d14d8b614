"""``roundpipe-plan model=NAME hardware=NAME``: whether a model fits a machine, how fast it is, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_roundpipe.commands.machines import SLOWER_LINKS, choose_machine
from lightning_roundpipe.commands.plan_shape import USUAL_LENGTH, ModelShape
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.planning.carried import carrying_within
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.data_parallel import data_parallel_s
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import (
    Item,
    Memory,
    Parameters,
    StageRow,
    arena_bytes,
    boundary_bytes,
    device_bytes,
    device_items,
    fits,
    host_items,
    keeping_least,
    least,
    stage_rows,
)
from lightning_roundpipe.planning.network import Network, gradient_bytes
from lightning_roundpipe.planning.nominal import EMULATED
from lightning_roundpipe.planning.partition import smallest_within
from lightning_roundpipe.planning.pipeline import Rules, SimulatedRun, period_of_ends, run_steps, step_ends
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import paper_plan, search_partition

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


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and what limits it, in words."""

    tokens: int
    limited_by: str


@dataclass(frozen=True)
class Communication:
    """Communication of a step between machines: bytes that each sends and receives, seconds for which the network is
    busy, and those by which the step is longer than with an infinitely fast one.
    """

    network: Network
    nbytes: float
    busy_s: float
    cost_s: float
    period_s: float

    @property
    def is_hidden(self) -> bool:
        return self.cost_s <= _HIDDEN * self.period_s


@dataclass
class Trial:
    """Plans for one size of microbatches. ``judged``: seconds of each of many steps, by plan that fits."""

    shape: ModelShape
    wish: Wish
    workers: int
    microbatches: int
    sequence_length: int
    microbatch_size: int
    judged: dict[Plan, float] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        return self.shape.hardware

    @property
    def parameters(self) -> Parameters:
        return self.shape.parameters

    @property
    def costs(self) -> Costs:
        return self.shape.costs(self.microbatch_size, self.sequence_length)

    @cached_property
    def rules(self) -> Rules:
        return replace(self.shape.rules(self.wish.staleness, self.wish.network), memory=self.limits.memory)

    @cached_property
    def limits(self) -> Limits:
        wish, memory = self.wish, memory_of(self.wish, self.hardware)
        searches = not wish.like_paper and wish.search_seconds > 0  # else few layers are fused, whatever the memory
        usual = Limits.usual(self.costs, self.workers, self.microbatches, memory if searches else None)
        lowest = min(usual.min_round, wish.max_round or usual.min_round, self.microbatches)
        most = _host_round(self.costs, self.shape, self.workers, self.microbatches, memory)
        if wish.max_round is not None:
            most = min(most, wish.max_round)
        return Limits(lowest, usual.max_fused, memory, max(lowest, most), not wish.like_paper)

    @property
    def smallest(self) -> Plan:
        """The plan that takes the least memory, or rounds side by side if only these fit.

        On the host, a single round has boundary tensors of all microbatches, but may not have gradients of all layers.
        """
        costs, limits = self.costs, self.limits
        cut = smallest_within(costs, self.workers, self.microbatches, limits.min_round, limits.memory, limits.max_round)
        beside = limits.beside(costs, self.workers, self.microbatches)
        plans, whole = [cut], Plan.per_call(len(costs), self.microbatches)
        if self.wish.max_round is None and fits(whole, costs, self.workers, limits.memory):
            plans.append(whole)
        plans += [keeping_least(plan, costs, self.workers, limits.memory) for plan in plans]
        smallest = min(plans, key=lambda plan: total(self.host_items_of(plan)))
        return next((plan for plan in (cut, *beside) if self.has_room_for(plan)), smallest)

    def host_items_of(self, plan: Plan) -> list[Item]:
        return host_items(plan, self.costs, self.parameters, self.workers, self.microbatches)

    def has_room_for(self, plan: Plan) -> bool:
        return (
            fits(plan, self.costs, self.workers, self.limits.memory)
            and total(self.host_items_of(plan)) <= self.hardware.host_memory
        )

    def judge(self, plan: Plan) -> float:
        """Return the reported seconds of a step, by which plans are compared; infinite if the plan does not fit."""
        if not self.has_room_for(plan):
            return math.inf
        if plan not in self.judged:
            ends = step_ends(plan, self.costs, self.workers, self.microbatches, self.rules, 2 * _STEPS)
            self.judged[plan] = period_of_ends(ends, _STEPS)
        return self.judged[plan]

    def seconds_a_sequence(self, plan: Plan) -> float:
        return self.judge(plan) / (self.microbatch_size * self.microbatches)

    def best(self, part: float) -> Plan | None:
        """Return the plan after a share ``part`` of the search; None if no plan fits."""
        wish, costs, limits = self.wish, self.costs, self.limits
        if wish.plan is not None:
            plan = Plan.parse(wish.plan)
            plan.validate(costs.layers)
        elif not self.has_room_for(self.smallest):
            return None
        elif wish.like_paper:
            plan = paper_plan(costs, self.workers, self.microbatches, limits)
        else:
            turns, seconds = 2 * _STEPS * self.microbatches * (2 * len(costs) - 1), part * wish.search_seconds
            judged = max(1, max(_LEAST_TURNS, int(_TURNS_PER_SECOND * seconds)) // turns)
            plan = search_partition(
                costs, self.workers, self.microbatches, limits, wish.staleness, self.rules.host, seconds,
                judge=self.judge, judged=judged, also=[self.smallest],
            )  # fmt: skip
            if seconds and wish.carry_products:
                plan = carrying_within(
                    plan, costs, self.workers, self.microbatches, limits, self.judge, staleness=wish.staleness,
                    host=self.rules.host, search_seconds=seconds, judged=judged,
                )  # fmt: skip
        return plan if self.has_room_for(plan) else None


@dataclass(kw_only=True)
class Outlook(Trial):
    """Plan and estimates for a `Wish`.

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
        return device_items(self.plan, self.costs, self.workers, self.memory_of(worker), worker)

    def memory_of(self, worker: int | None) -> int | None:
        """Return the bytes that a worker may use; ``worker`` None: the first. The result is None without a limit."""
        memory = self.limits.memory
        return memory[worker or 0] if isinstance(memory, tuple) else memory

    @cached_property
    def worker(self) -> int | None:
        """The worker with the least room left, if workers have unequal memory; else None."""
        memory = self.limits.memory
        if not isinstance(memory, tuple):
            return None
        needs = [device_bytes(self.plan, self.costs, self.workers, worker) for worker in range(self.workers)]
        return max(range(self.workers), key=lambda worker: needs[worker] / memory[worker])

    @cached_property
    def host_items(self) -> list[Item]:
        return self.host_items_of(self.plan)

    @property
    def cuts(self) -> list[str]:
        """Layers that are too large for a worker, and the modules they are cut into."""
        return self.shape.refined.summary() if self.shape.refined.stuck is None else []

    @property
    def side_by_side(self) -> bool:
        return self.plan.side_by_side(self.workers, self.microbatches)

    @property
    def stages(self) -> list[StageRow]:
        return stage_rows(self.plan, self.costs, self.workers)

    @property
    def memory(self) -> int | None:
        """Bytes of `worker`; None: no limit."""
        return self.memory_of(self.worker)

    @property
    def fits_device(self) -> bool:
        return fits(self.plan, self.costs, self.workers, self.limits.memory)

    @property
    def fits_host(self) -> bool:
        return total(self.host_items) <= self.hardware.host_memory

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def weights_fit(self) -> bool:
        """Whether a worker's arena and the host without boundary tensors fit: both are independent of microbatches."""
        arena, _ = arena_bytes(self.plan, self.costs, self.workers, self.worker)
        host = total(self.host_items) - boundary_bytes(self.plan, self.costs)
        return (self.memory is None or arena <= self.memory) and host <= self.hardware.host_memory

    @property
    def step_tokens(self) -> int:
        return self.wish.machines * self.microbatches * self.microbatch_size * self.sequence_length

    @property
    def period_s(self) -> float:
        """Seconds of each of many steps. The model must fit."""
        assert self.run is not None
        return self.period_of(self.run)

    def period_of(self, run: SimulatedRun) -> float:
        """Return the mean seconds of a step in ``run``."""
        return run.period_s(_STEPS)

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.period_s

    @cached_property
    def data_parallel_tokens_per_s(self) -> float | None:
        """Tokens a second of data parallelism, at best; None if a GPU cannot hold the model, or without an estimate."""
        wish, memory, machine = self.wish, self.limits.memory, self.hardware
        if wish.like_paper or wish.machines > 1 or machine.kinds or not isinstance(memory, int):
            return None
        size = self.microbatch_size
        seconds = data_parallel_s(
            lambda size: self.shape.costs(size, self.sequence_length),
            [part for part in range(size, 0, -1) if (size & -size) % part == 0],
            self.parameters, machine, self.workers, self.microbatches * size, memory,
        )  # fmt: skip
        return None if seconds is None else self.step_tokens / seconds

    def _period_with(self, rules: Rules) -> float:
        ends = step_ends(self.plan, self.costs, self.workers, self.microbatches, rules, 2 * _STEPS)
        return period_of_ends(ends, _STEPS)

    @cached_property
    def slower_links(self) -> dict[str, float]:
        """Tokens a second of the plan with slower links to all GPUs, by their names, if the links are assumed."""
        machine, wish = self.hardware, self.wish
        if self.run is None or machine.emulated or machine.kinds or not self.assumed:
            return {}
        found = {}
        for name, rate in SLOWER_LINKS.items():
            if rate < machine.upload:
                shape = self.shape.on(replace(machine, upload=rate, download=min(rate, machine.download)))
                links = shape.rules(wish.staleness, wish.network).links
                found[name] = self.step_tokens / self._period_with(replace(self.rules, links=links))
        return found

    @cached_property
    def communication(self) -> Communication | None:
        """Communication of several machines; None if there is one, or if the model does not fit."""
        network = self.rules.network
        if network is None or self.run is None:
            return None
        alone = self._period_with(replace(self.rules, network=replace(network, bytes_per_s=math.inf)))
        wire = network.wire_bytes(sum(gradient_bytes(self.costs).values()))
        return Communication(network, wire, wire / network.bytes_per_s, self.period_s - alone, self.period_s)

    @property
    def bubble_pct(self) -> float:
        """Idle time of the workers in percent, for many steps. The model must fit."""
        assert self.run is not None
        busy = self.run.busy_s / len(self.run.ends_s)
        return 100 * (1 - busy / (self.workers * self.period_s))


def total(items: Iterable[Item]) -> int:
    """Return the bytes of all items together."""
    return sum(item.nbytes for item in items)


def look(wish: Wish) -> Outlook:
    """Estimate costs, search the best plan within memory or take the wish's own, and simulate it.

    Raises:
        ValueError: a setting is wrong. A model that does not fit is no error.
    """
    machine, assumed = choose_machine(wish.hardware, wish.gpu, wish.gpus, wish.workers, wish.host_memory)
    return look_at(shape_of(wish, machine), wish, assumed)


def check(wish: Wish) -> None:
    """Check what does not depend on the machine, before `this_machine` measures it. Raises ``ValueError``."""
    if wish.plan is not None:
        Plan.parse(wish.plan)
    _length_of(wish, shape_of(wish, EMULATED))


def _length_of(wish: Wish, shape: ModelShape) -> int:
    """Return the tokens of a sequence."""
    length = min(USUAL_LENGTH, shape.longest) if wish.sequence_length is None else wish.sequence_length
    if length > shape.longest:
        raise ValueError(
            f"sequence_length={length} is longer than the {shape.longest} tokens that model={wish.model} "
            f"has positions for (max_position_embeddings). Offer it more with max_positions={length}."
        )
    return length


def shape_of(wish: Wish, machine: Hardware) -> ModelShape:
    """Return the model of a wish on the meta device, with estimates for ``machine``; see `ModelShape`."""
    shape = ModelShape(wish, machine, least(memory_of(wish, machine)))
    return shape if wish.token_tiles is None else shape.in_tiles(wish.token_tiles)


def memory_of(wish: Wish, machine: Hardware) -> Memory | None:
    """Return the bytes of each worker, one number if they are equal; None: no limit."""
    return wish.memory or machine.of_each(
        lambda device: None if device.memory is None else int(MEMORY_SHARE * device.memory)
    )


def look_at(shape: ModelShape, wish: Wish, assumed: tuple[str, ...] = (), *, longest: bool = True) -> Outlook:
    """Return the outlook of a model from `shape_of`; see `look`. ``longest``: whether to look for the longest one."""
    memory = least(memory_of(wish, shape.hardware))
    workers = wish.workers or shape.hardware.workers
    microbatches = wish.microbatches or 2 * workers
    sizes = _SIZES if wish.microbatch_size is None else (wish.microbatch_size,)
    trials = [Trial(shape, wish, workers, microbatches, _length_of(wish, shape), size) for size in sizes]
    chosen, plan = _fastest(trials)
    run = None
    if chosen.has_room_for(plan):
        run = run_steps(plan, chosen.costs, workers, microbatches, chosen.rules, 2 * _STEPS)
    found = find_longest(shape, workers, microbatches, memory) if longest else None
    return Outlook(
        shape, wish, workers, microbatches, chosen.sequence_length, chosen.microbatch_size, chosen.judged,
        plan=plan, run=run, longest=found, assumed=assumed,
    )  # fmt: skip


def _fastest(trials: list[Trial]) -> tuple[Trial, Plan]:
    """Return the size of microbatches with the most tokens a second, and its plan.

    Each size has a short search, and the fastest one the rest of the time. If no size fits, the result is the smallest
    size with the plan that takes the least memory.
    """
    last = trials[-1]
    if last.wish.plan is None and not last.has_room_for(last.smallest):  # larger sizes take even more memory
        return last, last.smallest
    part = _TRIAL if len(trials) > 1 else 1.0
    found = [(one, plan) for one in trials if (plan := one.best(part)) is not None]
    if not found:
        return last, last.smallest if last.wish.plan is None else Plan.parse(last.wish.plan)

    def seconds(pair: tuple[Trial, Plan]) -> float:
        return pair[0].seconds_a_sequence(pair[1])

    best, plan = min(found, key=seconds)  # of equal ones, the largest size
    if len(trials) > 1 and not best.wish.like_paper and (longer := best.best(1 - part * len(found))) is not None:
        return min((best, plan), (best, longer), key=seconds)
    return best, plan


def _host_round(costs: Costs, shape: ModelShape, workers: int, microbatches: int, memory: Memory | None) -> int:
    """Return the most microbatches of a round whose boundary tensors fit in host memory; 0 if the rest does not fit.

    If no round of ``workers`` fits with the inputs of every call, stages are taken that keep least of them.
    """
    cut, found = [Plan.per_call(len(costs), members) for members in (microbatches, 1)], 0
    for plan in (*cut, *(keeping_least(plan, costs, workers, memory) for plan in cut)):
        each = boundary_bytes(plan, costs) // plan.round_microbatches
        held = total(host_items(plan, costs, shape.parameters, workers, microbatches))
        room = shape.hardware.host_memory - (held - plan.round_microbatches * each)
        found = microbatches if each == 0 else max(0, min(microbatches, room // each))
        if found == microbatches or (plan.round_microbatches == 1 and found >= workers):
            break
    return found


def find_longest(shape: ModelShape, workers: int, microbatches: int, memory: int | None) -> Longest:
    """Return the longest sequence that fits. ``memory``: bytes of each worker; None: no limit.

    Microbatches have one sequence, stages have one call, and rounds are as small as needed.
    """

    def why_not(tokens: int) -> str | None:
        return _why_not(shape.costs(1, tokens), shape, workers, microbatches, memory)

    low, high = 0, max(shape.longest // _LENGTHS * _LENGTHS, min(shape.longest, _LENGTHS))
    reason = why_not(high)
    if reason is None:
        offered = shape.longest > shape.configured
        return Longest(high, f"max_positions={shape.longest}" if offered else "the model's max_position_embeddings")
    while high - low > max(1, min(_LENGTHS, low // _EXACTLY)):
        middle = (low + high) // 2
        if high - low > _LENGTHS:
            middle -= middle % _LENGTHS
        found = why_not(middle)
        if found is None:
            low = middle
        else:
            high, reason = middle, found
    return Longest(low, reason)


def plan_of_longest(costs: Costs, shape: ModelShape, workers: int, microbatches: int, memory: int | None) -> Plan:
    """Return the plan that `find_longest` checks."""
    most = max(workers, _host_round(costs, shape, workers, microbatches, memory))
    plan = smallest_within(costs, workers, microbatches, workers, memory, most)
    held = total(host_items(plan, costs, shape.parameters, workers, microbatches))
    return plan if held <= shape.hardware.host_memory else keeping_least(plan, costs, workers, memory)


def _why_not(costs: Costs, shape: ModelShape, workers: int, microbatches: int, memory: int | None) -> str | None:
    """Return what is too large, in words; None if the plan fits."""
    plan = plan_of_longest(costs, shape, workers, microbatches, memory)
    if memory is not None and device_bytes(plan, costs, workers) > memory:
        item = max(device_items(plan, costs, workers, memory), key=lambda item: item.nbytes)
        return f"memory={_size(memory)} of each worker, the largest part for {_without_stage(item)}"
    items = host_items(plan, costs, shape.parameters, workers, microbatches)
    if total(items) > shape.hardware.host_memory:
        item = max(items, key=lambda item: item.nbytes)
        limit = f"host_memory={_size(shape.hardware.host_memory)} of {shape.hardware.title}"
        return f"{limit}, the largest part for {item.name}"
    return None


def _size(nbytes: int) -> str:
    """Return a size as an option takes it, except for commas."""
    return f"{nbytes / 2**30:,.2f}GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f}MiB"


def _without_stage(item: Item) -> str:
    return item.name.partition(", of stage")[0].partition(", stage")[0]
