"""Lets Lightning's monitors and profilers see all workers instead of one device and one thread.

``DeviceStatsMonitor`` and ``ThroughputMonitor`` assume that a process has one device, ``root_device``. The memory of
the others would never show, and the model FLOPs of all devices would be compared with the peak of one. Lightning
derives the dtype of that peak from the class of its own precision plugins, which ours is not. torch's profiler records
the thread that started it, where no layer runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_roundpipe.devices import Device

_COMPUTED_IN = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.half,
    "16-true": torch.half,
}


def tell_of_all_workers(trainer: Trainer, precision: str, workers: Sequence[Device]) -> Callable[[], object]:
    """Let Lightning's monitors see all ``workers``. Call it after the callbacks' setup.

    Args:
        trainer: its callbacks and its accelerator are changed.
        precision: Lightning's flag for the precision in which layers compute.
        workers: the strategy's devices.

    Returns:
        A function that undoes the change of the accelerator.
    """
    _rate(trainer, precision, workers)
    accelerator = trainer.accelerator
    vars(accelerator)["get_device_stats"] = _Stats(workers, accelerator.get_device_stats)
    return lambda: vars(accelerator).pop("get_device_stats", None)


def _rate(trainer: Trainer, precision: str, workers: Sequence[Device]) -> None:
    """Let ``ThroughputMonitor`` compare with the peak of all devices together. A GPU listed twice counts once."""
    rated = [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, ThroughputMonitor)]
    if not rated:
        return
    dtype = _COMPUTED_IN.get(precision, torch.float32)
    peaks = [get_available_flops(device, dtype) for device in _distinct(workers)]
    known = [peak for peak in peaks if peak is not None]
    for monitor in rated:
        monitor.available_flops = sum(known) if len(known) == len(peaks) else None
        for throughput in monitor._throughputs.values():
            throughput.available_flops = monitor.available_flops


def _distinct(workers: Sequence[Device]) -> list[torch.device]:
    return [*dict.fromkeys(worker.torch_device for worker in workers)]


def _itself(value: Any) -> Any:
    return value


class _Stats:
    """A replacement for ``get_device_stats``, which ``DeviceStatsMonitor`` logs.

    The statistics of the device that is asked for keep their names. Those of other GPUs come under ``cuda:1/...``. The
    engine's own counts, on emulated devices too, come under ``worker 0/resident_bytes`` and ``worker 0/peak_bytes``.
    A copy of a Trainer that is made while a run lasts has ``ask``, which is replaced here.
    """

    def __init__(self, workers: Sequence[Device], ask: Callable[[Any], dict[str, Any]]) -> None:
        self._workers, self._ask = workers, ask

    def __call__(self, device: Any) -> dict[str, Any]:
        found = dict(self._ask(device))
        for other in _distinct(self._workers):
            if other.type != "cpu" and other != torch.device(device):
                found |= {f"{other}/{name}": value for name, value in self._ask(other).items()}
        for worker in self._workers:
            found[f"worker {worker.index}/resident_bytes"] = worker.resident_bytes()
            found[f"worker {worker.index}/peak_bytes"] = worker.peak_bytes()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._ask,)


def profile_all_threads(module: LightningModule) -> None:
    """Let the ``PyTorchProfiler`` of the module's trainer, if there is one, record the workers' threads.

    Call it before the run's first profiled action. It keeps an ``experimental_config`` that the user has set.
    """
    profiler = getattr(module._trainer, "profiler", None)
    if isinstance(profiler, PyTorchProfiler):
        with contextlib.suppress(TypeError, AttributeError):  # older versions of torch cannot
            everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            profiler._profiler_kwargs.setdefault("experimental_config", everywhere)


def windows_left(trainer: Trainer) -> float:
    """Return how many windows the trainer will still train on; infinite if no setting says so. Its loops are set up."""
    steps, of_all = trainer.max_steps, trainer.num_training_batches
    by_steps = math.inf if steps == -1 else steps - trainer.global_step
    epochs = trainer.max_epochs
    by_epochs = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch) * of_all
    return max(0.0, min(by_steps, by_epochs / trainer.accumulate_grad_batches))
