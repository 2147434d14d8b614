"""Parameters packed into one flat host buffer, and the copies of it that uploads read.

The masters are moved into flat buffers once. The user's ``nn.Parameter`` objects keep their identity, only their
``.data`` moves. Where uploads must read something other than the masters, a working copy lies beside them. A frozen
master in a memory-mapped file may stay there (`mapped_files`).

Trained fp32 masters that are uploaded in bf16 may share the memory of the working copy, which is then their upper half
(`split_masters`). The buffer has two forms, and one takes the place of the other::

    joined: | fp32 masters                                        |    what user code finds
    split:  | what uploads read                 | lower halves    |    what uploads and the optimizer find

While it is split, ``.data`` of the masters is an expanded NaN: what reads it by mistake shows, and writes raise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.memory.dtypes import Formats, widen
from lightning_roundpipe.optim.split_masters import SplitTensor, in_memory_order

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


def _veil(master: nn.Parameter) -> Tensor:
    """Return what the ``.data`` of a master is while its values are split: one NaN, expanded to its shape."""
    return torch.full((), math.nan, dtype=master.dtype).expand(master.shape)


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
        shares: whether masters share the memory of what uploads read.
        is_split: whether it is split now.
    """

    def __init__(
        self, masters: list[nn.Parameter], device: Device, formats: Formats, *, apart: bool, in_place: bool = False
    ) -> None:
        self.masters = masters
        self._device = device
        self._formats = formats
        self._apart = apart
        self.in_place = in_place
        self.shares = self.is_split = False
        self._halves: dict[int, SplitTensor] = {}
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
        return self.shares or self.source is not self.buffer or self._rounded is not None

    def set_apart(self) -> None:
        """Make a working copy, unless there is one."""
        self._apart_for_strays = False
        if self.source is self.buffer:
            self.source = self._device.host_buffer(self._source_nbytes)
            self._source_views = [place.view(self.source) for place in self._source_places]
            self.refresh()

    def round(self, formats: Mapping[int, torch.dtype], *, share: bool = False) -> None:
        """Make uploads read copies that are rounded for some of the masters.

        Args:
            formats: dtype to round to, by index of the master. If empty, uploads read ``source`` again.
            share: whether masters and what uploads read share memory, where they can.
        """
        if self.shares:
            self._leave()
        self._rounded, self._rounded_views = None, []
        dtypes = [formats.get(i, place.dtype) for i, place in enumerate(self._source_places)]
        self.places, self.nbytes = in_a_row(self.masters, dtypes)
        if share and self._may_share:
            self._share()
        elif formats:
            self._make_rounded()
        elif self._casts:
            self.set_apart()

    def _make_rounded(self) -> None:
        self._rounded = self._device.host_buffer(self.nbytes)
        self._rounded_views = [place.view(self._rounded) for place in self.places]
        self._round()

    def _round(self) -> None:
        for rounded, source in zip(self._rounded_views, self._source_views, strict=False):  # none if not rounded
            rounded.copy_(source)

    # -- memory that masters and uploads share ------------------------------------------------------------------------

    @property
    def _may_share(self) -> bool:
        return (
            self.trained
            and not (self.in_place or self._apart or self._strays)
            and any(map(self._is_halved, range(len(self.masters))))
            and all(view.is_contiguous() for view in self.views)
            and self._holds_alone
        )

    def _is_halved(self, index: int) -> bool:
        return self.segments[index].dtype is torch.float32 and self.places[index].dtype is torch.bfloat16

    @property
    def _holds_alone(self) -> bool:
        """Whether only the masters and this buffer hold their memory."""
        return all(holders(home) <= ALONE + 1 for home in self._homes)

    def _share(self) -> None:
        """Move the masters to a buffer that holds what uploads read, and their lower halves behind it."""
        values, end = self.views, self.nbytes
        self._lows: dict[int, int] = {}
        for index, place in enumerate(self.places):
            if self._is_halved(index):
                self._lows[index] = end
                end += aligned(place.nbytes)
        _, joined = in_a_row(self.masters, [segment.dtype for segment in self.segments])
        self.buffer = self.source = self._device.host_buffer(max(joined, end))
        self._homes = [_with_own_storage(segment, self.buffer) for segment in self.segments]
        self.views = self._source_views = list(self._homes)
        self._halves = {index: self._halves_in(self.buffer, index) for index in self._lows}
        self._veils = [_veil(master) for master in self.masters]
        self.shares = True
        self._split_from(values)

    def _halves_in(self, buffer: Tensor, index: int) -> SplitTensor:
        high, start = in_memory_order(self.places[index].view(buffer)), self._lows[index]
        return SplitTensor(high, buffer[start : start + high.nbytes].view(torch.int16))

    def _split_from(self, values: list[Tensor]) -> None:
        for index, (master, value) in enumerate(zip(self.masters, values, strict=True)):
            if (halves := self._halves.get(index)) is not None:
                halves.split_all(in_memory_order(value))
            else:
                self.places[index].view(self.buffer).copy_(value)
            master.data = self._veils[index]
        self.is_split = True
        self._formats.hidden |= set(map(id, self.masters))

    def join(self) -> None:
        """Give the masters their values until the next `refresh`. No upload may read the buffer meanwhile."""
        if not self.is_split:
            return
        split = self.buffer.clone()
        for index, (master, home) in enumerate(zip(self.masters, self._homes, strict=True)):
            if index in self._lows:
                self._halves_in(split, index).join_all(in_memory_order(home))
            else:
                home.copy_(self.places[index].view(split))
            if not self._is_replaced(index):
                master.data = home
        self.is_split = False
        self._formats.hidden -= set(map(id, self.masters))

    def _is_replaced(self, index: int) -> bool:
        """Return whether user code has set the ``.data`` of a master while the buffer was split."""
        master, veil = self.masters[index], self._veils[index]
        return self.is_split and (master.data_ptr() != veil.data_ptr() or master.shape != veil.shape)

    def unshare(self) -> None:
        """Give masters and what uploads read memory of their own."""
        if not self.shares:
            return
        self._leave()
        if self._casts:
            self.set_apart()
        elif self.places != self._source_places:
            self._make_rounded()

    def _leave(self) -> None:
        self.join()
        self.shares = False

    def memory(self, index: int) -> Tensor | SplitTensor:
        """Return where the optimizer finds the numbers of one master."""
        if not self.is_split:
            return self.masters[index].data
        return self._halves.get(index) or self.places[index].view(self.buffer)

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
        if self.is_split:
            return
        if self.shares and self._holds_alone:
            whole = self.buffer.clone()
            self._split_from([segment.view(whole) for segment in self.segments])
            return
        if self.shares:
            self.unshare()
            return
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
        if self.shares or (index := self.index_of(master)) is None:
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
        if self.shares:
            return self._read_shared(index)
        return self.views[index] if self._reads_masters else self._source_places[index].view(self.source)

    def _read_shared(self, index: int) -> Tensor:
        place, own = self._source_places[index], self.segments[index]
        if not self.is_split:
            return self.views[index].to(place.dtype)
        if place.dtype is self.places[index].dtype:
            return self.places[index].view(self.buffer)
        master = torch.empty_strided(own.shape, own.stride, dtype=own.dtype)
        self._halves[index].join_all(in_memory_order(master))
        return master

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the copy into ``segment`` (uint8, ``nbytes`` long)."""
        if not self._reads_masters:
            assert self.is_split or not self.shares, "masters are joined, and an upload would read them"
            stream.copy(segment, self.source[: self.nbytes] if self._rounded is None else self._rounded)
            return
        for place, view in zip(self.places, self.views, strict=True):
            stream.copy(place.view(segment), view)

    def strays(self) -> list[nn.Parameter]:
        """Return the masters whose memory user code has replaced."""
        if self.is_split:
            return [master for index, master in enumerate(self.masters) if self._is_replaced(index)]
        pairs = [] if self.in_place else zip(self.masters, self._homes, strict=True)
        return [master for master, home in pairs if master.data_ptr() != home.data_ptr()]

    def reattach(self) -> None:
        """Make every master a view into the buffer again, with the values it has now.

        User code may have replaced a master's storage (``load_state_dict(assign=True)``, an EMA swap). Workers would go
        on computing with the old values. If user code still holds the new storage or the buffer's, neither
        may be overwritten with the other's values: the master stays where it is, and uploads read a copy.
        """
        moved = False
        if self.is_split:
            if not self.strays():
                return
            self.join()
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
            if self._strays:
                self.unshare()
            if self._strays and self.source is self.buffer:
                self.set_apart()
                self._apart_for_strays = True
            elif self._apart_for_strays and not self._strays:
                self.source, self._source_views, self._apart_for_strays = self.buffer, self.views, False
        if moved and self.copied:
            self.refresh()
