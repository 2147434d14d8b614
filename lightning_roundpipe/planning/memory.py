"""What a plan needs on each worker and on the host, before anything is allocated.

A worker holds two arenas for weights (the running slot's and the next one's), two for gradients (the running slot's and
those on their way down), each as large as the largest stage needs, and the activations of the running stage. Any stage
may come to any worker, so all workers need the same.

The host holds what outlives a stage: weights, gradients, the optimizer's state, and what recomputation starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.partition import greedy_partition
from lightning_roundpipe.planning.schedule import Plan

ARENAS = 2
"""Of each kind: one is used while the other is filled or emptied."""


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
    """

    trained: int
    frozen: int
    compute_bytes: int


MASTER_BYTES = 4
"""Masters, their gradients and each of AdamW's two moments are fp32."""


def device_bytes(plan: Plan, costs: Costs) -> int:
    """Bytes that ``plan`` takes on each worker at its worst."""
    needs = [costs.stage_bytes(s.first, s.last, s.phase, plan.recompute_ahead) for s in plan.stages()]
    arenas = max(need.weights for need in needs) + max(need.gradients for need in needs)
    return ARENAS * arenas + max(need.activations for need in needs)


def ahead_within(plan: Plan, costs: Costs, budget: int | None) -> Plan:
    """``plan`` with recomputation ahead, where it has backward stages and ``budget`` (None: no limit) has the room."""
    ahead = replace(plan, recompute_ahead=bool(plan.backward))
    return ahead if budget is None or device_bytes(ahead, costs) <= budget else plan


def device_items(plan: Plan, costs: Costs) -> list[Item]:
    """The parts of `device_bytes`, each with the stage that needs most of it."""
    stages = plan.stages()
    needs = [costs.stage_bytes(s.first, s.last, s.phase, plan.recompute_ahead) for s in stages]

    def largest(what: str) -> int:
        return max(range(len(stages)), key=lambda position: int(getattr(needs[position], what)))

    items = []
    for what in ("weights", "gradients"):
        position = largest(what)
        size = getattr(needs[position], what)
        items.append(Item(f"{ARENAS} arenas for {what}, of stage {position}", ARENAS * size))
    position = largest("activations")
    stage, size = stages[position], needs[position].activations
    last = costs.calls[-1].activation_bytes if stage.phase == "fused" else 0
    if last:  # of the last call, and the loss that follows it
        items.append(Item(f"logits, loss and activations of {costs.layers[-1]}", last))
    if not last or size > last:
        items.append(Item(f"activations{' of the other calls' if last else ''}, stage {position}", size - last))
    return items


def host_items(plan: Plan, costs: Costs, parameters: Parameters) -> list[Item]:
    """What the host holds under AdamW.

    Boundary tensors are those of the microbatches of one round; the fused stage recomputes nothing, so it saves none.
    """
    trained, frozen, size = parameters.trained, parameters.frozen, parameters.compute_bytes
    saved = [call.boundary_bytes for call in costs.calls[: plan.fused.first] if call.needs_backward]
    copied = size != MASTER_BYTES
    items = [
        Item("trained weights, fp32", MASTER_BYTES * trained, locked=not copied),
        Item("their working copy in compute precision", size * trained if copied else 0, locked=True),
        Item("frozen weights in compute precision", size * frozen, locked=True),
        Item("gradients, fp32", MASTER_BYTES * trained, locked=True),
        Item("AdamW's two moments, fp32", 2 * MASTER_BYTES * trained),
        Item(f"boundary tensors of {plan.round_microbatches} microbatches", plan.round_microbatches * sum(saved), True),
    ]
    return [item for item in items if item.nbytes]


def partition_within(
    costs: Costs, workers: int, microbatches: int, round_microbatches: int | None, budget: int | None
) -> Plan:
    """The partitioner's plan for workers that have ``budget`` bytes each; None: no limit.

    The partitioner limits stages one by one, but the largest weights, gradients and activations may be those of
    different stages, so the limit is lowered until the whole plan fits.

    Raises:
        ValueError: a cut at every call does not fit either.
    """
    if budget is None:
        return greedy_partition(costs, workers, microbatches, round_microbatches)
    smallest = Plan.per_call(len(costs), round_microbatches or microbatches)
    if (least := device_bytes(smallest, costs)) > budget:
        raise ValueError(_too_small(costs, least, budget))
    stage_bytes = budget
    while True:
        try:
            plan = greedy_partition(costs, workers, microbatches, round_microbatches, stage_bytes)
        except ValueError:  # some call does not fit into a stage of that size, though the arenas have room for it
            return smallest
        need = device_bytes(plan, costs)
        if need <= budget:
            return plan
        stage_bytes = min(stage_bytes - 1, stage_bytes * budget // need)


def _too_small(costs: Costs, least: int, budget: int) -> str:
    call = max(costs, key=lambda c: ARENAS * (c.weight_bytes + c.gradient_bytes) + c.activation_bytes)
    return (
        f"memory_budget: workers may use {budget:,} bytes, and a cut at every layer needs {least:,}. The largest layer "
        f"is {call.layer!r}: {ARENAS} x {call.weight_bytes:,} of weights, {ARENAS} x {call.gradient_bytes:,} of "
        f"gradients, {call.activation_bytes:,} of activations. Raise memory_budget, lower microbatch_size, or name "
        "smaller modules in layers= so that the layer is split."
    )
