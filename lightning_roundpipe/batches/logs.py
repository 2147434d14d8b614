"""``self.log`` on the threads of microbatches: recorded, and repeated when Lightning's loop comes to the batch.

`LightningModule.log` checks its arguments and hands the value to the results of the running loop. While a window runs,
the results record what a microbatch hands them; the loop's thread then hands it to them again, batch by batch, in the
same order and under the same hook. Values are copies, as user code may write to a tensor that it has logged.

``trainer._results`` and the signature of its ``log`` are private names of Lightning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.batches.weights import weighted_mean
from lightning_roundpipe.devices import Device

Value = Any
"""What is logged: a tensor, a `torchmetrics.Metric`."""


class LogRecorder:
    """What one microbatch has logged, in order.

    Args:
        devices: devices on which logged values may lie. A value starts its download and blocks no thread.

    Attributes:
        calls: the arguments of ``results.log``: hook, name, value, and those by name.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self.calls: list[tuple[str, str, Value, dict[str, Any]]] = []
        self._devices = devices

    def log(self, fx: str, name: str, value: Value, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            self.calls.append((fx, name, self._kept(value), kwargs))

    def _kept(self, value: Value) -> Value:
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
def recorded_logs(trainer: Any, current: Callable[[], LogRecorder]) -> Iterator[None]:
    """Send what threads log to ``current()``, the recorder of the calling microbatch."""
    results = None if trainer is None else trainer._results
    if results is None:
        yield
        return

    def record(fx: str, name: str, value: Value, **kwargs: Any) -> None:
        current().log(fx, name, value, **kwargs)

    results.log = record
    try:
        yield
    finally:
        del results.log


def repeat_logs(trainer: Any, parts: Sequence[LogRecorder], weights: Sequence[float]) -> None:
    """Log for a batch what its microbatches have logged.

    Of a batch in several parts, each value is logged once: tensors as their mean by ``weights``, metric objects, which
    have seen each part, as they are. A ``batch_size`` that each part has given is added up.
    """
    results = None if trainer is None else trainer._results
    if results is None:
        return
    found: dict[tuple[str, str, int], list[tuple[float, Value, dict[str, Any]]]] = {}
    for recorder, weight in zip(parts, weights, strict=True):
        seen: dict[tuple[str, str], int] = {}
        for fx, name, value, kwargs in recorder.calls:
            nth = seen[fx, name] = seen.get((fx, name), -1) + 1
            arrived = value.wait() if isinstance(value, _Download) else value
            found.setdefault((fx, name, nth), []).append((weight, arrived, kwargs))
    for (fx, name, _), said in found.items():
        (*_, (_, value, kwargs)) = said
        if len(said) > 1:
            sizes = [given["batch_size"] for _, _, given in said]
            kwargs = {**kwargs, "batch_size": None if None in sizes else sum(sizes)}
            if not isinstance(value, Metric):
                value = weighted_mean([v for _, v, _ in said], [w for w, _, _ in said])
        results.log(fx, name, value, **kwargs)
        trainer._logger_connector._current_fx = fx
