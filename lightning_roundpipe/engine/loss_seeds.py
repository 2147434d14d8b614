"""The gradient with which the backward of a loss begins."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def seed_of(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seed of a loss's backward, and the factor by which its gradients are multiplied when summed.

    Their product is ``scale``. In half precision, of the loss or of the gradients behind it, a seed such as 1/3 would
    be rounded, so the seed is a power of two.
    """
    if not scale or dtype not in (torch.bfloat16, torch.float16):
        return scale, 1.0
    rest, exponent = math.frexp(scale)
    return (math.ldexp(1.0, exponent - 1), 1.0) if rest == 0.5 else (math.ldexp(1.0, exponent), rest)


def filled_like(loss: Tensor, seed: float) -> Tensor:
    """Return a tensor of ``seed`` for the backward of ``loss``; infinity where the format does not reach so far."""
    return torch.full_like(loss, seed, dtype=torch.float64).to(loss.dtype)  # in fp16, CUDA refuses to fill with 2**17
