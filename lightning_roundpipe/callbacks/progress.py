"""Progress bars that show the loss and tokens per second, on terminals and elsewhere.

A bar that redraws itself suits a terminal, but not a file or a CI log. There, a line per step is printed instead.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomBarColumn,
    CustomTimeColumn,
)
from rich import get_console
from rich.progress import TextColumn
from typing_extensions import override

_LINES = 50
"""Rough limit on the lines per stage."""


def progress_bar() -> ProgressBar:
    """Return the bar for standard output: ``ProgressRich`` on a terminal, else ``ProgressLines``."""
    return ProgressRich() if sys.stdout.isatty() else ProgressLines()


def shown_metrics(trainer: Trainer) -> dict[str, str]:
    """Return loss and speed under short names, so that a bar with them fits into 80 columns."""
    logged = trainer.progress_bar_metrics
    shown = {}
    if (loss := logged.get("step_loss", logged.get("train_loss"))) is not None:
        shown["loss"] = f"{float(loss):.3f}"
    if "tokens_per_s" in logged:
        shown["tokens/s"] = f"{float(logged['tokens_per_s']):,.0f}"
    return shown


class ProgressRich(RichProgressBar):
    """Lightning's rich bar in 80 columns, over all optimizer steps, with the loss and tokens per second."""

    roundpipe_passive_hooks = True

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return dict(shown_metrics(trainer))

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        return [
            TextColumn("{task.description}"),
            CustomBarColumn(
                bar_width=16,
                complete_style=self.theme.progress_bar,
                finished_style=self.theme.progress_bar_finished,
                pulse_style=self.theme.progress_bar_pulse,
            ),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            CustomTimeColumn(style=self.theme.time),
        ]

    @property
    @override
    def total_train_batches(self) -> int | float:
        return self.trainer.estimated_stepping_batches

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.train_progress_bar_id is None:  # otherwise each epoch would reset its clock
            super().on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._update(self.train_progress_bar_id, trainer.global_step)

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"


class ProgressLines(ProgressBar):
    """One line per step, for output to files: ``Training [##......]  4/14  0:00:21  loss 2.743  tokens/s 412``."""

    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._started = time.monotonic()
        self._stage_started = self._started
        self._steps = 0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:
            return  # the step continues with the next batch
        self._steps = trainer.global_step
        metrics = shown_metrics(trainer)
        text = "".join(f"  {name} {metrics[name]}" for name in ("loss", "tokens/s") if name in metrics)
        self._print("Training", trainer.global_step, trainer.estimated_stepping_batches, self._started, text)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stage_started = time.monotonic()

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.has_dataloader_changed(dataloader_idx)  # needed by total_val_batches_current_dataloader

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reset_dataloader_idx_tracker()

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        total = self.total_val_batches_current_dataloader
        if batch_idx + 1 == total and not trainer.sanity_checking:
            self._print("Validation", batch_idx + 1, total, self._stage_started, "")

    def _print(self, stage: str, done: int, total: int | float, started: float, text: str) -> None:
        every = max(1, int(total) // _LINES) if total != float("inf") else 1
        if not self._enabled or (done % every and done != total):
            return
        filled = round(16 * min(1.0, done / max(1, total)))
        elapsed = timedelta(seconds=int(time.monotonic() - started))
        bar = f"[{'#' * filled}{'.' * (16 - filled)}]"
        line = f"{stage:10} {bar} {done:>{len(str(total))}}/{total}  {elapsed}{text}"
        get_console().print(line, markup=False, highlight=False, soft_wrap=True)
