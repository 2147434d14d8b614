"""Parameters packed into one flat host buffer, and the copies of it that uploads read.

The masters are moved into flat buffers once. The user's ``nn.Parameter`` objects keep their identity, only their
``.data`` moves. Where uploads must read something other than the masters, a working copy lies beside them. A frozen
master in a memory-mapped file may stay there (`mapped_files`).
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
from lightning_roundpipe.memory.dtypes import Formats, widen

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParamSlice:
    """The place of one parameter in a flat buffer."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's view into ``flat`` (uint8, 1-D)."""
        typed = flat[self.offset : self.offset + self.nbytes].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def segment_of(tensor: Tensor, offset: int, dtype: torch.dtype | None = None) -> ParamSlice:
    dense = torch._debug_has_internal_overlap(tensor) == 0 and _is_dense(tensor)
    stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    dtype = dtype or tensor.dtype
    return ParamSlice(offset, tensor.numel() * dtype.itemsize, tensor.shape, tuple(stride), dtype)


def in_a_row(tensors: list[nn.Parameter], dtypes: list[torch.dtype]) -> tuple[list[ParamSlice], int]:
    """Lay out the tensors one after another; return their slices and the bytes that they take."""
    segments, offset = [], 0
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        segments.append(segment_of(tensor, offset, dtype))
        offset += aligned(segments[-1].nbytes)
    return segments, offset


def holders(tensor: Tensor) -> int:
    """Return how many tensors hold the storage of ``tensor``, counting views such as a ``.grad``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = holders(torch.empty(1))
"""`holders` of a tensor that shares its storage with no other tensor."""


def _may_be_held(tensor: Tensor) -> bool:
    """Return whether others hold the memory of ``tensor``, or may: that of numpy's arrays or of other processes."""
    return holders(tensor) > ALONE or not tensor.untyped_storage().resizable()


def _is_dense(tensor: Tensor) -> bool:
    return 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()


def _with_own_storage(segment: ParamSlice, flat: Tensor) -> Tensor:
    """Return the parameter's view into ``flat`` as a tensor whose storage ends where the parameter does.

    Saving or copying a tensor takes its whole storage, and a checkpoint of one weight must not contain its whole layer.
    It is no view in autograd's sense, whose base would hold the storage, too (`holders`).
    """
    if not segment.nbytes:
        return segment.view(flat)
    part = torch.frombuffer(flat.numpy(), dtype=torch.uint8, count=segment.nbytes, offset=segment.offset)
    fresh = torch.empty(0, dtype=segment.dtype)
    return fresh.set_(part.untyped_storage(), part.storage_offset(), segment.shape, segment.stride)


def _alone(tensor: Tensor) -> Tensor:
    """Return the contiguous ``tensor`` with a storage of just its size: weights of a mapped file share one storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return _with_own_storage(segment_of(tensor, 0), tensor.reshape(-1).view(torch.uint8))


class FlatBuffer:
    """One flat host buffer whose views are the masters; or the masters alone if they stay in their files.

    Attributes:
        source: what layers compute with: the buffer, or the working copy beside it.
        nbytes: size of what uploads read: ``source``, or rounded copies of it (`round`).
        segments: the masters' slices in the buffer.
        places: the masters' slices in what uploads read.
        in_place: whether the masters stay in their files.
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
        """Whether a master lies outside the buffer, and whether the working copy exists for that reason alone."""
        self._source_views: list[Tensor] = []  # cached, because each update refreshes all of them
        self._rounded_views: list[Tensor] = []
        copied = self._apart or self._casts
        # Only the memory that uploads read needs to be page-locked.
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
        """Whether any of the masters is trained."""
        return any(p.requires_grad for p in self.masters)

    @property
    def copied(self) -> bool:
        """Whether uploads read copies, which must be refreshed after each update."""
        return self.source is not self.buffer or self._rounded is not None

    def set_apart(self) -> None:
        """Make a working copy, unless there is one."""
        self._apart_for_strays = False
        if self.source is self.buffer:
            self.source = self._device.host_buffer(self._source_nbytes)
            self._source_views = [place.view(self.source) for place in self._source_places]
            self.refresh()

    def round(self, formats: Mapping[int, torch.dtype]) -> None:
        """Make uploads read copies that are rounded for some of the masters.

        Args:
            formats: dtype to round to, by index of the master. If empty, uploads read ``source`` again.
        """
        self.places, self._rounded, self._rounded_views = self._source_places, None, []
        dtypes = [formats.get(i, place.dtype) for i, place in enumerate(self._source_places)]
        self.places, self.nbytes = in_a_row(self.masters, dtypes)
        if formats:
            self._rounded = self._device.host_buffer(self.nbytes)
            self._rounded_views = [place.view(self._rounded) for place in self.places]
            self._round()

    def _round(self) -> None:
        for rounded, source in zip(self._rounded_views, self._source_views, strict=False):  # none if not rounded
            rounded.copy_(source)

    def widen(self) -> None:
        """Widen newly trained masters to fp32 and move them out of files, which the optimizer must not write to."""
        narrow = self._formats.too_narrow(self.masters)
        for master in narrow:
            widen(master)
        if narrow or (self.in_place and self.trained):
            self.in_place = self.in_place and not self.trained
            self._lay_out()

    def refresh(self) -> None:
        """Bring the copies up to date with the masters."""
        if self.source is self.buffer:
            pass
        elif not (self._casts or self._strays):
            self.source.copy_(self.buffer)
        else:
            for source, view in zip(self._source_views, self.views, strict=True):
                source.copy_(view)
        self._round()

    def refresh_part(self, master: nn.Parameter, start: int, end: int) -> None:
        """Refresh the elements ``start`` to ``end`` of one contiguous master, if it is in this buffer."""
        if (index := self.index_of(master)) is None:
            return
        chain = [self.views, *([self._source_views] if self.source is not self.buffer else [])]
        chain += [self._rounded_views] if self._rounded is not None else []
        for source, target in pairwise(chain):
            target[index].view(-1)[start:end].copy_(source[index].view(-1)[start:end])

    @property
    def _reads_masters(self) -> bool:
        return self.in_place and self.source is self.buffer

    def index_of(self, master: nn.Parameter) -> int | None:
        """Return the index of ``master``; None if it is not in this buffer."""
        return next((index for index, mine in enumerate(self.masters) if mine is master), None)

    def read(self, index: int) -> Tensor:
        """Return what layers compute with for one master."""
        return self.views[index] if self._reads_masters else self._source_places[index].view(self.source)

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the copy into ``segment`` (uint8, ``nbytes`` long)."""
        if not self._reads_masters:
            stream.copy(segment, self.source if self._rounded is None else self._rounded)
            return
        for place, view in zip(self.places, self.views, strict=True):
            stream.copy(place.view(segment), view)

    def strays(self) -> list[nn.Parameter]:
        """Return the masters whose memory user code has replaced."""
        pairs = [] if self.in_place else zip(self.masters, self._homes, strict=True)
        return [master for master, home in pairs if master.data_ptr() != home.data_ptr()]

    def reattach(self) -> None:
        """Make every master a view into the buffer again, with the values it has now.

        User code may have replaced a master's storage (``load_state_dict(assign=True)``, an EMA swap). Workers would go
        on computing with the old values. If user code still holds the new storage or the buffer's, neither
        may be overwritten with the other's values: the master stays where it is, and uploads read a copy.
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
            if home is None:  # read from its new place; the file is not written to
                self.views[index] = master.data
            elif master.data_ptr() == home.data_ptr():
                self.views[index] = home
            elif home.numel() and (holders(home) > ALONE or _may_be_held(master)):
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
