"""What is resident on an emulated device: storages, counted once each, against a limit.

Emulated device memory is plain host memory, so the ledger decides what fits. It counts storages, not tensors, because
views (parameters in an arena, a transposed tensor) have no memory of their own. A storage may be resident for several
reasons at once (a boundary tensor that autograd saved too). It counts until its last reason ends, under the purpose of
its oldest one.

A reason may end in a destructor, which Python can run anywhere, even inside this module with the lock held. So `end`
only appends to a journal, a deque, and the next reader brings the books up to date. Without a limit, `add` appends to
the journal too, which costs less than updating the books. The journal is in order, so the peak is exact.

The callback of a weak reference is `deque.append` itself: an interrupt that Python raises in a callback of ours would
be printed and lost.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import TrackedTensors
from lightning_roundpipe.devices.errors import out_of_memory

LONGEST_JOURNAL = 4096
"""Entries. Bounds the journal's memory, and the time of the next read."""


@final
class _Tracked(weakref.ref[torch.UntypedStorage]):
    """A storage that counts until it is freed. Its journal entry is the reference itself."""

    __slots__ = ("key", "purpose")
    key: int
    purpose: str


class Ledger:
    """The books of one device.

    Args:
        device: name of the device in errors.
        limit: bytes that fit; ``None`` counts without a limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self.limit = limit
        self._device = device
        self._lock = threading.Lock()
        self._journal: deque[tuple[int, int, str] | _Tracked] = deque()
        """(key, bytes, purpose) of each reason that began; bytes are -1 where one ended. A reference: it was freed."""
        self.note = self._journal.append
        """Adds an entry, without a lock; `end` for callers that are in a hurry."""
        self._entries: dict[int, tuple[int, list[str]]] = {}
        self._tracked: dict[int, _Tracked] = {}
        self._total = 0
        self._peak = 0

    def add(self, key: int, nbytes: int, purpose: str) -> None:
        """Add a reason to count the storage ``key`` (its ``_cdata``). The caller keeps it alive until ``end``.

        Raises:
            DeviceOutOfMemory: the storage was not resident, and does not fit.
        """
        # torch.compile traces hooks up to a lock; without one it would take the journal's length for a constant.
        with self._lock:
            if self.limit is not None or len(self._journal) > LONGEST_JOURNAL:
                self._settle()
            if self.limit is not None and key not in self._entries and self._total + nbytes > self.limit:
                raise out_of_memory(self._device, nbytes, purpose, self._by_purpose(), self.limit, emulated=True)
            self._journal.append((key, nbytes, purpose))

    def track_until_freed(self, storage: torch.UntypedStorage, purpose: str) -> None:
        """Count ``storage`` until it is freed, under the first purpose given for it. For errors see `add`."""
        key = storage._cdata
        known = self._tracked.get(key)
        if known is not None:
            if known() is not None:
                return
            with self._lock:  # the storage that had this address is freed, which the journal says already
                self._settle()
        # torch keeps the Python object as long as the storage lives.
        reference = _Tracked(storage, self.note)
        reference.key, reference.purpose = key, purpose
        if self._tracked.setdefault(key, reference) is not reference:
            return
        try:
            self.add(key, storage.nbytes(), purpose)
        except BaseException:
            del self._tracked[key]
            raise

    def end(self, key: int, purpose: str) -> None:
        """End one reason of ``key``. Safe in a destructor."""
        self.note((key, -1, purpose))

    def resident(self) -> int:
        """Return the bytes counted now."""
        with self._lock:
            return self._settle()

    def holds(self, key: int) -> bool:
        """Return whether the storage ``key`` is counted now."""
        with self._lock:
            self._settle()
            return key in self._entries

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes counted now, by the oldest purpose of each storage."""
        with self._lock:
            self._settle()
            return self._by_purpose()

    def peak(self) -> int:
        """Return the most bytes counted at once since the last ``reset_peak``."""
        with self._lock:
            self._settle()
            return self._peak

    def reset_peak(self) -> None:
        """Start a new peak at the bytes counted now."""
        with self._lock:
            self._peak = self._settle()

    def _settle(self) -> int:
        """Bring the books up to date, and return the bytes counted now."""
        journal, entries, total, peak = self._journal, self._entries, self._total, self._peak
        while journal:
            noted = journal.popleft()
            if type(noted) is _Tracked:
                del self._tracked[noted.key]
                key, nbytes, purpose = noted.key, -1, noted.purpose
            else:
                key, nbytes, purpose = noted
            entry = entries.get(key)
            if nbytes >= 0 and entry is None:
                entries[key] = nbytes, [purpose]
                total += nbytes
                peak = max(peak, total)
                continue
            assert entry is not None, "a reason ended that never began"
            if nbytes >= 0:
                entry[1].append(purpose)
                continue
            entry[1].remove(purpose)
            if not entry[1]:
                del entries[key]
                total -= entry[0]
        self._total, self._peak = total, peak
        return total

    def _by_purpose(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for nbytes, purposes in self._entries.values():
            sums[purposes[0]] += nbytes
        return dict(sums)


class LedgerTrackedTensors(TrackedTensors):
    """Storages that a ledger counts until ``release()`` or the deletion of this object."""

    def __init__(self, ledger: Ledger, tensors: Iterable[Tensor], purpose: str) -> None:
        self._ledger, self._purpose = ledger, purpose
        self._storages: dict[int, torch.UntypedStorage] = {}
        try:
            for tensor in tensors:
                if tensor.layout is not torch.strided:
                    continue  # sparse tensors have no storage of their own, and are not passed between layers
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    ledger.add(storage._cdata, storage.nbytes(), purpose)
                    self._storages[storage._cdata] = storage
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        try:
            while self._storages:
                key, storage = self._storages.popitem()
                self._ledger.end(key, self._purpose)
                del storage  # last: from here on, another storage may get its address
        except KeyError:  # another thread releases them, too
            return

    __del__ = release
