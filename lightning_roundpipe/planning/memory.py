"""What a plan needs on each worker and on the host, before anything is allocated.

A worker holds two arenas for weights (the running slot's and the next one's), two for gradients (the running slot's and
those on their way down), or one of each where the plan says so, each as large as the largest stage needs, the
activations of the running stage, and tensors between stages: those that user code still holds of microbatches which
wait for their next stage, and those that were brought for the microbatch whose turn is next. Workers that have equal
memory reserve the same, whatever stages come to them. Where each has a budget of its own, it reserves what its own
stages need, and what a layer at a time takes (`of_worker`).

The host holds what outlives a stage: weights, gradients, the optimizer's state, and what recomputation starts from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs, StageBytes
from lightning_roundpipe.planning.partition import check_calls_are_short, greedy_partition
from lightning_roundpipe.planning.schedule import Arenas, Plan, Stage
from lightning_roundpipe.planning.span import Span

ARENAS = 2
"""Of each kind at most: one is used while the other is filled or emptied."""

Memory = int | tuple[int, ...]
"""Bytes of each worker, or of each of those that are not equal."""

BOTH: Arenas = (2, 2)
SINGLE: Arenas = (1, 1)


@dataclass(frozen=True)
class Item:
    """Something that takes memory. ``locked``: the host must not move it, because devices copy from or to it."""

    name: str
    nbytes: int
    locked: bool = False


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model has, tied ones once.

    Args:
        trained: those that get gradients.
        frozen: the others.
        compute_bytes: of each, in the format that layers compute in.
        apart: whether they are updated while a step computes with them (staleness 1).
        packed: of the frozen ones, those that are in few bits.
        packed_bytes: of these, scales included.
        packed_as: their format, in words.
        packed_experts: whether experts' weights are among them.
        machines: that share the optimizer's state.
    """

    trained: int
    frozen: int
    compute_bytes: int
    apart: bool = False
    packed: int = 0
    packed_bytes: int = 0
    packed_as: str = ""
    packed_experts: bool = False
    machines: int = 1


MASTER_BYTES = 4
"""Masters, their gradients and each of AdamW's two moments are fp32."""


def device_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> int:
    """Bytes that ``plan`` takes on each worker at its worst; what is brought ahead of its turn comes on top.

    ``worker``: on this one, where they are not equal.
    """
    needs, waiting = _needs(plan, costs), waiting_bytes(plan, costs, workers)
    of_weights, of_gradients = plan.arenas
    weights, gradients = arena_bytes(plan, costs, workers, worker)
    positions = of_worker(plan, workers, worker)
    activations = max(needs[position].activations + waiting[position] for position in positions)
    return of_weights * weights + of_gradients * gradients + activations


def of_worker(plan: Plan, workers: int, worker: int | None = None) -> range:
    """Positions of the stages that come to a worker, sooner or later; None: to any."""
    stages = len(plan.stages())
    if worker is None:
        return range(stages)
    every = math.gcd(stages, workers)
    return range(worker % every, stages, every)


def arena_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> tuple[int, int]:
    """Bytes of a worker's arena for weights and of one for gradients.

    Without a plan (in the first batch, in evaluation) a layer at a time comes to any worker, so it has arenas for that.
    """
    needs = _needs(plan, costs)
    own = [needs[position] for position in of_worker(plan, workers, worker)]
    weights = [call.weight_bytes for call in costs]
    gradients = [call.gradient_bytes for call in costs if call.needs_backward]
    return (
        max([*(need.weights for need in own), *weights]),
        max([*(need.gradients for need in own), *gradients]),
    )


def fits(plan: Plan, costs: Costs, workers: int, memory: Memory | None) -> bool:
    """Whether each worker has the memory (None: no limit) that ``plan`` takes there."""
    if memory is None:
        return True
    if isinstance(memory, int):
        return device_bytes(plan, costs, workers) <= memory
    return all(device_bytes(plan, costs, workers, worker) <= most for worker, most in enumerate(memory))


def least(memory: Memory | None) -> int | None:
    """What every worker has."""
    return min(memory) if isinstance(memory, tuple) else memory


def arenas_within(plan: Plan, costs: Costs, workers: int, budget: Memory | None) -> list[Plan]:
    """``plan`` with as many arenas as ``budget`` (None: no limit) has room for: one of a kind where both do not fit.

    Returns:
        One plan, or two, of which either kind of arena is double; none if even single arenas do not fit.
    """
    choices: tuple[tuple[Arenas, ...], ...] = ((BOTH,), ((2, 1), (1, 2)), (SINGLE,))
    for arenas in choices:
        plans = [plan.with_arenas(each) for each in arenas]
        fitting = [one for one in plans if fits(one, costs, workers, budget)]
        if fitting:
            return fitting
    return []


def _needs(plan: Plan, costs: Costs) -> list[StageBytes]:
    return [costs.stage_bytes(s.first, s.last, s.phase, plan.recompute_ahead) for s in plan.stages()]


def waiting_bytes(plan: Plan, costs: Costs, workers: int) -> list[int]:
    """While a stage runs, what the round's other microbatches may have left on its worker, for each stage.

    Each of them has been through this stage and waits for the next one, or has been through the worker's stage before
    this one and waits for what follows that. With one worker all of them do wait; with several, as many as those behind
    are late.
    """
    left = [_left_behind(stage, costs) for stage in plan.stages()]
    before = [left[(position - workers) % len(left)] for position in range(len(left))]
    return [(plan.round_microbatches - 1) * max(pair) for pair in zip(left, before, strict=True)]


def _left_behind(stage: Stage, costs: Costs) -> int:
    """What a microbatch has left on the stage's worker while it waits for the next stage: outputs or gradients."""
    if stage.phase == "forward":
        return costs.calls[stage.last + 1].waiting_bytes
    deeper = (call.returning_bytes for call in reversed(costs.calls[: stage.first]) if call.needs_backward)
    return next(deeper, 0)


def ahead_bytes(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> int:
    """What is brought to a worker before it is needed: inputs of a running microbatch's next call, and all that the
    next microbatch starts from. One worker has the outputs of its own stages, and their gradients."""
    needs, waiting = _needs(plan, costs), waiting_bytes(plan, costs, workers)
    positions = of_worker(plan, workers, worker)
    alone = max(needs[position].activations + waiting[position] for position in positions)
    crowded = max(needs[position].crowded + waiting[position] for position in positions)
    stages = plan.stages()
    return crowded - alone + max(_brought(stages[position], costs, alone=workers == 1) for position in positions)


def _brought(stage: Stage, costs: Costs, *, alone: bool) -> int:
    """What a microbatch's turn in ``stage`` begins with, that comes from elsewhere."""
    if stage.phase != "backward":
        return 0 if alone else costs.calls[stage.first].input_bytes
    taped = [call for call in costs.calls[stage.first : stage.last + 1] if call.needs_backward]
    return taped[-1].input_bytes + (0 if alone else taped[-1].returning_bytes) if taped else 0


def lead_within(
    plan: Plan, costs: Costs, workers: int, budget: int | None, lead: int, worker: int | None = None
) -> int:
    """How many bytes of calls the host may enqueue before a device has reached them.

    Args:
        plan: of the step.
        costs: of its calls.
        workers: how many there are.
        budget: bytes of a worker, of which these are the last ones given out; None: no limit.
        lead: how many are worth it.
        worker: whose they are, where workers are not equal.
    """
    if budget is None:
        return lead
    need = device_bytes(plan, costs, workers, worker) + ahead_bytes(plan, costs, workers, worker)
    return min(lead, max(0, budget - need))


def planned_bytes(
    plan: Plan, costs: Costs, workers: int, budget: int | None, lead: int = 0, worker: int | None = None
) -> int:
    """What a worker will hold at its peak: `device_bytes`, and as much ahead as ``budget`` (None: no limit) allows.

    ``lead`` and ``worker``: see `lead_within`.
    """
    need = device_bytes(plan, costs, workers, worker)
    room = ahead_bytes(plan, costs, workers, worker)
    allowed = room if budget is None else min(room, max(0, budget - need))
    return need + allowed + lead_within(plan, costs, workers, budget, lead, worker)


def ahead_within(plan: Plan, costs: Costs, workers: int, budget: Memory | None) -> Plan:
    """``plan`` with recomputation ahead, where it has backward stages and ``budget`` (None: no limit) has the room."""
    ahead = replace(plan, recompute_ahead=bool(plan.backward))
    return ahead if fits(ahead, costs, workers, budget) else plan


def device_items(plan: Plan, costs: Costs, workers: int, budget: int | None, worker: int | None = None) -> list[Item]:
    """The parts of `planned_bytes`, each with the stage that needs most of it."""
    stages, needs, waiting = plan.stages(), _needs(plan, costs), waiting_bytes(plan, costs, workers)
    positions = of_worker(plan, workers, worker)
    items = []
    parts = zip(("weights", "gradients"), plan.arenas, arena_bytes(plan, costs, workers, worker), strict=True)
    for what, arenas, size in parts:
        position = max(positions, key=lambda position: int(getattr(needs[position], what)))
        of = f"of stage {position}" if getattr(needs[position], what) == size else "of the largest layer"
        items.append(Item(f"{plural(arenas, 'arena')} for {what}, {of}", arenas * size))
    position = worst_stage(plan, costs, workers, worker)
    stage, size = stages[position], needs[position].activations
    last = min(costs.calls[-1].activation_bytes, size) if stage.phase == "fused" else 0
    if last:  # of the last call, and the loss that follows it
        items.append(Item(f"loss and activations of {costs.layers[-1]}", last))
    if not last or size > last:
        items.append(Item(f"activations{' of the other calls' if last else ''}, stage {position}", size - last))
    if waiting[position]:
        others = plan.round_microbatches - 1
        wait = f"{plural(others, 'microbatch')} that {'waits' if others == 1 else 'wait'} for the next stage"
        items.append(Item(f"boundary tensors of {wait}", waiting[position]))
    ahead = planned_bytes(plan, costs, workers, budget, worker=worker) - device_bytes(plan, costs, workers, worker)
    if ahead:
        items.append(Item("boundary tensors that are brought ahead", ahead))
    return items


def worst_stage(plan: Plan, costs: Costs, workers: int, worker: int | None = None) -> int:
    """Position of the stage whose activations, with what waits beside them, are the most; the last of equals.

    On a GPU a forward is counted with its call's backward, so that backward stages are the ones that really need it.
    """
    needs, waiting = _needs(plan, costs), waiting_bytes(plan, costs, workers)
    sizes = [need.activations + size for need, size in zip(needs, waiting, strict=True)]
    return max(of_worker(plan, workers, worker), key=lambda position: (sizes[position], position))


@dataclass(frozen=True)
class StageRow:
    """A stage, and what it takes.

    Args:
        phase: forward, fused or backward.
        calls: which, as in a plan.
        ms: for one microbatch, on the workers that it comes to.
        weight_bytes, gradient_bytes: that are brought, or taken away, once a round.
        activation_bytes: of one microbatch at its worst.
        waiting_bytes: of the round's other microbatches, while it runs.
    """

    phase: str
    calls: str
    ms: float
    weight_bytes: int
    gradient_bytes: int
    activation_bytes: int
    waiting_bytes: int


def stage_rows(plan: Plan, costs: Costs, workers: int) -> list[StageRow]:
    """Every stage of ``plan`` in the order in which they run."""
    parts = zip(plan.stages(), _needs(plan, costs), waiting_bytes(plan, costs, workers), strict=True)
    return [
        StageRow(
            phase=stage.phase,
            calls=str(Span(stage.first, stage.last)),
            ms=1e3 * _on_its_workers(stage, plan, costs, workers).stage_time_s(stage.first, stage.last, stage.phase),
            weight_bytes=need.weights,
            gradient_bytes=need.gradients,
            activation_bytes=need.activations,
            waiting_bytes=waiting,
        )
        for stage, need, waiting in parts
    ]


def _on_its_workers(stage: Stage, plan: Plan, costs: Costs, workers: int) -> Costs:
    """What calls cost on the workers that the stage comes to, where all of these are alike; else on average."""
    every = math.gcd(len(plan.stages()), workers)
    each = {id(found): found for found in map(costs.on, range(stage.position % every, workers, every))}
    return next(iter(each.values())) if len(each) == 1 else costs


def boundary_bytes(plan: Plan, costs: Costs) -> int:
    """Bytes of boundary tensors on the host: of the microbatches of one round. The fused stage saves none."""
    saved = [call.boundary_bytes for call in costs.calls[: plan.fused.first] if call.needs_backward]
    return plan.round_microbatches * sum(saved)


def host_items(plan: Plan, costs: Costs, parameters: Parameters, workers: int = 1, microbatches: int = 1) -> list[Item]:
    """What the host holds under AdamW; of several machines, each of them.

    Gradients are summed call by call: those of a weight that several layers share, or of a layer that is called twice,
    are there as often. Those of rounds that run side by side arrive beside the sums, as narrower ones do.
    """
    trained, frozen, size = parameters.trained, parameters.frozen, parameters.compute_bytes
    trains = [call for call in costs.calls if call.needs_backward]
    gradients = sum(call.gradient_bytes for call in trains)
    narrow = sum(call.reduced_bytes or 0 for call in trains)
    landings = narrow
    if plan.side_by_side(workers, microbatches):
        landings += sum(call.gradient_bytes for call in trains if call.reduced_bytes is None)
    machines = parameters.machines
    copied = size != MASTER_BYTES or parameters.apart
    owned = -(-trained // machines)
    whose = f", 1/{machines} of them" if machines > 1 else ""
    items = [
        Item("trained weights, fp32", MASTER_BYTES * trained, locked=not copied),
        Item("their working copy in compute precision", size * trained if copied else 0, locked=True),
        Item(f"frozen weights, {parameters.packed_as}", parameters.packed_bytes, locked=True),
        Item("frozen weights in compute precision", size * (frozen - parameters.packed), locked=True),
        Item("gradients, fp32", max(MASTER_BYTES * trained, gradients), locked=not narrow),
        Item("gradients as they arrive", landings, locked=True),
        Item(f"AdamW's two moments, fp32{whose}", 2 * MASTER_BYTES * owned),
        Item(f"boundary tensors of {plural(plan.round_microbatches, 'microbatch')}", boundary_bytes(plan, costs), True),
    ]
    return [item for item in items if item.nbytes]


def smallest_within(
    costs: Costs, workers: int, microbatches: int, min_round: int, budget: Memory | None, max_round: int | None = None
) -> Plan:
    """The cut at every call, with as many microbatches a round as ``budget`` has room for (None: no limit).

    Where no round fits with two arenas of each kind, the plan has single ones. Fewer a round leave less waiting on the
    workers, and take the weights to them more often. Rounds are all of a step's microbatches, or equal parts of them,
    at most ``max_round`` (None: no limit), and have ``min_round`` at least: with those the plan may not fit.
    """
    lowest = min(min_round, microbatches)
    parts = {-(-microbatches // rounds) for rounds in range(1, microbatches + 1)}
    sizes = sorted({size for size in parts if lowest < size <= (max_round or microbatches)}, reverse=True)
    plans = [
        Plan.per_call(len(costs), size).with_arenas(arenas) for arenas in (BOTH, SINGLE) for size in (*sizes, lowest)
    ]
    fitting = (plan for plan in plans if fits(plan, costs, workers, budget))
    return next(fitting, plans[-1])


def partition_within(
    costs: Costs,
    workers: int,
    microbatches: int,
    round_microbatches: int | None,
    budget: Memory | None,
    min_round: int | None = None,
    stage_s: float | None = None,
    max_round: int | None = None,
) -> Plan:
    """The partitioner's plan for workers that have ``budget`` bytes each; None: no limit.

    The partitioner limits stages one by one, but the largest weights, gradients and activations may be those of
    different stages, so the limit is lowered until the whole plan fits. Where nobody says how many microbatches are a
    round, it is all of them, or, if that does not fit, fewer (see `smallest_within`), but ``min_round`` at least: by
    default one for each worker, as with less some would have nothing to do; and ``max_round`` at most. Arenas are
    single where a cut at every call needs that. ``stage_s``: seconds that a stage may take for one microbatch. The
    partitioner knows no unequal workers: all have what the smallest has.

    Raises:
        ValueError: a cut at every call does not fit either, or is too long.
    """
    budget = least(budget)
    if stage_s is not None:
        check_calls_are_short(costs, stage_s)
    if round_microbatches is None:
        found = smallest_within(costs, workers, microbatches, min_round or workers, budget, max_round)
        round_microbatches = found.round_microbatches
    if budget is None:
        return greedy_partition(costs, workers, microbatches, round_microbatches, stage_s=stage_s)
    smallest = Plan.per_call(len(costs), round_microbatches)
    if device_bytes(smallest, costs, workers) > budget:
        smallest = smallest.with_arenas(SINGLE)
    if device_bytes(smallest, costs, workers) > budget:
        raise ValueError(_too_small(costs, smallest, workers, budget))
    stage_bytes = budget
    while True:
        try:
            plan = greedy_partition(costs, workers, microbatches, round_microbatches, stage_bytes, stage_s=stage_s)
            plan = plan.with_arenas(smallest.arenas)
        except ValueError:  # some call does not fit into a stage of that size, though the arenas have room for it
            return smallest
        need = device_bytes(plan, costs, workers)
        if need <= budget:
            return plan
        stage_bytes = min(stage_bytes - 1, stage_bytes * budget // need)


def _too_small(costs: Costs, smallest: Plan, workers: int, budget: int) -> str:
    call = max(costs, key=lambda c: c.weight_bytes + c.gradient_bytes + c.activation_bytes)
    waiting, others = max(waiting_bytes(smallest, costs, workers)), smallest.round_microbatches - 1
    held = f"; {plural(others, 'waiting microbatch')} with up to {waiting:,}" if waiting else ""
    fewer = " or round_microbatches" if waiting else ""
    return (
        f"memory_budget: workers may use {budget:,} bytes, and a cut at every layer needs "
        f"{device_bytes(smallest, costs, workers):,}. The largest layer is {call.layer!r}: "
        f"{call.weight_bytes:,} of weights, {call.gradient_bytes:,} of gradients, "
        f"{call.activation_bytes:,} of activations{held}. Raise memory_budget, lower microbatch_size{fewer}, or name "
        "smaller modules in layers= so that the layer is split."
    )
