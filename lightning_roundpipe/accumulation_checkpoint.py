"""Saves the gradients of an open accumulation window with a checkpoint.

Plain Lightning drops them: a resumed run computes the window's step from the remaining batches only. Here they are
saved with the optimizer's state, under a key that other strategies ignore, so that a resumed run is equal bit for bit
wherever the checkpoint was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer

ACCUMULATED = "roundpipe_accumulated_gradients"


def is_open(trainer: Trainer) -> bool:
    """Return whether gradients were accumulated that no optimizer step has used yet."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    ended = progress.is_last_batch and batches.processed == batches.ready
    return bool(batches.processed % trainer.accumulate_grad_batches) and not ended


def save(
    checkpoint: dict[str, Any], module: LightningModule, updates: AsyncOptimizer | None, scale: float = 1.0
) -> None:
    """Add the gradients of an open window to ``checkpoint``, if there is one and it holds optimizer state.

    Args:
        checkpoint: what Lightning is about to save.
        module: the module in training. None of its batches may be in progress.
        updates: the optimizer that accumulates gradients; None if they are in ``.grad``.
        scale: the loss scale, by which gradients are divided. A power of two changes no bit.
    """
    if "optimizer_states" not in checkpoint or not is_open(module.trainer):
        return
    named = dict(module.named_parameters())
    held = updates.accumulated() if updates is not None else {id(p): p.grad for p in named.values()}
    kept = {name: gradient for name, p in named.items() if (gradient := held.get(id(p))) is not None}
    checkpoint[ACCUMULATED] = kept if scale == 1.0 else {name: gradient / scale for name, gradient in kept.items()}


def restore(
    gradients: Mapping[str, Tensor], module: LightningModule, updates: AsyncOptimizer | None, scale: float = 1.0
) -> None:
    """Continue an accumulation window with ``gradients`` by parameter name. Other gradients stay as they are."""
    if scale != 1.0:
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
    named = {name: p for name, p in module.named_parameters() if name in gradients}
    if updates is not None:
        updates.go_on({id(p): gradients[name] for name, p in named.items()})
        return
    for name, parameter in named.items():
        parameter.grad = gradients[name].to(parameter)
