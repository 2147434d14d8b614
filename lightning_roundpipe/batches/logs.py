"""``self.log`` on threads of microbatches and of batches in evaluation: recorded, and repeated when Lightning comes.

`LightningModule.log` depends on what Lightning's loop does at the moment. So on these threads its arguments are
recorded. The loop's thread then calls it with them, batch by batch, in the same order and within the same hook. Values
are copies, as user code may write to a tensor that it has logged.

``Metric._forward_cache``, the value that ``on_step`` shows, is a private name of torchmetrics, and ``trainer._results``
one of Lightning.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.batches.weights import weighted_mean
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.process_context import replaced


class _Call(NamedTuple):
    """One call of ``log``: the function, the name, the value, other arguments, and what a metric object then showed."""

    log: Callable[..., None]
    name: str
    value: Any
    options: dict[str, Any]
    shows: Any

    def repeat(self, value: Any, options: dict[str, Any]) -> None:
        if not isinstance(value, Metric):
            self.log(self.name, value, **options)
            return
        with replaced(value, _forward_cache=self.shows):
            self.log(self.name, value, **options)


class LogRecorder:
    """What one microbatch, or one batch of an evaluation, has logged, in order.

    ``devices``: devices on which logged values may lie. A value starts its download and blocks no thread.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self.calls: list[_Call] = []
        self._devices = devices

    def log(self, log: Callable[..., None], name: str, value: Any, **options: Any) -> None:
        """Record a call of ``log``, a method that is bound to a module."""
        with torch._C.DisableTorchFunction():
            self.calls.append(_Call(log, name, self._kept(value), options, getattr(value, "_forward_cache", None)))

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Number):
            return torch.tensor(value, dtype=torch.get_default_dtype())  # as Lightning does
        if not isinstance(value, Tensor):
            return value
        device = next((d for d in self._devices if d.torch_device == value.device), None)
        if device is None or value.device.type == "cpu":
            return value.detach().cpu().clone()
        return _Download(value, device)


class _Download:
    """A copy of a tensor on its way from ``device``, whose compute stream produces the tensor, to the host."""

    def __init__(self, tensor: Tensor, device: Device) -> None:
        with device.compute.running():
            tensor = tensor.detach().clone()
        self._host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        stream.copy(self._host, tensor)
        self._end = stream.record()

    def wait(self) -> Tensor:
        """Wait for the tensor and return it on the host, in pageable memory, as loggers may keep it."""
        self._end.wait()
        return self._host.clone()


@contextlib.contextmanager
def recorded_logs(owner: type, current: Callable[[], LogRecorder | None], results: Any = None) -> Iterator[None]:
    """Record what threads log by ``owner``, Lightning's class of modules, in ``current()``, their recorder, if any.

    A bound method that user code has kept from before reaches ``results``, the loop's ``trainer._results``.
    """
    own: Callable[..., None] = owner.log  # type: ignore[attr-defined]
    signature = inspect.signature(own)

    @functools.wraps(own)
    def log(*args: Any, **kwargs: Any) -> None:
        if (recorder := current()) is None:
            return own(*args, **kwargs)
        options = signature.bind(*args, **kwargs).arguments
        recorder.log(functools.partial(own, options.pop("self")), **options)

    def log_result(fx: str, name: str, value: Any, **options: Any) -> None:
        if (recorder := current()) is not None:
            recorder.log(functools.partial(type(results).log, results, fx), name, value, **options)

    if results is not None:
        results.log = log_result
    try:
        with replaced(owner, log=log):
            yield
    finally:
        if results is not None:
            del results.log


def repeat_logs(parts: Sequence[LogRecorder], weights: Sequence[float] = (1.0,)) -> None:
    """Log for a batch what its microbatches have logged.

    Of a batch in several parts, each value is logged once: tensors as their mean by ``weights``, metric objects, which
    have seen each part, as they are. A ``batch_size`` that each part has given is added up.
    """
    found: dict[tuple[str, int], list[tuple[float, Any, _Call]]] = {}
    for recorder, weight in zip(parts, weights, strict=True):
        seen: dict[str, int] = {}
        for call in recorder.calls:
            nth = seen[call.name] = seen.get(call.name, -1) + 1
            arrived = call.value.wait() if isinstance(call.value, _Download) else call.value
            found.setdefault((call.name, nth), []).append((weight, arrived, call))
    for calls in found.values():
        (*_, (_, value, call)) = calls
        options = call.options
        if len(calls) > 1:
            sizes = [other.options.get("batch_size") for *_, other in calls]
            options = {**options, "batch_size": None if None in sizes else sum(sizes)}
            if isinstance(value, Tensor):
                value = weighted_mean([v for _, v, _ in calls], [w for w, *_ in calls])
        call.repeat(value, options)
