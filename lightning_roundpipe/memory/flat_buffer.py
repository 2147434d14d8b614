"""Masters in one flat host buffer, and what uploads read of them.

The masters are moved into flat buffers once. The user's ``nn.Parameter`` objects keep their identity, only their
``.data`` moves. A working copy lies beside masters that uploads must not read, and a rounded copy beside it if some
travel rounded. Or masters and what uploads read share memory (`split_buffer`). A frozen master in a memory-mapped file
may stay there (`mapped_files`).

    masters ──► working copy, in the dtypes of the computation ──► rounded copy
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.memory.dtypes import Formats, widen
from lightning_roundpipe.memory.flat_params import (
    ALONE,
    ParamSlice,
    holders,
    in_a_row,
    segment_of,
    size_of,
    with_own_storage,
)
from lightning_roundpipe.memory.split_buffer import SplitBuffer, is_halved
from lightning_roundpipe.optim.split_masters import SplitTensor


class FlatCopy:
    """A copy of some masters in one flat host buffer. The ``views`` are kept, as each update refreshes all of them."""

    def __init__(self, places: Sequence[ParamSlice], device: Device) -> None:
        self.buffer = device.host_buffer(size_of(places))
        self.views = [place.view(self.buffer) for place in places]

    def refresh(self, values: Sequence[Tensor]) -> None:
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value)


class FlatBuffer:
    """One flat host buffer whose views are the masters; or masters alone that stay in their files (``in_place``).

    Attributes:
        segments: their slices in ``buffer``.
        views: their values, in ``buffer`` or where user code has put them.
        places, nbytes: their slices in what uploads read, and its size.
    """

    def __init__(
        self, masters: list[nn.Parameter], device: Device, formats: Formats, *, double_buffered: bool,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        self.masters = masters
        self._device = device
        self._formats = formats
        self._double_buffered = double_buffered
        self.in_place = in_place
        self._lay_out()

    def _lay_out(self) -> None:
        self._working: FlatCopy | None = None
        self._rounded: FlatCopy | None = None
        self._split: SplitBuffer | None = None
        self.segments, nbytes = in_a_row(self.masters, [p.dtype for p in self.masters])
        self._source_places, self.nbytes = in_a_row(self.masters, [self._formats.of(p) for p in self.masters])
        self.places = self._source_places
        copied = self._double_buffered or self._casts
        # Only the memory that uploads read needs to be page-locked.
        pageable = copied or self.in_place
        size = 0 if self.in_place else nbytes
        self.buffer = torch.empty(size, dtype=torch.uint8) if pageable else self._device.host_buffer(size)
        if self.in_place:
            self._homes = self.views = [_with_own_storage(p.data) for p in self.masters]
        else:
            self._homes = [with_own_storage(s, self.buffer) for s in self.segments]
            self.views = list(self._homes)
        for master, view in zip(self.masters, self.views, strict=True):
            if not self.in_place:
                view.copy_(master.data)
            master.data = view
        if copied:
            self._make_working_copy()

    @property
    def trained(self) -> bool:
        """Whether any of the masters is trained."""
        return any(p.requires_grad for p in self.masters)

    @property
    def source(self) -> Tensor:
        """What layers compute with: the buffer, or the working copy beside it."""
        return self.buffer if self._working is None else self._working.buffer

    @property
    def copied(self) -> bool:
        """Whether uploads read copies, which must be refreshed after each update."""
        return self.shares or self._working is not None or self._rounded is not None

    @property
    def shares(self) -> bool:
        """Whether masters share the memory of what uploads read."""
        return self._split is not None

    @property
    def _casts(self) -> bool:
        return self._source_places != self.segments

    @property
    def _strays(self) -> bool:
        """Whether a master lies outside the buffer."""
        return any(map(operator.is_not, self.views, self._homes))

    def double_buffer(self) -> None:
        """Keep a working copy from here on: the optimizer writes to masters while they are uploaded."""
        self._double_buffered = True
        self._make_working_copy()

    def _make_working_copy(self) -> None:
        if self._working is None:
            self._working = FlatCopy(self._source_places, self._device)
            self.refresh()

    def round(self, formats: Mapping[int, torch.dtype], *, share: bool = False) -> None:
        """Make uploads read copies that are rounded to ``formats``, by index of the master; empty: not rounded.

        ``share``: whether masters and what uploads read share memory, where they can.
        """
        dtypes = [formats.get(i, place.dtype) for i, place in enumerate(self._source_places)]
        if share and self.shares and dtypes == [place.dtype for place in self.places]:
            return
        self._leave()
        self._rounded = None
        self.places, self.nbytes = in_a_row(self.masters, dtypes)
        if share and self._may_share:
            self._share()
        elif formats:
            self._make_rounded()
        elif self._casts:
            self._make_working_copy()

    def _make_rounded(self) -> None:
        self._rounded = FlatCopy(self.places, self._device)
        self._round()

    def _round(self) -> None:
        if self._rounded is not None:
            self._rounded.refresh(self.views if self._working is None else self._working.views)

    # -- memory that masters and uploads share ------------------------------------------------------------------------

    @property
    def _may_share(self) -> bool:
        return (
            self.trained
            and not (self.in_place or self._double_buffered or self._strays)
            and any(map(is_halved, self.segments, self.places))
            and all(view.is_contiguous() for view in self.views)
            and self._is_sole_holder
        )

    @property
    def _is_sole_holder(self) -> bool:
        """Whether only the masters and this buffer hold their memory."""
        return all(holders(home) <= ALONE + 1 for home in self._homes)

    def _share(self) -> None:
        """Move the masters to a buffer that holds what uploads read, and their lower halves behind it."""
        values = self.views
        split = SplitBuffer(self.masters, self.segments, self.places, self._device, self._formats.hidden)
        self._split, self._working, self.buffer, self._homes = split, None, split.buffer, split.homes
        self.views = list(split.homes)
        split.split(values)

    def join(self) -> None:
        """Give the masters their values until the next `refresh`. No upload may read the buffer meanwhile."""
        if self._split is not None:
            self._split.join()

    def unshare(self) -> None:
        """Give masters and what uploads read memory of their own."""
        if self._split is None:
            return
        self._leave()
        if self._casts:
            self._make_working_copy()
        elif self.places != self._source_places:
            self._make_rounded()

    def _leave(self) -> None:
        self.join()
        self._split = None

    def memory(self, index: int) -> Tensor | SplitTensor:
        """Return where the optimizer finds the numbers of one master."""
        split = self._split
        return split.memory(index) if split is not None and split.is_split else self.masters[index].data

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
        if self._split is not None:
            if self._split.is_split:
                return
            if self._is_sole_holder:
                self._split.split_again()
            else:
                self.unshare()
            return
        if self._working is None:
            pass
        elif not (self._casts or self._strays):
            self._working.buffer.copy_(self.buffer)
        else:
            self._working.refresh(self.views)
        self._round()

    @property
    def _reads_masters(self) -> bool:
        return self.in_place and self._working is None

    def read(self, index: int) -> Tensor:
        """Return what layers compute with for one master."""
        place = self._source_places[index]
        if self._split is not None:
            return self._split.read(index, place.dtype) if self._split.is_split else self.views[index].to(place.dtype)
        return self.views[index] if self._reads_masters else place.view(self.source)

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the copy into ``segment`` (uint8, ``nbytes`` long)."""
        if not self._reads_masters:
            assert self._split is None or self._split.is_split, "masters are joined, and an upload would read them"
            stream.copy(segment, self.source[: self.nbytes] if self._rounded is None else self._rounded.buffer)
            return
        for place, view in zip(self.places, self.views, strict=True):
            stream.copy(place.view(segment), view)

    def strays(self) -> list[nn.Parameter]:
        """Return the masters whose memory user code has replaced."""
        if (split := self._split) is not None and split.is_split:
            return [master for index, master in enumerate(self.masters) if split.is_replaced(index)]
        pairs = [] if self.in_place else zip(self.masters, self._homes, strict=True)
        return [master for master, home in pairs if master.data_ptr() != home.data_ptr()]

    def reattach(self) -> None:
        """Make every master a view into the buffer again, with the values it has now.

        User code may have replaced a master's storage (``load_state_dict(assign=True)``, an EMA swap). Workers would go
        on computing with the old values. If user code still holds the new storage or the buffer's, neither
        may be overwritten with the other's values: the master stays where it is, and uploads read a copy.
        """
        if self._split is not None and self._split.is_split:
            if not self.strays():
                return
            self.join()
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
            home = self._homes[index]
            if self.in_place:  # read from its new place; the file is not written to
                self.views[index] = master.data
            elif master.data_ptr() == home.data_ptr():
                self.views[index] = home
            elif home.numel() and (
                holders(home) > ALONE or holders(master) > ALONE or not master.untyped_storage().resizable()
            ):  # others hold the memory, or may: that of numpy's arrays or of other processes
                self.views[index] = master.data
            else:
                home.copy_(master.data)
                self.views[index] = master.data = home
            moved = True
        if moved and self._strays:
            self.unshare()
            self._make_working_copy()
        elif moved and not (self._double_buffered or self._casts):
            self._working = None  # it was there for masters outside the buffer, which have come back
        if moved and self.copied:
            self.refresh()


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the contiguous ``tensor`` with a storage of just its size: weights of a mapped file share one storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return with_own_storage(segment_of(tensor, 0), tensor.reshape(-1).view(torch.uint8))
