"""What ``training_step`` has returned for the parts of a batch, as one output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
    return _mapped(Tensor.detach, output)


def _mapped(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, Mapping):
        return {k: _mapped(function, v) for k, v in output.items()}
    if isinstance(output, (list, tuple)) and type(output) in (list, tuple):
        return type(output)(_mapped(function, v) for v in output)
    return output


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
    outputs = [_mapped(Tensor.cpu, output) for output in outputs]
    last = outputs[-1]
    if len(outputs) == 1 or not isinstance(last, Mapping):
        return last
    result = dict(last)
    for key in result:
        values: list[Any] = [output.get(key) if isinstance(output, Mapping) else None for output in outputs]
        if all(isinstance(v, Tensor) and v.ndim and len(v) == n for v, n in zip(values, samples, strict=True)):
            result[key] = torch.cat(values)
    return result
