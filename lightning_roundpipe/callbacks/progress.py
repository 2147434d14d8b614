"""Progress for `roundpipe-train`: Lightning's bar on a terminal, a line per step elsewhere.

A bar that redraws itself suits a terminal, but not a file or a CI log.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich import get_console
from typing_extensions import override

_LINES = 50
"""Rough limit on the lines of a run."""


def progress_bar() -> ProgressBar:
    """Return the bar for standard output: Lightning's rich one on a terminal, else ``ProgressLines``."""
    return RichProgressBar() if sys.stdout.isatty() else ProgressLines()


class ProgressLines(ProgressBar):
    """One line per step, for output to files: ``Training   4/14  0:00:21  loss 2.743  tokens/s 412``."""

    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._steps = 0

    @override
    def disable(self) -> None:
        """Do nothing: steps of training alone have lines, and the first process alone prints them."""

    @override
    def enable(self) -> None:
        """Do nothing; see ``disable``."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._steps = time.monotonic(), trainer.global_step  # a resumed run has steps already

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done, total = trainer.global_step, trainer.estimated_stepping_batches
        if done == self._steps or not trainer.is_global_zero:
            return  # the step continues with the next batch
        self._steps = done
        every = max(1, int(total) // _LINES) if total != float("inf") else 1
        if done % every and done != total:
            return
        logged = trainer.progress_bar_metrics
        elapsed = timedelta(seconds=int(time.monotonic() - self._started))
        line = f"Training   {done:>{len(str(total))}}/{total}  {elapsed}"
        if (loss := logged.get("step_loss", logged.get("train_loss"))) is not None:
            line += f"  loss {float(loss):.3f}"
        if "tokens_per_s" in logged:
            line += f"  tokens/s {float(logged['tokens_per_s']):,.0f}"
        get_console().print(line, markup=False, highlight=False, soft_wrap=True)
