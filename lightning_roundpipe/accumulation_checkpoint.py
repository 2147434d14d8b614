"""Gradients of an accumulation window that a checkpoint falls into.

Plain Lightning forgets them: the resumed run makes the window's step of the batches that are left. Here they are saved
with the optimizer's state, under a key of ours that other strategies do not look at, so that resuming continues bit for
bit wherever the checkpoint was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer

ACCUMULATED = "roundpipe_accumulated_gradients"


def is_open(trainer: Trainer) -> bool:
    """Whether batches were accumulated that no optimizer step has used yet."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    ended = progress.is_last_batch and batches.processed == batches.ready
    return bool(batches.processed % trainer.accumulate_grad_batches) and not ended


def save(
    checkpoint: dict[str, Any], module: LightningModule, updates: AsyncOptimizer | None, scale: float = 1.0
) -> None:
    """Put the gradients of an open window into ``checkpoint``, if there is one and it holds optimizer state.

    Args:
        module: that trains; nothing is on its way.
        updates: where gradients are accumulated; None: in ``.grad``.
        scale: what they were multiplied by. They are saved without, and by a power of two this changes no bit.
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
    """Go on with ``gradients``, by parameter name, where the run that saved them was. Others stay as they are."""
    if scale != 1.0:
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
    named = {name: p for name, p in module.named_parameters() if name in gradients}
    if updates is not None:
        updates.go_on({id(p): gradients[name] for name, p in named.items()})
        return
    for name, parameter in named.items():
        parameter.grad = gradients[name].to(parameter)
