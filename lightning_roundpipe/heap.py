"""One malloc heap for all threads, so that a layer runs as fast on a worker's thread as on the main one.

glibc gives each thread its own heap and returns memory freed at the end of such a heap to the system at once. A layer
that allocates and frees activations there gets its pages from the system again and again: matrix products of a small
model took 1.6 times as long. The main thread's heap keeps them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_M_ARENA_MAX = -8
"""The constant of glibc's malloc.h."""


@functools.cache
def share_heap() -> None:
    """Let threads that start from now on use the main thread's heap, if the C library can."""
    if (mallopt := _of_glibc("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return freed memory to the system, if the C library can."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
