"""Measures times, tokens, losses and memory of a run in the same way under any strategy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_roundpipe.callbacks.peak_host_memory import forget_peak, peak_bytes
from lightning_roundpipe.step_monitor import count_tokens, loss_in, step_loss


class Measurements(Callback):
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
        self._mark: float | None = None
        self._seconds = 0.0
        self._tokens = 0
        self._losses: list[Tensor] = []
        self._steps = 0
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
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now
        self._tokens += count_tokens(batch)
        self._losses += [] if (loss := loss_in(outputs)) is None else [loss]
        if trainer.global_step == self._steps:
            return  # gradients accumulate: the step continues
        self._steps = trainer.global_step
        self.step_seconds.append(self._seconds)
        self.step_tokens.append(self._tokens)
        if (mean := step_loss(self._losses, trainer.accumulate_grad_batches)) is not None:
            self.train_losses.append(mean)
            pl_module.log("step_loss", mean, prog_bar=True)
        if self._tokens:
            pl_module.log("tokens", float(self._tokens))
            pl_module.log("tokens_per_s", self._tokens / max(self._seconds, 1e-9), prog_bar=True)
        self._seconds, self._tokens, self._losses = 0.0, 0, []

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None
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
