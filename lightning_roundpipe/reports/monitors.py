"""What a run takes from Lightning's Trainer beside its callbacks: its profiler, length and clipping."""

from __future__ import annotations

import contextlib
import math

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import GradClipAlgorithmType


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


def clips_by_norm(trainer: Trainer) -> bool:
    """Return whether the trainer clips gradients by their common norm."""
    algorithm = trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM  # Lightning's default
    return bool(trainer.gradient_clip_val) and GradClipAlgorithmType(algorithm) is GradClipAlgorithmType.NORM
