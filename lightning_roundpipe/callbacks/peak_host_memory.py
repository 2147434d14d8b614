"""The most memory that this process has held since a given moment.

The operating system's own peak is of the whole life of the process, so a second run in one process (a sweep) would show
the first one's. Linux can forget it; elsewhere the peak stays that of the process.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path


def forget_peak() -> None:
    """Starts the measurement again, where the system can."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed: the peak stays that of the process
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most bytes that this process has had in memory since ``forget_peak``, or since it began."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
