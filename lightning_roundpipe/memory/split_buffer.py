"""Trained fp32 masters that share the memory of what uploads read, which is their upper half (`split_masters`).

The buffer has two forms, and one takes the place of the other::

    joined: | fp32 masters                                        |    what user code finds
    split:  | what uploads read                 | lower halves    |    what uploads and the optimizer find

While it is split, ``.data`` of the masters is an expanded NaN: what reads it by mistake shows, and writes raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.flat_params import ParamSlice, aligned, size_of, with_own_storage
from lightning_roundpipe.optim.split_masters import SplitTensor, in_memory_order


def is_halved(segment: ParamSlice, place: ParamSlice) -> bool:
    """Return whether a master in ``segment`` is split, if ``place`` is what uploads read of it."""
    return segment.dtype is torch.float32 and place.dtype is torch.bfloat16


class SplitBuffer:
    """One flat buffer in the two forms above. It is joined, and has no values yet, when it is made.

    Args:
        segments: slices of the masters in the joined form.
        places: their slices in what uploads read.
        hidden: ids of the masters whose values are split. Updated.

    Attributes:
        homes: the masters' views into the joined form.
    """

    def __init__(
        self, masters: Sequence[nn.Parameter], segments: Sequence[ParamSlice], places: Sequence[ParamSlice],
        device: Device, hidden: set[int],
    ) -> None:  # fmt: skip
        self._masters, self._segments, self._places, self._hidden = masters, segments, places, hidden
        end = size_of(places)
        self._lows: dict[int, int] = {}
        for index, place in enumerate(places):
            if is_halved(segments[index], place):
                self._lows[index] = end
                end += aligned(place.nbytes)
        self.buffer = device.host_buffer(max(size_of(segments), end))
        self.homes = [with_own_storage(segment, self.buffer) for segment in segments]
        self._halves = {index: self._halves_in(self.buffer, index) for index in self._lows}
        self._veils = [torch.full((), math.nan, dtype=master.dtype).expand(master.shape) for master in masters]
        self.is_split = False

    def _halves_in(self, buffer: Tensor, index: int) -> SplitTensor:
        high, start = in_memory_order(self._places[index].view(buffer)), self._lows[index]
        return SplitTensor(high, buffer[start : start + high.nbytes].view(torch.int16))

    def split(self, values: Sequence[Tensor]) -> None:
        """Keep ``values``, which lie elsewhere, in the split form."""
        for index, (master, value) in enumerate(zip(self._masters, values, strict=True)):
            if (halves := self._halves.get(index)) is not None:
                halves.split_all(in_memory_order(value))
            else:
                self._places[index].view(self.buffer).copy_(value)
            master.data = self._veils[index]
        self.is_split = True
        self._hidden |= set(map(id, self._masters))

    def split_again(self) -> None:
        """Undo `join`."""
        whole = self.buffer.clone()
        self.split([segment.view(whole) for segment in self._segments])

    def join(self) -> None:
        """Give the masters their values, if they are split. No upload may read the buffer from here on."""
        if not self.is_split:
            return
        split = self.buffer.clone()
        for index, (master, home) in enumerate(zip(self._masters, self.homes, strict=True)):
            if index in self._lows:
                self._halves_in(split, index).join_all(in_memory_order(home))
            else:
                home.copy_(self._places[index].view(split))
            if not self.is_replaced(index):
                master.data = home
        self.is_split = False
        self._hidden -= set(map(id, self._masters))

    def is_replaced(self, index: int) -> bool:
        """Return whether user code has set the ``.data`` of a master since the buffer was split."""
        master, veil = self._masters[index], self._veils[index]
        return self.is_split and (master.data_ptr() != veil.data_ptr() or master.shape != veil.shape)

    def memory(self, index: int) -> Tensor | SplitTensor:
        """Return where the optimizer finds the numbers of one master in the split form."""
        return self._halves.get(index) or self._places[index].view(self.buffer)

    def read(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return the values of one master from the split form, in ``dtype``: its own, or that of what uploads read."""
        if dtype is self._places[index].dtype:
            return self._places[index].view(self.buffer)
        own = self._segments[index]
        master = torch.empty_strided(own.shape, own.stride, dtype=own.dtype)
        self._halves[index].join_all(in_memory_order(master))
        return master
