"""Measures times, tokens, losses and memory of a run in the same way under any strategy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_roundpipe.devices.host_memory import forget_peak, peak_bytes
from lightning_roundpipe.reports.step_times import StepTimes, TimedSteps


class Measurements(TimedSteps):
    """Measures optimizer steps end to end, from the end of one to the end of the next, without validation in between.

    Logs ``step_loss`` (the mean loss of the step's batches), ``tokens`` and ``tokens_per_s`` of each step, for the
    progress bar, too. Put it before callbacks that show or save logged values.
    """

    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.step_tokens: list[int] = []
        self.train_losses: list[float] = []
        """Mean loss of the batches of each step."""
        self.val_losses: dict[int, float] = {}
        """Validation loss by the number of optimizer steps before it."""
        self.peak_host_bytes = 0
        forget_peak()

    @property
    def step_time_s(self) -> float | None:
        """The median step time. Without the first step if there are more: strategies measure in it."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds) if self.step_seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on per second, without the first step if there are more."""
        seconds = sum(self.step_seconds[1:] or self.step_seconds)
        return sum(self.step_tokens[1:] or self.step_tokens) / seconds if seconds else None

    @override
    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: StepTimes) -> None:
        self.step_seconds.append(step.seconds)
        self.step_tokens.append(step.tokens)
        if (mean := step.loss(trainer.accumulate_grad_batches)) is not None:
            self.train_losses.append(mean)
            pl_module.log("step_loss", mean, prog_bar=True)
        if step.tokens:
            pl_module.log("tokens", float(step.tokens))
            pl_module.log("tokens_per_s", step.tokens / max(step.seconds, 1e-9), prog_bar=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if "val_loss" in trainer.callback_metrics and not trainer.sanity_checking:
            self.val_losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.peak_host_bytes = peak_bytes()


def peak_device_bytes(report: Mapping[str, Any]) -> list[int]:
    """Return the peak memory of each device: the strategy's report, else CUDA's count; empty without both."""
    if reported := report.get("peak_device_bytes"):
        return [int(peak) for peak in reported]
    if torch.cuda.is_available():
        return [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
    return []
