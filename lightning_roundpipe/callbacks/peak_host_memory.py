"""The peak memory of this process since a given moment.

The operating system's peak covers the whole life of the process, so a second run in one process (a sweep) would show
the first one's. Linux can reset it; elsewhere the peak stays that of the process.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path


def forget_peak() -> None:
    """Reset the peak, where the system can."""
    with contextlib.suppress(OSError):  # not Linux, or not permitted
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes since ``forget_peak``, or since the process began."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
