"""One process-wide semaphore for the cores that emulated devices share.

Four forwards at once on a machine that is busy with two take longer than two after two others. A layer takes as many
cores as an emulated device has intra-op threads (`intraop_threads`). A thread that holds a permit must not wait,
because it could wait for a thread that needs that permit, so every wait checks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices import intraop_threads

_semaphores: dict[int, threading.Semaphore] = {}
_semaphores_lock = threading.Lock()
_mine = threading.local()


def at_once() -> int:
    """How many emulated devices compute at once."""
    return max(1, intraop_threads.cores() // intraop_threads.team_size())


def semaphore() -> threading.Semaphore:
    """The one for the present size of teams: devices made under the same size share it."""
    permits = at_once()
    with _semaphores_lock:
        return _semaphores.setdefault(permits, threading.Semaphore(permits))


@contextmanager
def holding(permits: threading.Semaphore) -> Iterator[None]:
    """Hold one, and be known to."""
    assert getattr(_mine, "held", None) is None, "a permit is not reentrant: this thread would wait for itself"
    with permits:
        _mine.held = permits
        try:
            yield
        finally:
            _mine.held = None


def emulated_work(seconds: float) -> None:
    """Take ``seconds`` as a device's work would: without a core, so that all emulated devices can work at once.

    For layers of known duration that compute nothing. Called inside a layer's forward, or in the backward of an
    autograd Function there, it gives the thread's permit to others meanwhile.
    """
    permits: threading.Semaphore | None = getattr(_mine, "held", None)
    if permits is None:
        time.sleep(seconds)
        return
    _mine.held = None
    permits.release()
    try:
        time.sleep(seconds)
    finally:
        permits.acquire()
        _mine.held = permits


def assert_none_held() -> None:
    """Called by whatever may block."""
    assert getattr(_mine, "held", None) is None, (
        "a thread must not wait while it holds a permit: others need it to go on"
    )
