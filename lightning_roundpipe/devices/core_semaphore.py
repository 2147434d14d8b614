"""One process-wide semaphore for the cores that emulated devices share.

Four forwards at once on a machine that is busy with two take longer than two after two others. A layer takes as many
cores as an emulated device has intra-op threads (`intraop_threads`). A thread that holds a permit must not wait,
because it could wait for a thread that needs that permit, so every wait checks for it.
"""

from __future__ import annotations

import queue
import threading
import time

from lightning_roundpipe.devices import intraop_threads, launch_lock


class Semaphore:
    """A semaphore that takes a queue of tokens, which is written in C, where `threading.Semaphore` is Python.

    Args:
        permits: how many threads may hold one.
    """

    def __init__(self, permits: int) -> None:
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.acquire = self._tokens.get
        for _ in range(permits):
            self.release()

    def release(self) -> None:
        self._tokens.put(None)


_semaphores: dict[int, Semaphore] = {}
_semaphores_lock = threading.Lock()
_mine = threading.local()


def concurrent_devices() -> int:
    """How many emulated devices compute at once."""
    return max(1, intraop_threads.cores() // intraop_threads.threads_per_device())


def semaphore() -> Semaphore:
    """The one for the present size of teams: devices made under the same size share it."""
    permits = concurrent_devices()
    with _semaphores_lock:
        return _semaphores.setdefault(permits, Semaphore(permits))


class HeldCore:
    """A context in which the calling thread holds a permit of ``permits``, and is known to."""

    __slots__ = ("_permits",)

    def __init__(self, permits: Semaphore) -> None:
        self._permits = permits

    def __enter__(self) -> None:
        assert getattr(_mine, "held", None) is None, "a permit is not reentrant: this thread would wait for itself"
        self._permits.acquire()
        _mine.held = self._permits

    def __exit__(self, *_: object) -> None:
        _mine.held = None
        self._permits.release()


def emulated_work(seconds: float) -> None:
    """Take ``seconds`` as a device's work would: without a core, so that all emulated devices can work at once.

    For layers of known duration that compute nothing. Called inside a layer's forward, or in the backward of an
    autograd Function there, it gives the thread's permit to others meanwhile.
    """
    permits: Semaphore | None = getattr(_mine, "held", None)
    if permits is None:
        time.sleep(seconds)
        return
    launched = launch_lock.release()
    _mine.held = None
    permits.release()
    try:
        time.sleep(seconds)
    finally:
        permits.acquire()
        _mine.held = permits
        if launched:
            launch_lock.acquire()


def assert_none_held() -> None:
    """Called by whatever may block."""
    assert getattr(_mine, "held", None) is None, (
        "a thread must not wait while it holds a permit: others need it to go on"
    )
