"""The paper's measured models (arXiv 2604.27085; RTX 4090, 8192 tokens a microbatch), and its own schedule's figures.

``paper_cases.json`` has, per model, the number of layers, their times, the LM head's, and what the paper's simulator
finds for its schedule. The paper prints the figures of three models; those of GPT-OSS-20B and Qwen3-32B follow by its
rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.pipeline import Staleness


@dataclass(frozen=True)
class Case:
    """One model under the paper's schedule.

    Args:
        model: its name.
        workers: number of workers (N).
        microbatches: number of microbatches (M).
        layers: number of equal layers before the LM head.
        forward_ms: a layer's forward, for one microbatch; also its recomputation.
        backward_ms: a layer's backward without the recomputation.
        head_forward_ms: the LM head's and the loss's forward.
        head_backward_ms: their backward.
        hop_ms: time of a microbatch from one worker to another.
        makespan_ms: what a step alone takes in the paper's simulator.
        asynchronous_pct: idle time without fill and drain, in percent of makespan x workers.
    """

    model: str
    workers: int
    microbatches: int
    layers: int
    forward_ms: float
    backward_ms: float
    head_forward_ms: float
    head_backward_ms: float
    hop_ms: float
    makespan_ms: float
    asynchronous_pct: float

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

    def papers_seconds(self, staleness: Staleness) -> float:
        """What the paper's schedule takes for a step alone (0), or for each of many that overlap (1)."""
        if not staleness:
            return self.makespan_ms / 1e3
        work = self.layers * (2 * self.forward_ms + self.backward_ms) + self.head_forward_ms + self.head_backward_ms
        return self.microbatches * work / (self.workers * (1 - self.asynchronous_pct / 100)) / 1e3


def read_cases() -> dict[str, Case]:
    """Return the paper's cases, by model."""
    cases = [Case(**case) for case in json.loads(Path(__file__).with_suffix(".json").read_text())]
    return {case.model: case for case in cases}
