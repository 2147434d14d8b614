"""Gradients that have travelled to the host in fewer bytes than their own dtype has.

Compiled code steps parameters of Adam and AdamW from them as they are. All else needs them widened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_roundpipe.optim.compiled import Gradient, Kept
from lightning_roundpipe.optim.split_masters import in_memory_order, pieces, scratch


class NarrowGradient:
    """The gradient of one parameter: the sum of ``parts``, each of which is multiplied by ``factor``.

    What is done to it in place is done where it is used.

    Args:
        parts: bf16 or fp16, of one shape and one stride, which is dense.
        dtype: the parameter's dtype, in which the gradient is computed.
    """

    def __init__(self, parts: Sequence[Tensor], factor: float, dtype: torch.dtype) -> None:
        self.parts, self.factor, self.dtype = list(parts), factor, dtype
        self.shape = parts[0].shape
        self._scales: list[float] = []
        self._bound = math.inf

    def mul_(self, scale: float | Tensor) -> None:
        """Multiply it, as ``Tensor.mul_`` does."""
        assert self._bound == math.inf, "products come before bounds"
        self._scales.append(float(scale))

    def clamp_(self, least: float, most: float) -> None:
        """Clip each element, as ``Tensor.clamp_`` does."""
        assert least == -most, "bounds are symmetric"
        self._bound = most

    def kept(self) -> Gradient:
        """Return it for compiled code, which needs it contiguous."""
        forms = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        parts = [Kept(forms[part.dtype], (part, 0)) for part in self.parts]
        return Gradient(parts, factor=self.factor, scales=self._scales, bound=self._bound)

    def widened(self, out: Tensor | None = None) -> Tensor:
        """Return it in its own dtype, in memory of its own or in ``out``, 1-D."""
        first, *others = map(in_memory_order, self.parts)
        total = torch.empty(first.numel(), dtype=self.dtype) if out is None else out
        for start, end in pieces(first.numel()):
            numbers = _times(total[start:end].copy_(first[start:end]), self.factor)
            for other in others:
                numbers.add_(_times(other[start:end].to(self.dtype), self.factor))
            for scale in self._scales:
                _times(numbers, scale)
            if self._bound != math.inf:
                numbers.clamp_(-self._bound, self._bound)
        return total.as_strided(self.shape, self.parts[0].stride())


AnyGradient: TypeAlias = Tensor | NarrowGradient
_WIDENED = -4
"""The number of `scratch` for gradients that are widened."""


def widened(gradient: AnyGradient) -> Tensor:
    """Return a gradient in its own dtype; a narrow one, in memory that this thread's next call overwrites."""
    return all_widened({0: gradient})[0]


def all_widened(gradients: Mapping[int, AnyGradient]) -> dict[int, Tensor]:
    """Do so with several gradients. New memory would take longer than widening does."""
    narrow = [g for g in gradients.values() if isinstance(g, NarrowGradient) and g.dtype is torch.float32]
    sizes = [gradient.shape.numel() for gradient in narrow]
    memory = dict(zip(narrow, scratch(_WIDENED, sum(sizes)).split_with_sizes(sizes), strict=True)) if narrow else {}
    return {
        key: gradient if isinstance(gradient, Tensor) else gradient.widened(memory.get(gradient))
        for key, gradient in gradients.items()
    }


def together(one: AnyGradient, other: AnyGradient) -> AnyGradient:
    """Return the sum of two gradients of a parameter, to which nothing was done yet, perhaps in the memory of one."""
    if isinstance(one, NarrowGradient) and isinstance(other, NarrowGradient):
        return NarrowGradient([*one.parts, *other.parts], one.factor, one.dtype)
    wide = one.widened() if isinstance(one, NarrowGradient) else one
    return wide.add_(widened(other))


def _times(numbers: Tensor, factor: float) -> Tensor:
    return numbers if factor == 1.0 else numbers.mul_(factor)
