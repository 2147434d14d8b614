"""Parameters side by side in one host buffer, and what uploads read of them.

Masters are moved once into such buffers; the user's ``nn.Parameter`` objects stay who they are, only their ``.data``
moves. Where uploads have to read something else than the masters themselves, there is a working copy beside them. What
is frozen and lies in a file that is mapped into memory may stay there (`mapped_files`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.runtime.memory.dtypes import Formats, widen

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParamSlice:
    """Where one parameter lies in a flat buffer."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's view into ``flat`` (uint8, 1-D)."""
        typed = flat[self.offset : self.offset + self.nbytes].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def segment_of(tensor: Tensor, offset: int, dtype: torch.dtype | None = None) -> ParamSlice:
    dense = torch._debug_has_internal_overlap(tensor) == 0 and _is_dense(tensor)
    stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    dtype = dtype or tensor.dtype
    return ParamSlice(offset, tensor.numel() * dtype.itemsize, tensor.shape, tuple(stride), dtype)


def in_a_row(tensors: list[nn.Parameter], dtypes: list[torch.dtype]) -> tuple[list[ParamSlice], int]:
    """Slices one behind the other, and the bytes that they take."""
    segments, offset = [], 0
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        segments.append(segment_of(tensor, offset, dtype))
        offset += aligned(segments[-1].nbytes)
    return segments, offset


def holders(tensor: Tensor) -> int:
    """How many tensors hold the memory of ``tensor``: views of it count, such as a ``.grad``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = holders(torch.empty(1))
"""Of a tensor whose memory no other tensor holds."""


def _is_dense(tensor: Tensor) -> bool:
    return 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()


def _with_own_storage(segment: ParamSlice, flat: Tensor) -> Tensor:
    """The parameter's view into ``flat`` as a tensor whose storage ends where the parameter does.

    Saving or copying a tensor saves or copies its whole storage; a checkpoint of one weight must not hold its layer.
    """
    if not segment.nbytes:
        return segment.view(flat)
    part = torch.frombuffer(flat.numpy(), dtype=torch.uint8, count=segment.nbytes, offset=segment.offset)
    return part.view(segment.dtype).as_strided(segment.shape, segment.stride)


def _alone(tensor: Tensor) -> Tensor:
    """``tensor``, which is contiguous, as one whose storage is no larger than itself: a file's is that of all in it."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return _with_own_storage(segment_of(tensor, 0), tensor.reshape(-1).view(torch.uint8))


class FlatBuffer:
    """One flat host buffer and the masters that are views into it; or, if they stay in place, the masters alone.

    Attributes:
        source: what they are computed with: the buffer, or the working copy beside it.
        nbytes: of what uploads read, which is that, or rounded copies of it (`round`).
        segments: where the masters lie in the buffer.
        places: and where they lie in what uploads read.
        in_place: whether they stay in their files.
    """

    def __init__(
        self, masters: list[nn.Parameter], device: Device, formats: Formats, *, apart: bool, in_place: bool = False
    ) -> None:
        self.masters = masters
        self._device = device
        self._formats = formats
        self._apart = apart
        self.in_place = in_place
        self._lay_out()

    def _lay_out(self) -> None:
        self.segments, nbytes = in_a_row(self.masters, [p.dtype for p in self.masters])
        self._source_places, self._source_nbytes = in_a_row(self.masters, [self._formats.of(p) for p in self.masters])
        self.nbytes = self._source_nbytes
        self._casts = self._source_places != self.segments
        self.places = self._source_places
        self._rounded: Tensor | None = None
        self._strays = self._apart_for_strays = False
        """Whether masters lie elsewhere, and whether there is a working copy because of that alone."""
        self._source_views: list[Tensor] = []  # made once, because each update refreshes all
        self._rounded_views: list[Tensor] = []
        copied = self._apart or self._casts
        # Only what uploads read has to be memory that copies quickly.
        pageable = copied or self.in_place
        size = 0 if self.in_place else nbytes
        self.buffer = torch.empty(size, dtype=torch.uint8) if pageable else self._device.host_buffer(size)
        self.source = self.buffer
        if self.in_place:
            self.views = [_alone(p.data) for p in self.masters]
            for master, view in zip(self.masters, self.views, strict=True):
                master.data = view
        else:
            self._homes = [_with_own_storage(s, self.buffer) for s in self.segments]
            self.views = list(self._homes)
            for master, view in zip(self.masters, self.views, strict=True):
                view.copy_(master.data)
                master.data = view
        self._source_views = self.views
        if copied:
            self.set_apart()

    @property
    def trained(self) -> bool:
        """Whether the optimizer may write to any of the masters."""
        return any(p.requires_grad for p in self.masters)

    @property
    def copied(self) -> bool:
        """Whether uploads read copies, which have to be brought up to date."""
        return self.source is not self.buffer or self._rounded is not None

    def set_apart(self) -> None:
        """Make a working copy, unless there is one."""
        self._apart_for_strays = False
        if self.source is self.buffer:
            self.source = self._device.host_buffer(self._source_nbytes)
            self._source_views = [place.view(self.source) for place in self._source_places]
            self.refresh()

    def round(self, formats: Mapping[int, torch.dtype]) -> None:
        """From now on uploads read copies, of which those of some masters are rounded.

        Args:
            formats: what to, by index of the master. None of them: uploads read what they are computed with, as before.
        """
        self.places, self._rounded, self._rounded_views = self._source_places, None, []
        dtypes = [formats.get(i, place.dtype) for i, place in enumerate(self._source_places)]
        self.places, self.nbytes = in_a_row(self.masters, dtypes)
        if formats:
            self._rounded = self._device.host_buffer(self.nbytes)
            self._rounded_views = [place.view(self._rounded) for place in self.places]
            self._round()

    def _round(self) -> None:
        for rounded, source in zip(self._rounded_views, self._source_views, strict=False):  # if any
            rounded.copy_(source)

    def widen(self) -> None:
        """What has begun to be trained gets a format to be trained in, and memory that may be written to."""
        narrow = self._formats.too_narrow(self.masters)
        for master in narrow:
            widen(master)
        if narrow or (self.in_place and self.trained):
            self.in_place = self.in_place and not self.trained
            self._lay_out()

    def refresh(self) -> None:
        """Bring the copies up to date."""
        if self.source is self.buffer:
            pass
        elif not (self._casts or self._strays):
            self.source.copy_(self.buffer)
        else:
            for source, view in zip(self._source_views, self.views, strict=True):
                source.copy_(view)
        self._round()

    def refresh_part(self, master: nn.Parameter, start: int, end: int) -> None:
        """The same for the numbers ``start`` to ``end`` of one master, which is contiguous."""
        index = next((index for index, mine in enumerate(self.masters) if mine is master), None)
        if index is None:
            return
        chain = [self.views, *([self._source_views] if self.source is not self.buffer else [])]
        chain += [self._rounded_views] if self._rounded is not None else []
        for source, target in pairwise(chain):
            target[index].view(-1)[start:end].copy_(source[index].view(-1)[start:end])

    @property
    def _reads_masters(self) -> bool:
        return self.in_place and self.source is self.buffer

    def read(self, index: int) -> Tensor:
        """What one master is computed with."""
        return self.views[index] if self._reads_masters else self._source_places[index].view(self.source)

    def span_of(self, master: nn.Parameter, start: int, end: int) -> tuple[int, int] | None:
        """The bytes in which the numbers ``start`` to ``end`` of a contiguous master travel; None if it is not here."""
        for mine, place in zip(self.masters, self.places, strict=True):
            if mine is master:
                return place.offset + start * place.dtype.itemsize, place.offset + end * place.dtype.itemsize
        return None

    def upload(self, stream: Stream, segment: Tensor, start: int = 0, end: int | None = None) -> None:
        """Enqueue the copy into ``segment`` (uint8, ``nbytes`` long), or of its bytes ``start`` to ``end``."""
        if not self._reads_masters:
            source = self.source if self._rounded is None else self._rounded
            stream.copy(segment[start:end], source[start:end])
            return
        for place, view in zip(self.places, self.views, strict=True):
            stream.copy(place.view(segment), view)

    def strays(self) -> list[nn.Parameter]:
        """Masters that user code has given other memory."""
        pairs = [] if self.in_place else zip(self.masters, self._homes, strict=True)
        return [master for master, home in pairs if master.data_ptr() != home.data_ptr()]

    def reattach(self) -> None:
        """Make every master a view into the buffer again, keeping the values it has now.

        User code may have replaced a master's storage (``load_state_dict(assign=True)``, an EMA swap); without this
        the worker would go on computing with the old values. Where user code holds the storage as well, or that in the
        buffer, the two are not to be written to for each other: the master stays where it is, and uploads read a copy.
        """
        moved = False
        for index, master in enumerate(self.masters):
            if master.data_ptr() == self.views[index].data_ptr():
                continue
            segment = self.segments[index]
            if master.shape != segment.shape or master.dtype != segment.dtype:
                raise RoundPipeError(
                    f"a parameter changed from {tuple(segment.shape)} {segment.dtype} to {tuple(master.shape)} "
                    f"{master.dtype} during training; change the model before fit() instead."
                )
            home = self._homes[index] if not self.in_place else None
            if home is None:  # it is read where it is now; its file is not ours to write to
                self.views[index] = master.data
            elif master.data_ptr() == home.data_ptr():
                self.views[index] = home
            elif home.numel() and (holders(home) > ALONE or holders(master) > ALONE):
                self.views[index] = master.data
            else:
                home.copy_(master.data)
                self.views[index] = master.data = home
            moved = True
        if moved and not self.in_place:
            self._strays = any(map(operator.is_not, self.views, self._homes))
            if self._strays and self.source is self.buffer:
                self.set_apart()
                self._apart_for_strays = True
            elif self._apart_for_strays and not self._strays:
                self.source, self._source_views, self._apart_for_strays = self.buffer, self.views, False
        if moved and self.copied:
            self.refresh()
