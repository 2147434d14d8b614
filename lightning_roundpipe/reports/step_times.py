"""Times optimizer steps on the main thread, end to end, under any strategy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class StepTimes:
    """Sums over batches, of one optimizer step or of several.

    Attributes:
        seconds: from the end of a batch to the end of the next one, without validation.
        updating_s: from the gradients to the end of the batch, which includes the optimizer's step if training waits
            for it.
        tokens: of ``input_ids``.
        samples: size of the first dimension.
        losses: of the batches, as Lightning divides them by ``accumulate_grad_batches``.
        steps: optimizer steps.
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


class StepClock:
    """Times the batches of steps. A callback calls its methods in its hooks of the same names."""

    def __init__(self, steps: int = 0) -> None:
        """``steps``: optimizer steps before the first batch."""
        self._steps = steps
        self._mark: float | None = None
        self._updating = 0.0
        self._running = StepTimes()

    def pause(self) -> None:
        """Leave out the time until the next batch begins: an epoch begins, or validation has ended."""
        self._mark = None

    def on_train_batch_start(self) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_before_optimizer_step(self) -> None:
        self._updating = time.perf_counter()

    def on_train_batch_end(self, steps: int, outputs: Any, batch: Any) -> StepTimes | None:
        """Return the step if it ends with this batch, else None. ``steps``: optimizer steps by now."""
        now = time.perf_counter()
        began, self._mark = self._mark if self._mark is not None else now, now
        running = self._running
        running.seconds += now - began
        running.updating_s += now - self._updating if self._updating > began else 0.0
        running.tokens += count_tokens(batch)
        running.samples += count_samples(batch)
        running.losses += [] if (loss := loss_in(outputs)) is None else [loss]
        if steps == self._steps:
            return None  # the window continues
        running.steps, self._steps = steps - self._steps, steps
        self._running = StepTimes()
        return running


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch with ``input_ids``; 0 for other batches."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0


def count_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 0 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    return 0 if isinstance(batch, str) else next((found for part in parts if (found := count_samples(part))), 0)


def loss_in(outputs: Any) -> Tensor | None:
    """Return the loss in what ``on_train_batch_end`` receives; None without one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
