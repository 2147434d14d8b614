"""Joining threads, the C++ part of them included.

`Thread.join` returns when the thread's Python code has ended. Afterwards the thread still destroys its C++
thread-locals. Those of torch hold Python objects (`thread_owner` keeps one there, and autograd before 2.13 as well),
which are released under the interpreter's lock. If the interpreter is being finalized by then, CPython ends the
thread, and glibc does so by unwinding through torch's C++ frames, which aborts the process: a training that had
succeeded exits with signal 6.
"""

from __future__ import annotations

import os
import threading
import time

_LONGEST_S = 2.0
"""Seconds to wait for a thread whose Python code has ended. It takes microseconds, unless all cores are busy."""


def join(thread: threading.Thread, timeout: float | None = None) -> bool:
    """Wait until ``thread`` has ended, and on Linux until the operating system has none of it either.

    Args:
        timeout: seconds to wait for the thread's Python code; None waits without limit.

    Returns:
        Whether the thread has ended.
    """
    thread.join(timeout)
    if thread.is_alive():
        return False
    entry, deadline = f"/proc/self/task/{thread.native_id}", time.monotonic() + _LONGEST_S
    while os.path.exists(entry) and time.monotonic() < deadline:
        time.sleep(1e-4)
    return True
