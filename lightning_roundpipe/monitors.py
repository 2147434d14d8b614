"""Lets Lightning's monitors and profilers see all workers instead of one device and one thread.

``DeviceStatsMonitor`` and ``ThroughputMonitor`` assume that a process has one device, ``root_device``. The memory of
the others would never show, and the model FLOPs of all devices would be compared with the peak of one. Lightning
derives the dtype of that peak from the class of its own precision plugins, which ours is not. torch's profiler records
the thread that started it, where no layer runs.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import Dataset

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.user_code.left_behind import Namespace

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


class _SilentLogger(DummyLogger):
    """Does nothing but to say, by calling ``told``, that user code logs with the logger itself."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    @property
    def experiment(self) -> Any:
        self._told()
        return super().experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._told()

    def __getattr__(self, name: str) -> Any:
        return self.log_metrics if name.startswith("log_") and name != "log_dir" else super().__getattr__(name)


@contextlib.contextmanager
def rehearsing(trainer: Trainer, told: Callable[[], None]) -> Iterator[list[tuple[str, Any]]]:
    """Silence the trainer's loggers while ``training_step`` is rehearsed; ``told`` is called if it calls one itself.

    Yields:
        What else the rehearsal might change, by name: schedulers, the settings of optimizers, users' callbacks, the
        data module, data sets, and the trainer's own attributes.
    """
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    others: list[tuple[str, Any]] = [(type(scheduler).__name__, scheduler) for scheduler in schedulers]
    for number, optimizer in enumerate(trainer.optimizers):
        others += [(f"optimizer {number}", group) for group in optimizer.param_groups]
    around = {f"trainer.callbacks[{i}]": callback for i, callback in enumerate(vars(trainer)["callbacks"])}
    around["trainer.datamodule"] = vars(trainer).get("datamodule")
    around |= {f"data set {i}": data_set for i, data_set in enumerate(_data_sets(trainer))}
    others += [(name, value) for name, value in around.items() if value is not None and not _has_thread(value)]
    others.append(("trainer.", Namespace(vars(trainer), without=("callbacks", "datamodule"))))
    groups = [(optimizer.param_groups, list(optimizer.param_groups)) for optimizer in trainer.optimizers]
    loggers = trainer.loggers
    trainer.loggers = [_SilentLogger(told) for _ in loggers]
    try:
        yield others
    finally:
        trainer.loggers = loggers
        parameters = set(map(id, trainer.lightning_module.parameters()))
        for now, before in groups:  # what training_step registers is gone again, and the step registers another one
            now[:] = [x for x in now if any(x is y for y in before) or parameters.issuperset(map(id, x["params"]))]


def _data_sets(trainer: Trainer) -> Iterator[Any]:
    """Yield the users' data sets that are trained on; torch's own, such as a ``Subset``, are looked through."""
    combined = trainer.fit_loop._combined_loader
    for source in [] if combined is None else combined.flattened:
        found: Any = getattr(source, "dataset", None)
        while type(found).__module__.startswith("torch.") and hasattr(found, "dataset"):
            found = found.dataset
        if isinstance(found, Dataset) and not type(found).__module__.startswith("torch."):
            yield found


def _has_thread(value: Any) -> bool:
    """Return whether ``value`` may change on a thread of its own, which no rehearsal is the cause of."""
    return any(isinstance(held, threading.Thread) for held in getattr(value, "__dict__", {}).values())


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the numbers among the settings of optimizers and schedulers, by name."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    held = [(f"group {number} of the optimizers", group) for number, group in enumerate(groups)]
    held += [(type(config.scheduler).__name__, vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
    return {
        f"{name}[{key!r}]": value
        for name, settings in held
        for key, value in settings.items()
        if isinstance(value, (int, float, tuple))
    }


def batches_left(trainer: Trainer) -> float:
    """Return on how many batches the trainer will still train; infinite if no setting says so. Its loops are set up."""
    steps, of_all = trainer.max_steps, trainer.num_training_batches
    by_steps = math.inf if steps == -1 else (steps - trainer.global_step) * trainer.accumulate_grad_batches
    epochs = trainer.max_epochs
    by_epochs = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch) * of_all
    return max(0.0, min(by_steps, by_epochs))
