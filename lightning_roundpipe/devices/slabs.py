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
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. Blocks begin and end at multiples of it, as torch's memory on a GPU does."""

SLAB = 64 << 20
"""Size of a slab in bytes, unless a block needs more."""

GROWTH = 8
"""A new slab is at least the registered total divided by this, because many slabs would fragment."""

_Block = tuple[int, int, int]
"""Number of the slab, start, and size, in bytes."""


class Slabs:
    """An allocator of blocks of page-locked memory, which ``register`` makes in slabs of at least ``slab`` bytes."""

    def __init__(self, register: Callable[[int], Tensor], slab: int = SLAB) -> None:
        self._register, self._slab = register, slab
        self._lock = threading.Lock()
        self._slabs: dict[int, Tensor] = {}
        self._made = 0
        self._free: list[_Block] = []
        """In order. They are few, as free neighbours merge."""
        self._returned: deque[_Block] = deque()

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised block of shape ``(nbytes,)``, uint8. Its memory is freed with its last view.

        Raises:
            RuntimeError: ``register`` failed when no block fitted, even after unused slabs were unregistered.
        """
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._settle()
            fitting = [block for block in self._free if block[2] >= size]
            if not fitting:
                fitting = [self._grow(size)]
            found = slab, start, available = min(fitting, key=itemgetter(2))
            index = bisect_left(self._free, found)
            self._free[index : index + 1] = [(slab, start + size, available - size)] if available > size else []
            memory = self._slabs[slab][start : start + size]
        lent = torch.frombuffer(memory.numpy(), dtype=torch.uint8)  # its own storage, whose end `finalize` sees
        weakref.finalize(lent.untyped_storage(), self._returned.append, (slab, start, size)).atexit = False
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

    def _settle(self) -> None:
        """Free the blocks that have been returned, each together with its free neighbours."""
        while self._returned:
            slab, start, size = self._returned.popleft()
            first = last = bisect_left(self._free, (slab, start, size))
            end = start + size
            if last < len(self._free) and self._free[last][:2] == (slab, end):
                end += self._free[last][2]
                last += 1
            if first and self._free[first - 1][0] == slab and sum(self._free[first - 1][1:]) == start:
                first -= 1
                start = self._free[first][1]
            self._free[first:last] = [(slab, start, end - start)]

    def _grow(self, size: int) -> _Block:
        """Register a slab for a block of ``size`` bytes: a generous one, or an exact one if that fails. Return it."""
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
        self._free.append(whole := (self._made, 0, slab.numel() // ALIGNMENT * ALIGNMENT))
        self._made += 1
        return whole

    def _give_unused_back(self) -> None:
        for number, slab in list(self._slabs.items()):
            whole = (number, 0, slab.numel() // ALIGNMENT * ALIGNMENT)
            if whole in self._free:
                self._free.remove(whole)
                del self._slabs[number]
