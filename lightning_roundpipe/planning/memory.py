"""What a plan needs on each worker, before anything is allocated.

A worker holds two arenas for weights (the running slot's and the next one's), two for gradients (the running slot's and
those on their way down), each as large as the largest stage needs, and the activations of the running stage. Any stage
may come to any worker, so all workers need the same.
"""

from __future__ import annotations

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.partition import greedy_partition
from lightning_roundpipe.planning.schedule import Plan

ARENAS = 2
"""Of each kind: one is used while the other is filled or emptied."""


def device_bytes(plan: Plan, costs: Costs) -> int:
    """Bytes that ``plan`` takes on each worker at its worst."""
    needs = [costs.stage_bytes(stage.first, stage.last, stage.phase) for stage in plan.stages()]
    arenas = max(need.weights for need in needs) + max(need.gradients for need in needs)
    return ARENAS * arenas + max(need.activations for need in needs)


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
