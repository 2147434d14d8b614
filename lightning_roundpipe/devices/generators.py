"""Who may draw from a generator: one at a time, from seeding to return."""

from __future__ import annotations

import threading

from lightning_roundpipe.devices import thread_owner


class GeneratorLock:
    """A reentrant lock that belongs to whom its thread works for, so that autograd's threads may enter it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``threading.RLock.acquire``."""
        me = thread_owner.thread()
        if self._owner == me:  # nobody else makes it so, or changes it then
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """As ``threading.RLock.release``."""
        if self._owner != thread_owner.thread():
            raise RuntimeError("a lock was released by a thread that does not hold it")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


HOST_LOCK = GeneratorLock()
"""Of the host's generators: torch's, which emulated devices draw from as well, Python's and NumPy's."""
