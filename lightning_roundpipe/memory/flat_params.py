"""Where parameters lie in flat memory: one after another, each aligned; and who else holds their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParamSlice:
    """The place of one parameter, or another tensor, in a flat buffer (uint8, 1-D)."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def bytes_of(self, flat: Tensor) -> Tensor:
        """Return its bytes in ``flat``."""
        return flat[self.offset : self.offset + self.nbytes]

    def view(self, flat: Tensor) -> Tensor:
        """Return the view into ``flat`` that has its shape, strides and dtype."""
        typed = self.bytes_of(flat).view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def segment_of(tensor: Tensor, offset: int, dtype: torch.dtype | None = None) -> ParamSlice:
    span = 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True))
    dense = torch._debug_has_internal_overlap(tensor) == 0 and span == tensor.numel()
    stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    dtype = dtype or tensor.dtype
    return ParamSlice(offset, tensor.numel() * dtype.itemsize, tensor.shape, tuple(stride), dtype)


def in_a_row(tensors: list[nn.Parameter], dtypes: list[torch.dtype]) -> tuple[tuple[ParamSlice, ...], int]:
    """Lay out the tensors one after another; return their slices and the bytes that they take."""
    segments, offset = [], 0
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        segments.append(segment_of(tensor, offset, dtype))
        offset += aligned(segments[-1].nbytes)
    return tuple(segments), offset


def size_of(segments: Iterable[ParamSlice]) -> int:
    """Return the bytes that slices in a row take."""
    return sum(aligned(segment.nbytes) for segment in segments)


def holders(tensor: Tensor) -> int:
    """Return how many tensors hold the storage of ``tensor``, counting views such as a ``.grad``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = holders(torch.empty(1))
"""`holders` of a tensor that shares its storage with no other tensor."""


def with_own_storage(segment: ParamSlice, flat: Tensor) -> Tensor:
    """Return the parameter's view into ``flat`` as a tensor whose storage ends where the parameter does.

    Saving or copying a tensor takes its whole storage, and a checkpoint of one weight must not contain its whole layer.
    It is no view in autograd's sense, whose base would hold the storage, too (`holders`).
    """
    if not segment.nbytes:
        return segment.view(flat)
    part = torch.frombuffer(flat.numpy(), dtype=torch.uint8, count=segment.nbytes, offset=segment.offset)
    fresh = torch.empty(0, dtype=segment.dtype)
    return fresh.set_(part.untyped_storage(), part.storage_offset(), segment.shape, segment.stride)
