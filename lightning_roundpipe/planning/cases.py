"""JSON files of measured models: each case has the times of a layer on one GPU, and the cuts into stages.

``conf/cases/paper.json`` holds the cases of the paper (arXiv 2604.27085; RTX 4090, 8192 tokens a microbatch): per model
and schedule the number of layers, their times, the LM head's, the cuts that the paper's simulator was given, and, where
the paper prints them, the figures that it found. A case in a file::

    {"model": "tiny", "schedule": "1f1b", "workers": 2, "microbatches": 4, "layers": 3, "forward_ms": 1.0,
     "backward_ms": 2.0, "head_forward_ms": 0.5, "head_backward_ms": 1.0, "hop_ms": 0.1, "stages": [2, 1]}

``stages`` are layers per stage. The schedule ``roundpipe`` cuts both passes, ``{"forward": [...], "backward": [...]}``,
each in the order in which it runs; ``backward`` begins with the fused stage, whose layers no forward stage has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lightning_roundpipe.config import is_number, is_whole
from lightning_roundpipe.planning.costs import CallCost, Costs

Schedule = Literal["1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "roundpipe"]

FIGURES = ("makespan_ms", "bubble_pct", "fill_pct", "switch_pct", "drain_pct", "intra_pct")
"""Figures of a schedule in the paper: the makespan, and idle time in percent of makespan x workers."""

MOST_MS = 1e15
"""Upper bound of a time in milliseconds (30,000 years), which keeps sums finite."""

MOST = 1_000_000
"""Upper bound of workers, microbatches and layers."""

_TIMES = ("forward_ms", "backward_ms", "head_forward_ms", "head_backward_ms", "hop_ms")
_COUNTS = ("workers", "microbatches", "layers")
_OPTIONAL = ("expected",)


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


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a JSON file, which holds one case or a list.

    Raises:
        ValueError: the file cannot be read or is not JSON, or a case is incomplete or contradicts itself.
    """
    data = read_json(path)
    cases = data if isinstance(data, list) else [data]
    if not cases:
        raise ValueError(f"{path} holds no case: write one case, or a list of at least one.")
    found = []
    for number, case in enumerate(cases):
        try:
            found.append(_read_case(case))
        except ValueError as error:
            raise ValueError(f"{path}, case {number}: {error}") from None
    return found


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: the file cannot be read, or is not JSON. The message names the file.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply.") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and numbers of too many digits
        raise ValueError(f"{path} is not JSON: {error}.") from None


def _read_case(data: Any) -> Case:
    needed = [item.name for item in fields(Case) if not item.name.endswith("_stages") and item.name not in _OPTIONAL]
    needed.append("stages")
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object with the keys {', '.join(needed)}, not {_shown(data)}.")
    unknown = [key for key in data if key not in (*needed, *_OPTIONAL)]
    for name in needed:
        if name not in data:
            meant = get_close_matches(name, unknown, n=1)
            hint = f" ({meant[0]!r} is not known)" if meant else ""
            raise ValueError(f"it lacks {name!r}{hint}; it needs {', '.join(needed)}.")
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; it takes {', '.join((*needed, *_OPTIONAL))}.")
    for name in _TIMES:
        value = data[name]
        if not _is_number(value) or not 0 <= value <= MOST_MS:
            raise ValueError(f"{name}={_shown(value)} must be a number of 0 to {MOST_MS:g} milliseconds.")
    for name in _COUNTS:
        if not is_whole(data[name]) or not 1 <= data[name] <= MOST:
            raise ValueError(f"{name}={_shown(data[name])} must be a whole number of at least 1, and {MOST:,} at most.")
    if not isinstance(data["model"], str):
        raise ValueError(f"model={_shown(data['model'])} must be text.")
    if data["schedule"] not in get_args(Schedule):
        raise ValueError(f"schedule={_shown(data['schedule'])} must be one of {', '.join(get_args(Schedule))}.")
    forward, backward = _read_stages(cast(Schedule, data["schedule"]), data["stages"], data["layers"])
    given = {name: data[name] for name in needed if name != "stages"}
    expected = _read_expected(data.get("expected"))
    return Case(**given, forward_stages=forward, backward_stages=backward, expected=expected)


def _read_stages(schedule: Schedule, data: Any, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return forward and backward stages. Each pass must have every layer once."""
    if schedule != "roundpipe":
        if isinstance(data, Mapping):
            raise ValueError(f"stages of {schedule} must be one list, as each stage goes both ways; not an object.")
        stages = _layers_per_stage("stages", data, at_least=1)
        _check_sum("stages", sum(stages), layers)
        return stages, ()
    if not isinstance(data, Mapping) or set(data) != {"forward", "backward"}:
        raise ValueError(
            f'stages of roundpipe must be {{"forward": [...], "backward": [...]}}, with layers per stage; '
            f"not {_shown(data)}."
        )
    forward = _layers_per_stage("stages.forward", data["forward"], at_least=0)
    backward = _layers_per_stage("stages.backward", data["backward"], at_least=1)
    _check_sum("stages.backward", sum(backward), layers)
    _check_sum("stages.forward and the fused stage, stages.backward[0],", sum(forward) + backward[0], layers)
    return forward, backward


def _layers_per_stage(name: str, data: Any, at_least: int) -> tuple[int, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{name}={_shown(data)} must be a list of layers per stage.")
    if len(data) < at_least:
        raise ValueError(f"{name} is empty: it needs at least one stage, if only for the head.")
    for stage, count in enumerate(data):
        if not is_whole(count) or count < 0:
            raise ValueError(f"{name}[{stage}]={_shown(count)} must be a whole number of layers, 0 or more.")
    return tuple(data)


def _check_sum(name: str, total: int, layers: int) -> None:
    if total != layers:
        raise ValueError(f"{name} must hold layers={layers} together, but they hold {total}.")


def _read_expected(data: Any) -> Mapping[str, float] | None:
    if data is None:
        return None
    if not isinstance(data, Mapping) or any(key not in FIGURES or not _is_number(data[key]) for key in data):
        raise ValueError(f"expected must be null or hold numbers for some of {', '.join(FIGURES)}.")
    return dict(data)


def _is_number(value: Any) -> bool:
    return is_whole(value) or (is_number(value) and math.isfinite(value))


def _shown(value: Any) -> str:
    """Return a value of the file as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
