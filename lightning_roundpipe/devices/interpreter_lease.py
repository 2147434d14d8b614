"""Lets one of the engine's threads at a time run Python.

Each torch operation releases the interpreter's lock and takes it again. While two threads run Python, every operation
hands the lock to the other thread and waits to get it back, which takes longer than a small operation. The interpreter
runs one thread at a time anyway, so the engine's threads hold a lease on it, one after another:

    a thread acquires the lease when it begins a task ── [1]
    it releases the lease while it waits, and around work that does not need the interpreter ── [2]
    a lease that is held longer than `TERM_S` expires: the next thread takes it over ── [3]

Because of [3], an unforeseen wait, a long operation or slow user code delays other threads by a few milliseconds, and
cannot block them. Correctness does not depend on the lease. Threads that never acquire it, such as Lightning's main
thread, are not affected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

TERM_S = 0.005
"""Seconds after which another thread may take over the lease."""

_lock = threading.Lock()
"""Locked while a thread holds the lease."""


class _Lease:
    """One thread's lease. The thread that pops the token, its holder or the next one, owns `_lock`."""

    __slots__ = ("expires", "token")

    def __init__(self) -> None:
        self.expires = time.perf_counter() + TERM_S
        self.token = [None]

    def end(self) -> bool:
        """End the lease. Return False if it has ended already."""
        try:
            self.token.pop()  # atomic, so only one of two threads succeeds
        except IndexError:
            return False
        return True


_latest = _Lease()
_mine = threading.local()


def acquire() -> None:
    """Wait until the calling thread holds the lease [1]."""
    global _latest
    if not _lock.acquire(blocking=False):
        while True:
            lease = _latest
            if _lock.acquire(timeout=max(lease.expires - time.perf_counter(), 1e-4)):
                break
            if lease is _latest and time.perf_counter() >= lease.expires and lease.end():
                break  # [3]: `_lock` stays locked, and belongs to this thread
    _mine.lease = _latest = _Lease()


def release() -> bool:
    """Release the lease, if the calling thread has acquired it [2].

    Returns:
        Whether the thread had acquired it. The lease may have expired since.
    """
    lease: _Lease | None = getattr(_mine, "lease", None)
    if lease is None:
        return False
    _mine.lease = None
    if lease.end():
        _lock.release()
    return True


def released(wait: Callable[..., T], *args: Any) -> T:
    """Call ``wait`` without the lease [2]."""
    had = release()
    try:
        return wait(*args)
    finally:
        if had:
            acquire()
