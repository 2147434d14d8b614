"""Page-locked memory for boundary tensors, allocated from a few large registrations.

Registering memory with CUDA takes as long as copying it, holds a lock of the driver that kernel launches on all GPUs
may wait for, and works on whole pages only. Boundary tensors come and go with every microbatch, and their sizes change
with the sequence lengths of a batch. So blocks are cut from slabs by best fit, freed neighbours merge, and a slab stays
registered until the devices close. A step frees all its blocks, so the next one starts with whole slabs: after the
largest batch, nothing is registered any more, whatever the lengths.

A block is freed in a destructor, which Python can run anywhere, even in this module with the lock held. So the
destructor only appends to a deque, and `take` does the rest.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. Blocks begin and end at multiples of it, as torch's memory on a GPU does."""

SLAB = 64 << 20
"""Size of a slab in bytes, unless a block needs more."""

GROWTH = 8
"""A new slab is at least the registered total divided by this, because many slabs would fragment."""

_Block = tuple[int, int, int]
"""Size, number of the slab, and start, in bytes. Size comes first because free blocks sort by it."""


class Slabs:
    """An allocator of blocks of page-locked memory, which ``register`` makes in slabs of at least ``slab`` bytes."""

    def __init__(self, register: Callable[[int], Tensor], slab: int = SLAB) -> None:
        self._register, self._slab = register, slab
        self._lock = threading.Lock()
        self._slabs: dict[int, Tensor] = {}
        self._made = 0
        self._free: list[_Block] = []
        self._starts: dict[tuple[int, int], int] = {}
        """Sizes of free blocks, by slab and start."""
        self._ends: dict[tuple[int, int], int] = {}
        """Starts of free blocks, by slab and end."""
        self._returned: deque[_Block] = deque()

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised block of shape ``(nbytes,)``, uint8. Its memory is freed with its last view.

        Raises:
            RuntimeError: ``register`` failed when no block fitted, even after unused slabs were unregistered.
        """
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._settle()
            found = self._best_fit(size)
            if found is None:
                self._grow(size)
                found = self._best_fit(size)
            assert found is not None
            available, slab, start = found
            self._remove(found)
            if available > size:
                self._add((available - size, slab, start + size))
            block = self._slabs[slab][start : start + size]
        lent = torch.frombuffer(block.numpy(), dtype=torch.uint8)  # its own storage, whose end `finalize` sees
        weakref.finalize(lent.untyped_storage(), self._returned.append, (size, slab, start)).atexit = False
        return lent[:nbytes]

    def reserve(self, nbytes: int) -> None:
        """Register memory until there are ``nbytes`` in total, so that no step has to."""
        with self._lock:
            missing = nbytes - sum(slab.numel() for slab in self._slabs.values())
            if missing > 0:
                self._grow(missing)

    def give_back(self) -> None:
        """Unregister the slabs that have no block in use."""
        with self._lock:
            self._settle()
            self._give_unused_back()

    def _best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self._free, (size, -1, -1))
        return self._free[index] if index < len(self._free) else None

    def _settle(self) -> None:
        while self._returned:
            size, slab, start = self._returned.popleft()
            if (before := self._ends.get((slab, start))) is not None:
                grown = self._starts[slab, before]
                self._remove((grown, slab, before))
                size, start = size + grown, before
            if (behind := self._starts.get((slab, start + size))) is not None:
                self._remove((behind, slab, start + size))
                size += behind
            self._add((size, slab, start))

    def _add(self, block: _Block) -> None:
        size, slab, start = block
        insort(self._free, block)
        self._starts[slab, start] = size
        self._ends[slab, start + size] = start

    def _remove(self, block: _Block) -> None:
        size, slab, start = block
        del self._free[bisect_left(self._free, block)]
        del self._starts[slab, start], self._ends[slab, start + size]

    def _grow(self, size: int) -> None:
        """Register a slab for a block of ``size`` bytes: a generous one, or an exact one if that fails."""
        everything = sum(slab.numel() for slab in self._slabs.values())
        for wanted in (max(size, self._slab, everything // GROWTH), size):
            try:
                slab = self._register(wanted)
                break
            except RuntimeError:
                self._give_unused_back()  # unused slabs may count towards a limit
        else:
            slab = self._register(size)
        self._slabs[self._made] = slab
        self._add((slab.numel() // ALIGNMENT * ALIGNMENT, self._made, 0))
        self._made += 1

    def _give_unused_back(self) -> None:
        for number, slab in list(self._slabs.items()):
            whole = (slab.numel() // ALIGNMENT * ALIGNMENT, number, 0)
            if self._starts.get((number, 0)) == whole[0]:
                self._remove(whole)
                del self._slabs[number]
