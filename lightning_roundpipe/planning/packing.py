"""Weights in four or eight bits: what each of them takes in memory, and what its dequantised copies cost.

A packed weight travels and lies in memory as it is. Products read a copy in the format that layers compute in, which is
made for each of them: in forward, in recomputation, and in backward for the gradient of the inputs. The weights of all
experts are one weight. Sizes are those of bitsandbytes: blocks of 64 weights in four bits have a scale each, rows in
eight bits likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PackedFormat = Literal["nf4", "fp4", "int8"]

BLOCK = 64
"""Weights of four bits that share a scale."""
_SCALES = 256
"""Scales of eight bits that share a scale."""
_FP32 = 4


@dataclass(frozen=True)
class Packed:
    """A weight in few bits.

    Args:
        parts: bytes of each tensor that belongs to it.
        kernels: operations that dequantise it.
        views: operations of the interpreter that come with these and compute nothing.
        scratch_bytes: memory traffic of dequantising it, beside reading ``parts`` and writing the copy.
        buffer_bytes: that dequantising it takes beside the copy.
        kept: whether a stage may keep the copy. GPUs multiply in eight bits, and forward makes none.
    """

    parts: tuple[int, ...]
    kernels: int
    views: int
    scratch_bytes: int = 0
    buffer_bytes: int = 0
    kept: bool = True

    @property
    def nbytes(self) -> int:
        return sum(self.parts)


def pack(shape: Sequence[int], form: PackedFormat, double: bool, copy_itemsize: int) -> Packed:
    """The packed weight of a matrix, or of the matrices of all experts, the first of three dimensions.

    Args:
        shape: of the weight.
        form: the format.
        double: whether the scales of four-bit weights are in eight bits themselves.
        copy_itemsize: bytes of a number of the copies.
    """
    numbers = math.prod(shape)
    if form == "int8":
        scratch = 2 * numbers * copy_itemsize  # the copy is written unscaled, then read and written once more
        return Packed((numbers, _FP32 * (numbers // shape[-1])), kernels=3, views=2, scratch_bytes=scratch, kept=False)
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
