"""Locks that give one thread at a time a random generator, from seeding to the last draw."""

from __future__ import annotations

import threading

from lightning_roundpipe.devices import thread_owner


class GeneratorLock:
    """A reentrant lock held by the thread's owner (`thread_owner`), so that autograd's threads may reenter it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, with the arguments and result of ``threading.RLock.acquire``."""
        me = thread_owner.thread()
        if self._owner == me:  # only this owner sets or clears it
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """Release the lock once; raise ``RuntimeError`` if the calling thread does not hold it."""
        if self._owner != thread_owner.thread():
            raise RuntimeError("a lock was released by a thread that does not hold it")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == thread_owner.thread()

    def give_up(self) -> int:
        """Release the lock, which the calling thread holds, however often it has been acquired. Return how often."""
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """Acquire the lock ``depth`` times."""
        for _ in range(depth):
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


HOST_LOCK = GeneratorLock()
"""Lock of the host's generators: Python's, NumPy's and torch's, from which emulated devices draw as well."""
