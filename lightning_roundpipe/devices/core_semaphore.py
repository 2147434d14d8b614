"""One process-wide semaphore for the cores that emulated devices share.

On a machine that two forwards keep busy, four at once take longer than two and then two. A layer uses as many cores as
an emulated device has intra-op threads (`intraop_threads`). A thread that holds a permit must not wait: it could wait
for a thread that needs the permit. Every wait checks for that.
"""

from __future__ import annotations

import functools
import queue
import threading
import time

from lightning_roundpipe.devices import intraop_threads


class Semaphore:
    """The context in which a thread holds one of so many permits and is recorded as its holder."""

    __slots__ = ("_permits",)

    def __init__(self, permits: int) -> None:
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()  # in C; `threading.Semaphore` is in Python
        for _ in range(permits):
            self._permits.put(None)

    def __enter__(self) -> None:
        assert _mine.held is None, "a permit is not reentrant: this thread would wait for itself"
        self._permits.get()
        _mine.held = self

    def __exit__(self, *_: object) -> None:
        _mine.held = None
        self._permits.put(None)


class _Permits(threading.local):
    held: Semaphore | None = None
    """The semaphore of which the calling thread holds a permit."""


_mine = _Permits()


def concurrent_devices() -> int:
    """Return how many emulated devices compute at once."""
    return max(1, intraop_threads.cores() // intraop_threads.threads_per_device())


@functools.cache
def semaphore(permits: int) -> Semaphore:
    """Return the semaphore that all devices share. Only the main thread makes devices."""
    return Semaphore(permits)


def emulated_work(seconds: float) -> None:
    """Take ``seconds`` as a device's work would, but without a core, so all emulated devices can work at once.

    For layers of known duration that compute nothing. Inside a layer's forward, or in the backward of an autograd
    Function there, it releases the thread's permit while it sleeps.
    """
    if seconds <= 0:
        return
    if (held := _mine.held) is None:
        time.sleep(seconds)
        return
    held.__exit__()
    try:
        time.sleep(seconds)
    finally:
        held.__enter__()


def assert_none_held() -> None:
    """Assert that the calling thread holds no permit. Call it before anything that may block."""
    assert _mine.held is None, "a thread must not wait while it holds a permit: others need it to go on"
