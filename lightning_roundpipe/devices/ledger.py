"""What is resident on an emulated device: storages, counted once each, against a limit.

Emulated device memory is host memory like any other, so "does it fit on the GPU" has to be bookkeeping. The unit is
the storage and not the tensor, because views (parameters in an arena, a tensor and its transpose) take no memory of
their own. A storage can be resident for several reasons at once (a boundary that autograd also saved); it counts until
the last of them is gone, and under the oldest of them.

Reasons may end in a destructor, which Python can run anywhere, even inside this module with the lock held. So ending
one is only an append to a deque, and the books are brought up to date at the next look at them: before anything is
added, so the peak is exact.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import Hold
from lightning_roundpipe.devices.errors import out_of_memory


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
        self._ended: deque[tuple[int, str]] = deque()
        self._entries: dict[int, tuple[int, list[str]]] = {}
        self._total = 0
        self._peak = 0

    def add(self, key: int, nbytes: int, purpose: str) -> None:
        """Count storage ``key`` (its ``_cdata``) for one more reason. The caller keeps the storage alive until ``end``.

        Raises:
            DeviceOutOfMemory: it was not resident, and does not fit.
        """
        with self._lock:
            self._settle()
            if (entry := self._entries.get(key)) is not None:
                entry[1].append(purpose)
                return
            if self.limit is not None and self._total + nbytes > self.limit:
                raise out_of_memory(self._device, nbytes, purpose, self._by_purpose(), self.limit, emulated=True)
            self._entries[key] = (nbytes, [purpose])
            self._total += nbytes
            self._peak = max(self._peak, self._total)

    def follow(self, storage: torch.UntypedStorage, purpose: str) -> None:
        """Count ``storage`` until it dies, once for a purpose.

        Raises:
            DeviceOutOfMemory: it was not resident, and does not fit.
        """
        key = storage._cdata
        with self._lock:
            self._settle()  # what had the address before has ended
            followed = key in self._entries and purpose in self._entries[key][1]
        if not followed:
            self.add(key, storage.nbytes(), purpose)
            # torch keeps the Python object for as long as there is the storage.
            weakref.finalize(storage, self.end, key, purpose).atexit = False

    def end(self, key: int, purpose: str) -> None:
        """One reason of ``key`` is over. Safe in a destructor."""
        self._ended.append((key, purpose))

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
        return self._peak

    def reset_peak(self) -> None:
        """Begin a new peak at what is counted now."""
        with self._lock:
            self._settle()
            self._peak = self._total

    def _settle(self) -> None:
        while self._ended:
            key, purpose = self._ended.popleft()
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


class CountedHold(Hold):
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
