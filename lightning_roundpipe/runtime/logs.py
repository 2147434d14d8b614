"""``self.log`` from several microbatches, issued once.

Called once per microbatch, Lightning's own ``log`` would keep the last microbatch's step value, count sums twice and
lose updates between threads. So it is shadowed during the step, and what was said is merged by its reduction and said
once, on the main thread. Scalars are merged by the weights of the loss: what a step logs is most often the loss itself,
or a mean over the same targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.runtime.microbatch import weighted_mean


class LogRecorder:
    """What one microbatch logged, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        if isinstance(value, Metric):
            cache = getattr(value, "_forward_cache", None)
            self.calls.append((name, (value, _to_host(cache)), kwargs))
        else:
            self.calls.append((name, _to_host(value), kwargs))


def _to_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def shadowed_log(module: Any, current: Any) -> Iterator[None]:
    """Send ``module.log`` to ``current().log`` (the calling microbatch's recorder)."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        current().log(name, value, **kwargs)

    object.__setattr__(module, "log", log)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def issue(module: Any, recorders: list[LogRecorder], sizes: list[int], weights: list[float]) -> None:
    """Say once what the microbatches said, on the main thread."""
    merged: dict[tuple[str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
    for index, recorder in enumerate(recorders):
        said: dict[str, int] = {}
        for name, value, kwargs in recorder.calls:
            nth = said[name] = said.get(name, -1) + 1
            merged.setdefault((name, nth), []).append((index, value, kwargs))
    for (name, _), parts in merged.items():
        kwargs = dict(parts[-1][2])
        given = [p[2].get("batch_size") for p in parts]
        if None not in given:
            kwargs["batch_size"] = sum(given)
        elif len(parts) < len(recorders):
            kwargs["batch_size"] = sum(sizes[p[0]] for p in parts)  # else Lightning infers it from the batch, as ever
        values = [p[1] for p in parts]
        module.log(name, _merged(values, kwargs.get("reduce_fx", "mean"), [weights[p[0]] for p in parts]), **kwargs)


def _merged(values: list[Any], reduce_fx: Any, weights: list[float]) -> Any:
    first = values[0]
    if isinstance(first, tuple) and isinstance(first[0], Metric):
        metric = first[0]
        caches = [v[1] for v in values if isinstance(v[1], Tensor) and v[1].numel() == 1]
        if len(caches) == len(values):
            cast(Any, metric)._forward_cache = weighted_mean(caches, weights)
        return metric
    if isinstance(first, dict):
        return {k: _merged([v[k] for v in values], reduce_fx, weights) for k in first}
    if len(values) == 1:
        return first
    tensors = [v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float32) for v in values]
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction in ("min", "amin"):
        return torch.stack(tensors).amin(0)
    if reduction in ("max", "amax"):
        return torch.stack(tensors).amax(0)
    if reduction == "sum":
        return torch.stack(tensors).sum(0)
    return weighted_mean(tensors, weights)
