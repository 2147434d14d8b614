"""How long a thread that wakes up waits for the interpreter.

A thread that computes in Python holds the interpreter for 5 ms before another thread may run. A GPU whose worker waits
for it idles as long. So the switch interval is shorter while a step runs on GPUs, but no shorter than necessary,
because each switch costs some microseconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 1e-4
"""The switch interval in seconds while a step runs on GPUs."""

_HALF_A_MICROSECOND = 5e-7
"""``sys.setswitchinterval`` truncates to microseconds, so a value that it returned may lose its last one."""
_lock = threading.Lock()
_users = 0
_before = _ours = 0.0
"""The interval that the first user found, and the one it set."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Switch threads at least every `SWITCH_INTERVAL_S` inside the context. Any thread may enter.

    Several threads may be inside at once. The last one to leave restores the interval that the first one found, unless
    it was set to another value meanwhile.
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
