"""Page-locked memory that is used again: boundary tensors come and go, and locking pages takes as long as copying them.

Torch's caching allocator would round each of them up to a power of two. Here each has exactly its pages, and what is
kept for the next one never adds up to more than was once needed at the same time: before more is locked, the oldest
that nobody uses is given back.

Memory comes back in a destructor, which Python can run anywhere, even in here with the lock held. So that is only an
append to a deque, and the books are brought up to date when somebody asks for more.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class Pages:
    """Memory by the page.

    Args:
        lock: gives so many bytes, whole pages; they are given back with the last view.
        page: bytes of one.
    """

    def __init__(self, lock: Callable[[int], Tensor], page: int) -> None:
        self._lock_pages, self._page = lock, page
        self._lock = threading.Lock()
        self._returned: deque[Tensor] = deque()
        self._unused: deque[Tensor] = deque()
        """The oldest first."""
        self._used = self._idle = 0
        self._most = 0
        """That were used at the same time."""

    @property
    def locked(self) -> int:
        """Bytes that are locked now."""
        with self._lock:
            self._settle()
            return self._used + self._idle

    def take(self, nbytes: int) -> Tensor:
        """Shape ``(nbytes,)``, uint8, with anything in it; comes back here with its last view.

        Raises:
            what ``lock`` raises, when everything that is not used was given back.
        """
        size = -(-max(nbytes, 1) // self._page) * self._page
        with self._lock:
            self._settle()
            self._most = max(self._most, self._used + size)
            whole = self._kept(size)
            if whole is None:
                while self._unused and self._used + self._idle + size > self._most:
                    self._give_oldest_back()
                whole = self._locked_anew(size)
            self._used += size
        lent = torch.frombuffer(whole.numpy(), dtype=torch.uint8)  # a storage of its own, whose end can be seen
        weakref.finalize(lent.untyped_storage(), self._returned.append, whole).atexit = False
        return lent[:nbytes]

    def give_back(self) -> None:
        """Unlock what nobody uses."""
        with self._lock:
            self._settle()
            while self._unused:
                self._give_oldest_back()
            self._most = self._used

    def _settle(self) -> None:
        while self._returned:
            whole = self._returned.popleft()
            self._used -= whole.numel()
            self._idle += whole.numel()
            self._unused.append(whole)

    def _kept(self, size: int) -> Tensor | None:
        for index, whole in enumerate(self._unused):
            if whole.numel() == size:
                del self._unused[index]
                self._idle -= size
                return whole
        return None

    def _give_oldest_back(self) -> None:
        self._idle -= self._unused.popleft().numel()

    def _locked_anew(self, size: int) -> Tensor:
        try:
            return self._lock_pages(size)
        except RuntimeError:
            if not self._unused:
                raise
        while self._unused:  # there may be a limit, and these take of it
            self._give_oldest_back()
        return self._lock_pages(size)
