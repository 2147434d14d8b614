"""Small traces for the planning tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_roundpipe.planning import CallCost, Costs, Plan
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import fits


def call(
    layer: str,
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    weights: int = 100,
    gradients: int = 40,
    activations: int = 10,
    needs_backward: bool = True,
    waiting: int = 0,
    returning: int = 0,
    **others: Any,
) -> CallCost:
    return CallCost(
        layer, forward, backward, weights, gradients, 5, activations, needs_backward, waiting_bytes=waiting,
        returning_bytes=returning, **others,
    )  # fmt: skip


def even(n: int) -> Costs:
    return Costs(tuple(call(f"layers.{number}") for number in range(n)))


def timed(forward: Sequence[float], backward: Sequence[float]) -> Costs:
    pairs = zip(forward, backward, strict=True)
    return Costs(tuple(call(f"layers.{number}", f, b) for number, (f, b) in enumerate(pairs)))


def keeps(limits: Limits, plan: Plan, costs: Costs, workers: int) -> bool:
    """Whether the plan is within the limits, counted apart from the search that has to keep to them."""
    whole = plan == Plan.single(len(costs), 1)
    is_beside = limits.memory is not None and limits.side_by_side and whole
    most = limits.max_round or plan.round_microbatches
    is_cut_so = limits.min_round <= plan.round_microbatches <= most and len(plan.fused) <= limits.max_fused + 1
    return (is_beside or is_cut_so) and fits(plan, costs, workers, limits.memory)
