"""What is resident on an emulated device: storages, counted once each, against a limit.

Emulated device memory is host memory like any other, so "does it fit on the GPU" has to be bookkeeping. The unit is
the storage and not the tensor, because views (parameters in an arena, a tensor and its transpose) take no memory of
their own. A storage can be resident for several reasons at once (a boundary that autograd also saved); it counts until
the last of them is gone, and under the oldest of them.

Reasons may end in a destructor, which Python can run anywhere, even inside this module with the lock held. So ending
one is only an entry in a journal, which is a deque, and the books are brought up to date from it when they are next
looked at. Where there is no limit that might be exceeded, a reason begins with an entry, too: the journal is in order,
so the peak is exact, and a layer whose graph saves forty tensors takes no lock forty times.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import TrackedTensors
from lightning_roundpipe.devices.errors import out_of_memory

LONGEST_JOURNAL = 4096
"""Entries. Bounds what the journal takes, and how long the next look at the books does."""


class Ledger:
    """The books of one device.

    Args:
        device: how to call the device in an error.
        limit: bytes that fit, or ``None`` to count without a limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self.limit = limit
        self._device = device
        self._lock = threading.Lock()
        self._journal: deque[tuple[int, int, str]] = deque()
        """(key, bytes, purpose) of what began; bytes are -1 where it ended."""
        self._entries: dict[int, tuple[int, list[str]]] = {}
        self._tracked: dict[tuple[int, str], weakref.ref[torch.UntypedStorage]] = {}
        self._total = 0
        self._peak = 0

    def add(self, key: int, nbytes: int, purpose: str) -> None:
        """Count storage ``key`` (its ``_cdata``) for one more reason. The caller keeps the storage alive until ``end``.

        Raises:
            DeviceOutOfMemory: it was not resident, and does not fit.
        """
        if self.limit is None:
            with (
                self._lock
            ):  # up to which torch.compile traces hooks: it would take the journal's length for a constant
                self._journal.append((key, nbytes, purpose))
                if len(self._journal) > LONGEST_JOURNAL:
                    self._settle()
            return
        with self._lock:
            self._settle()
            if key not in self._entries and self._total + nbytes > self.limit:
                raise out_of_memory(self._device, nbytes, purpose, self._by_purpose(), self.limit, emulated=True)
            self._begin(key, nbytes, purpose)

    def _begin(self, key: int, nbytes: int, purpose: str) -> None:
        if (entry := self._entries.get(key)) is not None:
            entry[1].append(purpose)
            return
        self._entries[key] = (nbytes, [purpose])
        self._total += nbytes
        if self._total > self._peak:
            self._peak = self._total

    def track_until_freed(self, storage: torch.UntypedStorage, purpose: str) -> None:
        """Count ``storage`` until it dies, once for a purpose.

        Raises:
            DeviceOutOfMemory: it was not resident, and does not fit.
        """
        place = storage._cdata, purpose
        if place in self._tracked:
            return
        # torch keeps the Python object for as long as there is the storage.
        reference = weakref.ref(storage, partial(self._died, place))
        if self._tracked.setdefault(place, reference) is not reference:
            return
        try:
            self.add(place[0], storage.nbytes(), purpose)
        except BaseException:
            del self._tracked[place]
            raise

    def _died(self, place: tuple[int, str], reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._tracked.pop(place, None)
        self.end(*place)

    def end(self, key: int, purpose: str) -> None:
        """One reason of ``key`` is over. Safe in a destructor."""
        self._journal.append((key, -1, purpose))

    def resident(self) -> int:
        """Bytes that are counted now."""
        with self._lock:
            self._settle()
            return self._total

    def by_purpose(self) -> dict[str, int]:
        """The same, by the oldest reason of each storage."""
        with self._lock:
            self._settle()
            return self._by_purpose()

    def peak(self) -> int:
        """The most bytes that were counted at once since the last ``reset_peak``."""
        with self._lock:
            self._settle()
            return self._peak

    def reset_peak(self) -> None:
        """Begin a new peak at what is counted now."""
        with self._lock:
            self._settle()
            self._peak = self._total

    def _settle(self) -> None:
        while self._journal:
            key, nbytes, purpose = self._journal.popleft()
            if nbytes >= 0:
                self._begin(key, nbytes, purpose)
                continue
            nbytes, purposes = self._entries[key]
            purposes.remove(purpose)
            if not purposes:
                del self._entries[key]
                self._total -= nbytes

    def _by_purpose(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for nbytes, purposes in self._entries.values():
            sums[purposes[0]] += nbytes
        return dict(sums)


class LedgerTrackedTensors(TrackedTensors):
    """Storages that a ledger counts until this is released or dies."""

    def __init__(self, ledger: Ledger, tensors: Iterable[Tensor], purpose: str) -> None:
        self._ledger, self._purpose = ledger, purpose
        self._storages: dict[int, torch.UntypedStorage] = {}
        try:
            for tensor in tensors:
                if tensor.layout is not torch.strided:
                    continue  # sparse tensors have no storage of their own, and layers do not pass them
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    ledger.add(storage._cdata, storage.nbytes(), purpose)
                    self._storages[storage._cdata] = storage
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        while True:
            try:
                key, storage = self._storages.popitem()
            except KeyError:
                return
            self._ledger.end(key, self._purpose)
            del storage  # only now: its address may belong to another storage from here on

    def __del__(self) -> None:
        self.release()
