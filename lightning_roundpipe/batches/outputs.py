"""What ``training_step`` has returned for the parts of a batch, as one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_roundpipe.batches.weights import weighted_mean
from lightning_roundpipe.config import RoundPipeError


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what ``training_step`` returned. None if there is none; Lightning reports what is wrong then.

    Raises:
        RoundPipeError: if the loss is not one real number in a tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        if isinstance(output, Mapping) and loss is not None:
            raise RoundPipeError(
                f"training_step returned 'loss' as a {type(loss).__name__}: return the tensor, without .item()."
            )
        return None
    if loss.numel() != 1 or loss.is_complex():
        raise RoundPipeError(
            f"training_step returned a loss of shape {tuple(loss.shape)} and {loss.dtype}; it must be one real number "
            "(take its mean)."
        )
    return loss


def detached(output: Any) -> Any:
    """Return what ``training_step`` returned, detached. It stays on its device: a copy would wait for the forward."""
    return apply_to_collection(output, Tensor, Tensor.detach, allow_frozen=True)


def joined_loss(losses: Sequence[Tensor], weights: Sequence[float], *, adds: bool) -> Tensor:
    """Return the loss of a batch from those of its parts: their mean by ``weights``, or their sum."""
    losses = [loss.detach().cpu() for loss in losses]
    return torch.stack(losses).sum(0) if adds and len(losses) > 1 else weighted_mean(losses, weights)


def joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Return the output of a batch, apart from its loss, on the host.

    In a mapping, tensors with a row for each sample are joined. Of everything else, the last part's value is kept.

    Args:
        outputs: what ``training_step`` returned for each part, detached.
        samples: samples of each part.
    """
    outputs = [apply_to_collection(output, Tensor, Tensor.cpu, allow_frozen=True) for output in outputs]
    last = outputs[-1]
    if len(outputs) == 1 or not isinstance(last, Mapping):
        return last
    result = dict(last)
    for key in result:
        values: list[Any] = [output.get(key) if isinstance(output, Mapping) else None for output in outputs]
        if all(isinstance(v, Tensor) and v.ndim and len(v) == n for v, n in zip(values, samples, strict=True)):
            result[key] = torch.cat(values)
    return result
