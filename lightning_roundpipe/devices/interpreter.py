"""How long a thread that wakes up waits for the interpreter.

A thread that computes in Python keeps the interpreter for 5 ms before it lets another one in. A GPU that waits for its
next kernels is idle for as long. So the interval is shorter while a step runs on GPUs, and no shorter than that needs,
because each switch costs some microseconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 1e-4
"""Seconds between two switches, while a step runs on GPUs."""

_HALF_A_MICROSECOND = 5e-7
"""The interpreter cuts off what is no whole microsecond, and with it the last bit of what it has told."""
_lock = threading.Lock()
_users = 0
_before = _ours = 0.0
"""The intervals that the first user found, and set."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Within, threads switch every `SWITCH_INTERVAL_S`, or more often if they did before. Any thread may enter.

    Several may be within at the same time. The last one out restores what the first one found, unless the interval was
    set to another value meanwhile, which then stays.
    """
    global _users, _before, _ours
    with _lock:
        _users += 1
        if _users == 1:
            _before = sys.getswitchinterval()
            if _before > SWITCH_INTERVAL_S:
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            _ours = sys.getswitchinterval()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _before != _ours == sys.getswitchinterval():
                sys.setswitchinterval(_before + _HALF_A_MICROSECOND)
