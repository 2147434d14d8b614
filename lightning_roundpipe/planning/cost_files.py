"""Costs from a file: a model of equal layers and a head, as `roundpipe-plan costs=FILE.json` reads it.

The times of a case (see `cases`) are enough. The command also takes ``workers``, ``microbatches`` and its own options
from the file unless the command line gives them, and ignores other keys. A plan for limited memory needs sizes, too::

    {"layers": 32, "forward_ms": 18.5, "backward_ms": 41.2, "head_forward_ms": 37.2, "head_backward_ms": 74.5,
     "hop_ms": 3.2, "workers": 8, "microbatches": 16,
     "weight_bytes": 436e6, "gradient_bytes": 436e6, "boundary_bytes": 67e6, "activation_bytes": 1e9,
     "head_weight_bytes": 1050e6, "head_gradient_bytes": 1050e6, "head_boundary_bytes": 67e6,
     "head_activation_bytes": 2e9}

The optional ``speeds`` has the speed of each worker relative to these times.

Instead, the file may list the ``calls`` of a trace, each with times and sizes, as `Costs.to_dict` writes them. A run of
``roundpipe-train`` leaves such measured costs in ``costs.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_roundpipe.config import is_number, is_whole, read_json
from lightning_roundpipe.planning.costs import CallCost, Costs

TIMES = ("forward_ms", "backward_ms", "head_forward_ms", "head_backward_ms")
SIZES = ("weight_bytes", "gradient_bytes", "boundary_bytes", "activation_bytes")
MOST_LAYERS = 1000
_MOST = 1e15


def read_cost_file(path: Path, case: str | None = None) -> dict[str, Any]:
    """Return the object in a file, or in a list the one whose ``model`` is ``case``.

    Raises:
        ValueError: the file cannot be read, is not JSON, or holds no such object.
    """
    try:
        data = read_json(path)
    except ValueError as error:
        raise ValueError(f"costs={error}") from None
    entries = data if isinstance(data, list) else [data]
    if not all(isinstance(entry, Mapping) for entry in entries) or not entries:
        raise ValueError(f"costs={path} must hold an object with {', '.join(('layers', *TIMES, 'hop_ms'))}.")
    if case is not None:
        models = {str(entry.get("model")): entry for entry in reversed(entries)}
        if case not in models:
            close = get_close_matches(case, models, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(f"There is no case={case} in {path}.{hint} It has {', '.join(sorted(models))}.")
        return dict(models[case])
    if len(entries) > 1:
        raise ValueError(f"costs={path} holds several cases: choose one by its model with case=NAME.")
    return dict(entries[0])


def costs_of(data: Mapping[str, Any], path: Path) -> tuple[Costs, float]:
    """Return the costs, with a call for each layer and one for the head, and the hop in seconds.

    Raises:
        ValueError: a key is missing, or its value is out of range. The message names it.
    """
    costs, hop_s = _equal_costs_of(data, path)
    if (speeds := data.get("speeds")) is None:
        return costs, hop_s
    if not isinstance(speeds, list) or not speeds or not all(_is_number(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"costs={path}: speeds={speeds!r} must be a list of numbers of more than 0, one a worker.")
    if costs.unequal:
        raise ValueError(f"costs={path} has times of each worker, and speeds: leave one of them out.")
    return costs.at_speeds(speeds), hop_s


def _equal_costs_of(data: Mapping[str, Any], path: Path) -> tuple[Costs, float]:
    if "calls" in data:
        try:
            return Costs.from_dict(data), number(data, "hop_ms", path, 0.0) / 1e3
        except ValueError as error:
            raise ValueError(f"costs={path}: {error}") from None
    layers = whole(data, "layers", path)
    if layers > MOST_LAYERS:
        raise ValueError(f"costs={path}: layers={layers} is more than the {MOST_LAYERS} that can be planned for.")
    times = {name: number(data, name, path) / 1e3 for name in TIMES}
    sizes = {name: int(number(data, name, path, 0)) for size in SIZES for name in (size, f"head_{size}")}

    def call(name: str, prefix: str) -> CallCost:
        weights, gradients, boundary, activations = (sizes[prefix + size] for size in SIZES)
        forward, backward = times[f"{prefix}forward_ms"], times[f"{prefix}backward_ms"]
        return CallCost(name, forward, backward, weights, gradients, boundary, activations, needs_backward=True)

    calls = [*(call(f"layers.{layer}", "") for layer in range(layers)), call("head", "head_")]
    return Costs(tuple(calls)), number(data, "hop_ms", path) / 1e3


def whole(data: Mapping[str, Any], name: str, path: Path, least: int = 1) -> int:
    """Return the value of a key, which must be a whole number of at least ``least``."""
    value = _found(data, name, path)
    if not is_whole(value) or value < least:
        raise ValueError(f"costs={path}: {name}={value!r} must be a whole number of at least {least}.")
    return int(value)


def number(data: Mapping[str, Any], name: str, path: Path, default: float | None = None) -> float:
    """Return the value of a key, which must be a finite number of at least 0."""
    value = _found(data, name, path) if default is None else data.get(name, default)
    if not _is_number(value):
        raise ValueError(f"costs={path}: {name}={value!r} must be a number of 0 to {_MOST:g}.")
    return float(value)


def _is_number(value: Any) -> bool:
    return is_number(value) and 0 <= value <= _MOST


def _found(data: Mapping[str, Any], name: str, path: Path) -> Any:
    if name in data:
        return data[name]
    close = get_close_matches(name, map(str, data), n=1)
    hint = f" ({close[0]!r} is not known)" if close else ""
    raise ValueError(f"costs={path} lacks {name!r}{hint}; it needs {', '.join(('layers', *TIMES, 'hop_ms'))}.")
