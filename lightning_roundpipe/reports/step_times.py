"""Times optimizer steps on the main thread, end to end, under any strategy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_roundpipe.batches.cutting import samples_in


@dataclass
class StepTimes:
    """Sums over batches, of one optimizer step or of several.

    ``seconds`` go from the end of a batch to the end of the next one, without validation; ``updating_s`` from the
    gradients to the end of the batch, with the optimizer's step if training waits for it. ``tokens`` are those of
    ``input_ids``, ``losses`` as Lightning divides them by ``accumulate_grad_batches``.
    """

    seconds: float = 0.0
    updating_s: float = 0.0
    tokens: int = 0
    samples: int = 0
    losses: list[Tensor] = field(default_factory=list)
    steps: int = 0

    def add(self, other: StepTimes) -> None:
        self.seconds += other.seconds
        self.updating_s += other.updating_s
        self.tokens += other.tokens
        self.samples += other.samples
        self.steps += other.steps

    def loss(self, accumulated: int) -> float | None:
        """Return the mean loss of the batches; None without one. ``accumulated``: what Lightning divides them by."""
        return accumulated * sum(map(float, self.losses)) / len(self.losses) if self.losses else None


class TimedSteps(Callback):
    """Times the batches of steps, and gives each step that ends to `on_step`. Validation and pauses do not count."""

    roundpipe_passive_hooks = True

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: StepTimes) -> None:
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        self._mark: float | None = None
        """When the last batch ended; None until the next one begins."""
        self._updating = 0.0
        self._running = StepTimes()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._updating = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, running = time.perf_counter(), self._running
        began, self._mark = self._mark if self._mark is not None else now, now
        running.seconds += now - began
        running.updating_s += now - self._updating if self._updating > began else 0.0
        running.tokens += count_tokens(batch)
        running.samples += samples_in(batch)
        running.losses += [] if (loss := loss_in(outputs)) is None else [loss]
        if trainer.global_step != self._steps:  # otherwise the window continues
            running.steps, self._steps = trainer.global_step - self._steps, trainer.global_step
            self._running = StepTimes()
            self.on_step(trainer, pl_module, running)


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch with ``input_ids``; 0 for other batches."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0


def loss_in(outputs: Any) -> Tensor | None:
    """Return the loss in what ``on_train_batch_end`` receives; None without one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
