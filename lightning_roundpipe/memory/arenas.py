"""Device buffers for one stage after another: `StageArena` for weights and gradients, `Arena` for anything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.memory.flat_params import ALIGNMENT


class Arena:
    """A device buffer that slots reuse.

    Attributes:
        buffer, address: the memory, as bytes, and its address; None and 0 before it is allocated.
        last_use: the end of the last work on the buffer, which the next user's streams must wait for.
    """

    def __init__(self, device: Device, purpose: str) -> None:
        self._device = device
        self._purpose = purpose
        self.buffer: Tensor | None = None
        self.address = 0
        self.last_use: Event | None = None

    def has(self, nbytes: int) -> bool:
        """Return whether the buffer holds at least ``nbytes``."""
        return self.buffer is not None and self.buffer.numel() >= nbytes

    def suits(self, nbytes: int, *, at_least: bool = False) -> bool:
        """Return whether the buffer is what would be made for ``nbytes``, or may stay because it is larger."""
        if self.buffer is None or not nbytes:
            return self.buffer is None and not nbytes
        return self.has(nbytes) and (at_least or self.buffer.numel() == nbytes)

    def make(self, nbytes: int) -> None:
        assert self.buffer is None, f"{self._purpose} made twice"
        self.buffer = self._device.allocate(nbytes, self._purpose)
        self.address = address_of(self.buffer)

    def grow(self, nbytes: int) -> None:
        """Replace the memory by one of ``nbytes``, or raise `DeviceOutOfMemory`. No replica may refer to it."""
        self.release()
        self.make(nbytes)

    def release(self) -> None:
        """Free the memory once the work enqueued on it is done: a gradient may still be downloading."""
        for event in self._last_uses():
            event.wait()
        self.abandon()
        if self.buffer is not None:
            self._device.free(self.buffer)
        self.buffer = None
        self.address = 0

    def abandon(self) -> None:
        """Forget what is enqueued: it is over, or after a failure may never finish."""
        self.last_use = None

    def _last_uses(self) -> list[Event]:
        return [] if self.last_use is None else [self.last_use]

    def cut(self, sizes: Iterable[int]) -> list[Tensor]:
        assert self.buffer is not None, f"{self._purpose} used before it was allocated"
        parts, start = [], 0
        for size in sizes:
            parts.append(self.buffer[start : start + size])
            start += size
        assert start <= self.buffer.numel(), f"{start} bytes do not fit the {self._purpose}"
        return parts


class Region:
    """A part of a `StageArena`, which one slot has for its weights or its gradients.

    Attributes:
        parts: start and end of each of its tensors, in the order in which they were placed.
        start, end: its bytes, as far as no later slot has had them.
        last_use: end of the last work on the region; None while its slot may still use it.
    """

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        self.parts = parts
        self.start = min((start for start, _ in parts), default=0)
        self.end = max((end for _, end in parts), default=0)
        self.last_use: Event | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def give_way(self, start: int, end: int) -> None:
        """Leave bytes ``start`` to ``end`` to another region that came after this one."""
        if start <= self.start < end:
            self.start = min(end, self.end)
        elif start < self.end <= end:
            self.end = start


@dataclass(eq=False)
class Place:
    """The part of a `StageArena` that a slot has. ``at_end``: whether it grows from the arena's end, not its start."""

    at_end: bool
    weights: Region
    gradients: Region | None = None


class StageArena(Arena):
    """The weights and gradients of a worker's open slot, and of the slots before and after it.

    Slots lie at the two ends in turn: weights from the end inwards, in the order of their use, then gradients::

        [ weights of k | gradients of k |    ...    | gradients of k - 1 | weights of k + 1 ]

    What is written to a place has to wait for the last use of every region that it overlaps (`before`).
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, "weights and gradients")
        self._regions: list[Region] = []
        self._at_end = False
        """Where the next slot lies."""

    def enter(self, weights: Sequence[int]) -> Place:
        """Return the place of the next slot, whose layers have so many bytes of ``weights``."""
        place = Place(self._at_end, self._region(weights, at_end=self._at_end))
        self._at_end = not self._at_end
        self._regions.append(place.weights)
        return place

    def retire(self, place: Place) -> None:
        """Note that its slot is closed: who comes after it comes after all that were there before it, too."""
        own = [region for region in (place.weights, place.gradients) if region is not None]
        for older in self._regions[: self._regions.index(place.weights)]:
            for region in own:  # not all between them: a slot that shares weights has an empty region at the start
                older.give_way(region.start, region.end)
        self._regions = [region for region in self._regions if region.nbytes or region.last_use is None]

    def add_gradients(self, place: Place, gradients: Sequence[int]) -> Region:
        """Place so many bytes of ``gradients`` behind the weights of a slot."""
        region = place.gradients = self._region(gradients, at_end=place.at_end, behind=place.weights.nbytes)
        in_use = [other for other in self._overlapping(region.start, region.end, place) if other.last_use is None]
        assert not in_use, f"{self._purpose} of two slots that are in use overlap"
        self._regions.append(region)
        return region

    def before(self, start: int, end: int, place: Place) -> list[Region] | None:
        """Return the regions of earlier slots that bytes ``start`` to ``end`` of ``place`` overlap.

        None if one is still in use. A later slot waits for this one, whose weights may not all have come.
        """
        earlier = self._regions[: self._regions.index(place.weights)]
        found = [region for region in self._overlapping(start, end, place) if region in earlier]
        return None if any(region.last_use is None for region in found) else found

    def tensors(self, region: Region) -> list[Tensor]:
        """Return the memory of each part of ``region``."""
        return [self.bytes_of(start, end) for start, end in region.parts]

    def bytes_of(self, start: int, end: int) -> Tensor:
        assert self.buffer is not None, f"{self._purpose} used before they were allocated"
        return self.buffer[start:end]

    def abandon(self) -> None:
        self._regions.clear()

    def _last_uses(self) -> list[Event]:
        return [region.last_use for region in self._regions if region.last_use is not None]

    def _overlapping(self, start: int, end: int, place: Place) -> list[Region]:
        own = (place.weights, place.gradients)
        return [r for r in self._regions if r not in own and start < r.end and r.start < end]

    def _region(self, sizes: Sequence[int], *, at_end: bool, behind: int = 0) -> Region:
        whole = self._whole
        parts, start = [], behind
        for size in sizes:
            parts.append((whole - start - size, whole - start) if at_end else (start, start + size))
            start += size
        assert start <= whole, f"{start} bytes do not fit the {self._purpose}"
        return Region(parts)

    @property
    def _whole(self) -> int:
        """Bytes that have places, so that those which grow from the end are aligned, too."""
        return 0 if self.buffer is None else self.buffer.numel() // ALIGNMENT * ALIGNMENT


def address_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, which all views of it share; 0 without memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else 0
