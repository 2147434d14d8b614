"""fp32 numbers kept as the bf16 numbers that they round to, and what these lack.

A bf16 number has the upper half of an fp32 number's bits. So an fp32 number is the bf16 number that it rounds to, to
nearest even, and a signed difference of 16 bits::

    bits(fp32) = (bits(bf16) << 16) + low        -32768 <= low <= 32767

Four bytes hold both the master and the working copy that is uploaded. One number in 131,072 has no such difference: it
lies halfway between two bf16 numbers and rounds towards zero, which is 32768 below it. It is kept as its neighbour, one
unit in the last place of fp32 nearer to zero.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.optim.compiled import Kept, convert

PIECE = 2**18
"""Numbers that a thread of torch converts at a time: few enough to stay in caches, and many beside a call's cost."""
_LARGEST = 2**15 - 1

_scratch = threading.local()


def piece() -> int:
    """Return how many numbers to convert at a time on the calling thread."""
    return PIECE * torch.get_num_threads()


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of pieces of ``length`` numbers."""
    step = piece()
    for start in range(0, length, step):
        yield start, min(start + step, length)


def scratch(index: int, length: int) -> Tensor:
    """Return fp32 memory of ``length`` numbers for the calling thread, the same at each call with ``index``."""
    known: dict[int, Tensor] = vars(_scratch).setdefault("tensors", {})
    if index not in known or known[index].numel() < length:
        known[index] = torch.empty(length, dtype=torch.float32)
    return known[index][:length]


class SplitTensor(NamedTuple):
    """The memory of an fp32 tensor, in memory order.

    Attributes:
        high: the bf16 numbers, 1-D.
        low: what they lack, int16, 1-D.
    """

    high: Tensor
    low: Tensor

    def kept(self, start: int) -> Kept:
        """Return the numbers from ``start`` on."""
        return Kept("halves", (self.high, start), (self.low, start))

    def join(self, start: int, end: int, out: Tensor) -> Tensor:
        """Write numbers ``start`` to ``end`` to ``out``, fp32, and return it."""
        if not convert(self.kept(start), out):
            low = scratch(-1, end - start).view(torch.int32).copy_(self.low[start:end])
            out.copy_(self.high[start:end]).view(torch.int32).add_(low)  # of one dtype, or torch adds number by number
        return out

    def split(self, start: int, end: int, numbers: Tensor) -> None:
        """Keep the fp32 ``numbers`` as numbers ``start`` to ``end``."""
        if convert(self.kept(start), numbers, stores=True):
            return
        rounded = scratch(-1, end - start)
        high = self.high[start:end]
        high.copy_(numbers)
        rounded.copy_(high)
        low = rounded.view(torch.int32)
        torch.sub(numbers.view(torch.int32), low, out=low)
        self.low[start:end].copy_(low.clamp_(max=_LARGEST))

    def join_all(self, out: Tensor) -> Tensor:
        """Write all numbers to ``out``, fp32 and 1-D, and return it."""
        for start, end in pieces(self.high.numel()):
            self.join(start, end, out[start:end])
        return out

    def joined_like(self, tensor: Tensor) -> Tensor:
        """Return all numbers as a contiguous fp32 tensor of the shape of ``tensor``."""
        return self.join_all(torch.empty(self.high.numel(), dtype=torch.float32)).view(tensor.shape)

    def joined(self) -> Tensor:
        """Return all numbers, fp32 and 1-D, on the device of the halves."""
        return self.high.float().view(torch.int32).add_(self.low).view(torch.float32)

    @classmethod
    def of(cls, numbers: Tensor) -> SplitTensor:
        """Return the halves of fp32 ``numbers``, 1-D, on their device."""
        high = numbers.bfloat16()
        low = numbers.view(torch.int32) - high.float().view(torch.int32)
        return cls(high, low.clamp_(max=_LARGEST).to(torch.int16))

    def split_all(self, numbers: Tensor) -> None:
        """Keep the fp32 ``numbers``, 1-D."""
        for start, end in pieces(self.high.numel()):
            self.split(start, end, numbers[start:end])


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the numbers of a dense tensor, 1-D, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
