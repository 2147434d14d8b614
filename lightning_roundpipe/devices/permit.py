"""One process-wide semaphore for the cores that emulated devices share.

Four forwards at once on a machine that is busy with one take longer than one after another, since each uses all
intra-op threads. A thread that waited with a permit in hand could wait for somebody who needs that permit, so waiting
checks for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_semaphores: dict[int, threading.Semaphore] = {}
_semaphores_lock = threading.Lock()
_mine = threading.local()


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def semaphore() -> threading.Semaphore:
    """The one for the present number of intra-op threads: devices made under the same number share it."""
    permits = max(1, cores() // torch.get_num_threads())
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
