"""One heap for all threads, so that a layer is as fast on a worker's thread as in the main one.

glibc gives each thread a heap of its own, and what is freed at the end of such a heap goes back to the system at once.
A layer that makes and drops its activations there takes its memory anew from the system, page by page, again and again:
matrix products of a small model took 1.6 times as long. The main thread's heap has no such habit.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_M_ARENA_MAX = -8
"""From glibc's malloc.h."""


@functools.cache
def share_heap() -> None:
    """Let threads that start from now on use the main thread's heap, where the C library has such a switch."""
    if (mallopt := _of_glibc("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return what was freed to the system, where the C library has such a switch; it keeps what lies between others."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
