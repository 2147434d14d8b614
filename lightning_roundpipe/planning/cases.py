"""Measured models as files: a list of cases, each with one layer's times on one GPU.

``conf/cases/paper.json`` holds those of the paper (arXiv 2604.27085; RTX 4090, 8192 tokens a microbatch): per model and
schedule the number of layers, their times, the LM head's, and the cuts that the paper's simulator was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_roundpipe.planning.costs import CallCost, Costs

_NUMBERS = ("forward_ms", "backward_ms", "head_forward_ms", "head_backward_ms")


@dataclass(frozen=True)
class Case:
    """One model under one schedule.

    Args:
        model: its name.
        schedule: ``roundpipe`` or the name of a baseline.
        workers: N.
        microbatches: M.
        layers: how many equal layers come before the LM head.
        forward_ms: a layer's forward, for one microbatch; also its recomputation.
        backward_ms: a layer's backward without the recomputation.
        head_forward_ms: the LM head's and the loss's forward.
        head_backward_ms: their backward.
    """

    model: str
    schedule: str
    workers: int
    microbatches: int
    layers: int
    forward_ms: float
    backward_ms: float
    head_forward_ms: float
    head_backward_ms: float

    def costs(self, scale: float = 1.0) -> Costs:
        """A call for each layer and one for the head; ``scale`` stretches all times. Sizes are not known: 0."""
        times = [(f"layers.{i}", self.forward_ms, self.backward_ms) for i in range(self.layers)]
        times.append(("head", self.head_forward_ms, self.head_backward_ms))
        return Costs(
            tuple(
                CallCost(name, scale * forward / 1e3, scale * backward / 1e3, 0, 0, 0, 0, needs_backward=True)
                for name, forward, backward in times
            )
        )


def read_cases(path: Path) -> list[Case]:
    """The cases of a JSON file, which holds one or a list of them.

    Raises:
        ValueError: the file is no JSON, or a case lacks something; says which.
    """
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    return [_case(path, number, case) for number, case in enumerate(data if isinstance(data, list) else [data])]


def _case(path: Path, number: int, data: Any) -> Case:
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}, case {number}: expected an object, not {data!r}.")
    names = Case.__dataclass_fields__
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{path}, case {number} lacks {missing[0]!r}; it needs {', '.join(names)}.")
    for name in _NUMBERS:
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{path}, case {number}: {name}={value!r} must be a number of at least 0.")
    for name in ("workers", "microbatches", "layers"):
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}, case {number}: {name}={value!r} must be a whole number of at least 1.")
    return Case(**{name: data[name] for name in names})
