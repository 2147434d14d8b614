"""The paper's measured models (arXiv 2604.27085; RTX 4090, 8192 tokens a microbatch), and files like theirs.

``conf/cases/paper.json`` has, per model and schedule, the number of layers, their times, the LM head's, the cuts that
the paper's simulator was given, and, where the paper prints them, the figures that it found. A case in a file::

    {"model": "tiny", "schedule": "1f1b", "workers": 2, "microbatches": 4, "layers": 3, "forward_ms": 1.0,
     "backward_ms": 2.0, "head_forward_ms": 0.5, "head_backward_ms": 1.0, "hop_ms": 0.1, "stages": [2, 1]}

``stages`` are layers per stage. The schedule ``roundpipe`` cuts both passes, ``{"forward": [...], "backward": [...]}``,
each in the order in which it runs; ``backward`` begins with the fused stage, whose layers no forward stage has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

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

    Raises:
        ValueError: the schedule is not known, or the stages do not hold every layer once.
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

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule={self.schedule!r} must be one of {', '.join(get_args(Schedule))}.")
        forward = sum(self.forward_stages)
        both = (forward + self.backward_stages[0], sum(self.backward_stages)) if self.backward_stages else (forward,)
        if set(both) != {self.layers}:
            raise ValueError(f"stages must hold layers={self.layers} together in each pass, but they hold {both}.")

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


def read_cases(path: Path = PAPER) -> list[Case]:
    """Return the cases of a JSON file, which holds one case or a list.

    Raises:
        ValueError: a case is incomplete or contradicts itself. The message has its number.
    """
    data = json.loads(path.read_text())
    found = []
    for number, case in enumerate(data if isinstance(data, list) else [data]):
        try:
            found.append(_read_case(dict(case)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, case {number}: {error}") from None
    return found


def _read_case(data: dict[str, Any]) -> Case:
    stages = data.pop("stages")
    both = (stages["forward"], stages["backward"]) if data.get("schedule") == "roundpipe" else (stages, ())
    return Case(**data, forward_stages=tuple(both[0]), backward_stages=tuple(both[1]))
