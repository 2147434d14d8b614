"""The paper's measured models (arXiv 2604.27085; RTX 4090, 8192 tokens a microbatch).

``conf/cases/paper.json`` has, per model and schedule, the number of layers, their times, the LM head's, the cuts that
the paper's simulator was given, and, where the paper prints them, the figures that it found. ``stages`` are layers per
stage. The schedule ``roundpipe`` cuts both passes, ``{"forward": [...], "backward": [...]}``, each in the order in
which it runs; ``backward`` begins with the fused stage, whose layers no forward stage has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_roundpipe.planning.costs import CallCost, Costs

Schedule = Literal["1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "roundpipe"]

PAPER = Path(__file__).parents[1] / "conf" / "cases" / "paper.json"

FIGURES = ("makespan_ms", "bubble_pct", "fill_pct", "switch_pct", "drain_pct", "intra_pct")
"""Figures of a schedule in the paper: the makespan, and idle time in percent of makespan x workers."""


@dataclass(frozen=True)
class Case:
    """One model under one schedule.

    Args:
        model: its name.
        schedule: ``roundpipe`` or one of the baselines.
        workers: number of workers (N).
        microbatches: number of microbatches (M).
        layers: number of equal layers before the LM head.
        forward_ms: a layer's forward, for one microbatch; also its recomputation.
        backward_ms: a layer's backward without the recomputation.
        head_forward_ms: the LM head's and the loss's forward.
        head_backward_ms: their backward.
        hop_ms: time of a microbatch from one worker to another.
        forward_stages: layers of each forward stage. A baseline runs these stages in both directions.
        backward_stages: layers of each backward stage in running order, the fused stage first. Empty for a baseline.
        expected: the `FIGURES` that the paper reports, or some of them.
    """

    model: str
    schedule: Schedule
    workers: int
    microbatches: int
    layers: int
    forward_ms: float
    backward_ms: float
    head_forward_ms: float
    head_backward_ms: float
    hop_ms: float
    forward_stages: tuple[int, ...]
    backward_stages: tuple[int, ...] = ()
    expected: Mapping[str, float] | None = None

    def costs(self, scale: float = 1.0) -> Costs:
        """Return costs with a call for each layer and one for the head.

        ``scale`` multiplies all times. Sizes are unknown, and therefore 0.
        """
        times = [(f"layers.{i}", self.forward_ms, self.backward_ms) for i in range(self.layers)]
        times.append(("head", self.head_forward_ms, self.head_backward_ms))
        return Costs(
            tuple(
                CallCost(name, scale * forward / 1e3, scale * backward / 1e3, 0, 0, 0, 0, needs_backward=True)
                for name, forward, backward in times
            )
        )


def read_cases() -> list[Case]:
    """Return the paper's cases."""
    found = []
    for case in json.loads(PAPER.read_text()):
        stages = case.pop("stages")
        forward, backward = stages.values() if isinstance(stages, dict) else (stages, ())
        found.append(Case(**case, forward_stages=tuple(forward), backward_stages=tuple(backward)))
    return found
