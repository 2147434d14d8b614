"""Saves the gradients of an open accumulation window with a checkpoint.

Plain Lightning drops them: a resumed run computes the window's step from the remaining batches only. Here they are
saved with the optimizer's state, under a key that other strategies ignore, so that a resumed run is equal bit for bit
wherever the checkpoint was written. They take no memory of their own: what is saved is what training holds, or, where
it is summed over machines or divided by a loss scale, in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_roundpipe.machines.file_tensors import FileTensors
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.optimizer.gradient_exchange import GradientExchange

ACCUMULATED = "roundpipe_accumulated_gradients"

WINDOW = "roundpipe_accumulate_grad_batches"
"""Key of the number of batches in the window. It is there if the gradients are."""


def is_open(trainer: Trainer) -> bool:
    """Return whether gradients were accumulated that no optimizer step has used yet."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    ended = progress.is_last_batch and batches.processed == batches.ready
    return bool(batches.processed % trainer.accumulate_grad_batches) and not ended


def save(
    checkpoint: dict[str, Any],
    module: LightningModule,
    updates: AsyncOptimizer | None,
    scale: float = 1.0,
    room: FileTensors | None = None,
    exchange: GradientExchange | None = None,
) -> None:
    """Add the gradients of an open window to ``checkpoint``, if there is one and it holds optimizer state.

    Args:
        checkpoint: what Lightning is about to save.
        module: the module in training. None of its batches may be in progress.
        updates: the optimizer that accumulates gradients; None if they are in ``.grad``.
        scale: the loss scale, by which gradients are divided. A power of two changes no bit.
        room: where there is room for gradients that differ from those in memory; None: in memory.
        exchange: sums gradients over several machines, of which the first one writes ``checkpoint``.
    """
    if "optimizer_states" not in checkpoint or not is_open(module.trainer):
        return

    def copied(gradient: Tensor) -> Tensor:
        return gradient.clone() if room is None else room.empty(gradient.shape, gradient.dtype).copy_(gradient)

    named = dict(module.named_parameters())
    held = updates.accumulated() if updates is not None else {id(p): p.grad for p in named.values()}
    kept = {key: gradient for key, gradient in held.items() if gradient is not None}
    if exchange is not None:
        kept = dict(exchange.summed(kept, 0, copied))
    elif scale != 1.0:
        kept = {key: copied(gradient) for key, gradient in kept.items()}
    for gradient in kept.values() if scale != 1.0 else ():
        gradient.div_(scale)
    checkpoint[ACCUMULATED] = {name: kept[id(p)] for name, p in named.items() if id(p) in kept}
    checkpoint[WINDOW] = module.trainer.accumulate_grad_batches


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
