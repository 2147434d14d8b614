"""Plans: which calls run together as a stage, and in which order. This package does not import the engine."""

from lightning_roundpipe.planning.costs import CallCost, Costs, Phase
from lightning_roundpipe.planning.partition import greedy_partition
from lightning_roundpipe.planning.schedule import Plan, Span, Stage

__all__ = ["CallCost", "Costs", "Phase", "Plan", "Span", "Stage", "greedy_partition"]
