"""Memory of weights in four or eight bits, and the cost of their dequantised copies.

A packed weight stays packed in memory and on links. Each product reads a copy in the compute dtype, which is made for
it: in forward, in recomputation, and in backward for the gradient of the inputs. The weights of all experts count as
one weight. Sizes are those of bitsandbytes: a scale for each block of 64 weights in four bits, or for each row in eight
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PackedFormat = Literal["nf4", "fp4", "int8"]

BLOCK = 64
"""Number of four-bit weights that share a scale."""
_SCALES = 256
"""Number of eight-bit scales that share a scale of their own."""
_FP32 = 4


@dataclass(frozen=True)
class Packed:
    """A packed weight.

    Args:
        parts: bytes of each tensor that belongs to it.
        kernels: operations that dequantise it.
        views: operations of the interpreter that come with these and compute nothing.
        scratch_bytes: memory traffic of dequantising it, beside reading ``parts`` and writing the copy.
        buffer_bytes: that dequantising it takes beside the copy.
        kept: whether a stage may keep the copy, for all its microbatches. Those of eight bits are made for each use.
    """

    parts: tuple[int, ...]
    kernels: int
    views: int
    scratch_bytes: int = 0
    buffer_bytes: int = 0
    kept: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(self.parts)


def pack(shape: Sequence[int], form: PackedFormat, double: bool, copy_itemsize: int) -> Packed:
    """Return the packed form of a weight.

    Args:
        shape: shape of the weight, (rows, columns) or (experts, rows, columns).
        form: packed format.
        double: whether the scales of four-bit weights are quantised to eight bits.
        copy_itemsize: bytes of an element of the dequantised copies.
    """
    numbers = math.prod(shape)
    if form == "int8":
        scratch = 2 * numbers * copy_itemsize  # the copy is written unscaled, then read and written once more
        parts = (numbers, _FP32 * (numbers // shape[-1]))
        return Packed(parts, kernels=3, views=2, scratch_bytes=scratch, kept=False)
    data, scales, table = -(-numbers // 2), -(-numbers // BLOCK), 16 * _FP32
    if not double:
        return Packed((data, _FP32 * scales, table), kernels=1, views=3)
    return Packed(
        (data, scales, table, _FP32 * -(-scales // _SCALES), 256 * _FP32, _FP32),
        kernels=3,
        views=3 if len(shape) == 2 else 5,
        scratch_bytes=4 * _FP32 * scales,  # written, read and written with their mean, and read
        buffer_bytes=_FP32 * scales,
    )
