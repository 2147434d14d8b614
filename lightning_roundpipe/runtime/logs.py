"""``self.log`` from several microbatches, issued once.

Called once per microbatch, Lightning's own ``log`` would keep the last microbatch's step value, count sums twice and
lose updates between threads. So it is shadowed during the step, and what was said is merged by its reduction and said
once, on the main thread. Scalars are merged by the weights of the loss: what a step logs is most often the loss itself,
or a mean over the same targets.

Metric objects gather over an epoch, and see each microbatch once. Their value for the batch is another matter, see
`BatchValues`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.microbatch import combined


class LogRecorder:
    """What one microbatch logged, in order.

    ``self.log`` runs while the microbatch holds the user-code lock, so it never waits for a device: a value that a
    device still computes starts its download and is waited for when the step issues its logs.

    Args:
        devices: where logged values may lie.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self._devices = devices

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.calls.append((name, self._kept(value), kwargs))

    def _kept(self, value: Any) -> Any:
        """``value`` as it is now: user code may write to it later."""
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        device = next((d for d in self._devices if d.torch_device == value.device), None)
        if device is None or value.device.type == "cpu":
            return value.detach().cpu().clone()
        return _Download(value.detach().clone(), device)


class _Download:
    """A tensor on its way from ``device``, where ``compute`` makes it, to the host."""

    def __init__(self, tensor: Tensor, device: Device) -> None:
        self._host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        stream.copy(self._host, tensor)
        self._end = stream.record()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        self._end.wait()
        return self._host.clone()  # in ordinary memory, as loggers may keep it


def _arrived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrived(item) for key, item in value.items()}
    return value.wait() if isinstance(value, _Download) else value


@contextlib.contextmanager
def log_as(module: nn.Module, stand_in: Callable[..., None]) -> Iterator[None]:
    """``stand_in`` in place of ``module.log``, be that the class's or one that was set on the module itself."""
    own = vars(module)
    before = {"log": own["log"]} if "log" in own else {}
    own["log"] = stand_in
    try:
        yield
    finally:
        del own["log"]
        own.update(before)


@contextlib.contextmanager
def shadowed_log(module: Any, current: Any, *, several: bool) -> Iterator[None]:
    """Send ``module.log`` to ``current().log`` (the calling microbatch's recorder, of ``several`` or the only one)."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"log() takes {2 + len(_POSITIONAL)} positional arguments, {2 + len(args)} were given")
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        current().log(name, value, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(log_as(module, log))
        for metric in module.modules() if several else ():
            if isinstance(metric, Metric):
                stack.enter_context(BatchValue(metric))
        yield


_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


class HostMetrics:
    """The metrics of a module whose steps run on devices: what they gather stays on the host.

    Predictions come from whichever device a microbatch ends on, and targets from the host. Lightning computes a metric
    at the end of an epoch outside of the mode that brings them together, and a GPU would hold all of them until then.

    Args:
        module: whose metrics they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._changed = [m for m in self._metrics if not m.compute_on_cpu]
        for metric in self._changed:
            metric.compute_on_cpu = True  # torchmetrics moves lists to the host after each update

    def bring_to_host(self) -> None:
        """After a step: move the tensors that an update has replaced (``self.total = self.total + x``) too."""
        for metric in self._metrics:
            for name, value in metric.metric_state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    setattr(metric, name, value.cpu())

    def end(self) -> None:
        """Leave the metrics as they were found."""
        for metric in self._changed:
            metric.compute_on_cpu = False


class BatchValue:
    """The value of a metric for all microbatches that it is called with in one step, as if they had been one batch.

    Calling a metric adds to what it gathers and returns the value for this call alone, which it also keeps for
    ``log(on_step=True)``. From the values of microbatches that of the batch does not follow, be they weighted or not:
    sums, extremes, F1. So what the step's calls were given is gathered once more, apart, and the value made of that is
    what the metric keeps.
    """

    def __init__(self, metric: Metric) -> None:
        self._parts = [part for part in metric.modules() if isinstance(part, Metric)]  # wrappers hold others
        self._metric = metric
        self._apart: list[dict[str, Any]] | None = None

    def __enter__(self) -> None:
        self._hook = self._metric.register_forward_hook(self._called, with_kwargs=True)

    def __exit__(self, error: object, *_: object) -> None:
        self._hook.remove()
        if self._apart is None or error is not None:
            return
        with self._swapped():
            value = self._metric.compute()
        self._metric._forward_cache = value

    def _called(self, metric: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with self._swapped():
            self._metric.update(*args, **kwargs)
            self._apart = [dict(vars(part)) for part in self._parts]

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """The metric holds what was gathered in this step, at first nothing."""
        kept = [dict(vars(part)) for part in self._parts]
        try:
            if self._apart is not None:
                self._load(self._apart)
            else:
                for part in self._parts:  # ``reset`` empties lists where they are
                    vars(part).update({k: [] for k, v in vars(part).items() if type(v) is list})
                self._metric.reset()
            yield
        finally:
            self._load(kept)

    def _load(self, state: list[dict[str, Any]]) -> None:
        for part, attributes in zip(self._parts, state, strict=True):
            vars(part).clear()
            vars(part).update(attributes)


def issue(
    module: Any, recorders: list[LogRecorder], sizes: list[int], weights: list[float],
    losses: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Say once what the microbatches said, on the main thread. ``losses``: as in `microbatch.combined`."""
    merged: dict[tuple[str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
    for index, recorder in enumerate(recorders):
        said: dict[str, int] = {}
        for name, value, kwargs in recorder.calls:
            nth = said[name] = said.get(name, -1) + 1
            merged.setdefault((name, nth), []).append((index, _arrived(value), kwargs))
    for (name, _), parts in merged.items():
        kwargs = dict(parts[-1][2])
        given = [p[2].get("batch_size") for p in parts]
        if None not in given:
            kwargs["batch_size"] = sum(given)
        elif len(parts) < len(recorders):
            kwargs["batch_size"] = sum(sizes[p[0]] for p in parts)  # else Lightning infers it from the batch, as ever
        values = [p[1] for p in parts]
        theirs = None if losses is None else [losses[p[0]] for p in parts]
        reduce_fx = kwargs.get("reduce_fx", "mean")
        module.log(name, _merged(values, reduce_fx, [weights[p[0]] for p in parts], theirs), **kwargs)


def _merged(values: list[Any], reduce_fx: Any, weights: list[float], losses: Sequence[Tensor] | None) -> Any:
    first = values[0]
    if isinstance(first, Metric):
        return first
    if isinstance(first, dict):
        return {k: _merged([v[k] for v in values], reduce_fx, weights, losses) for k in first}
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
    return combined(tensors, weights, losses)
