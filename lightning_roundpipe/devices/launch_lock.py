"""One thread at a time runs a layer's Python code, as long as that takes little time.

Each torch operation releases the interpreter's lock and takes it again. While two threads run layers, each operation
therefore hands that lock to the other thread and waits to get it back, which takes longer than a small operation does:
a step of a narrow Qwen3 with eight workers took 3.2 CPU seconds so and takes 2.2 with this lock. The interpreter runs
one thread at a time anyway, so taking turns call by call loses nothing.

It would lose something where a call waits: for a GPU, or for an operation on the CPU that takes long. Hence the lock is
for calls that were short when they last ran, the backward of a layer does not take it (autograd runs that without the
interpreter), and a thread that does not get it in time goes on without it. Nothing depends on who has it.
"""

from __future__ import annotations

import threading

SHORT_S = 0.005
"""Seconds that a call takes at most to be one of those that take turns."""
PATIENCE_S = 0.02
"""Seconds that a thread waits at most for its turn."""

_lock = threading.Lock()
_mine = threading.local()


def acquire() -> None:
    """Wait for the calling thread's turn, but not for long."""
    _mine.owned = _lock.acquire(timeout=PATIENCE_S)


def release() -> bool:
    """Give the turn on. Returns whether the calling thread had it."""
    owned = getattr(_mine, "owned", False)
    if owned:
        _mine.owned = False
        _lock.release()
    return owned
