"""How much host memory is free to pin, and the most that the process has taken.

Pinned pages count as the process's memory: a process that exceeds the limit of its control groups is killed. The limit
of locked memory (``ulimit -l``) applies to ``mlock`` and does not count what CUDA pins.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SHARE = 0.75
"""The share of free memory that weights may take if they could stay in mapped files."""

_ROOT, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where control groups are mounted, and the file that names the process's."""


class _Files(NamedTuple):
    """File names of a control group's limit and use, and the entry of ``memory.stat`` that counts freeable pages."""

    limit: str
    used: str
    inactive: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def worth_copying(nbytes: int, pin_memory: str) -> bool:
    """Return whether to copy ``nbytes`` of mapped files to pinned memory. ``"auto"``: if there is room."""
    return nbytes <= SHARE * free_bytes() if pin_memory == "auto" else pin_memory == "on"


def free_bytes() -> int:
    """Return the bytes that are free or can be freed, at most what the process's control groups leave."""
    free = int(psutil.virtual_memory().available)
    for group, files, limit in _limits():
        with suppress(OSError, ValueError):
            room = limit - int((group / files.used).read_text())
            read = re.search(rf"^{files.inactive} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, room + (int(read[1]) if read else 0))
    return max(0, free)


def total_bytes() -> int:
    """Return the bytes of the machine's memory, at most what the process's control groups allow."""
    return min([int(psutil.virtual_memory().total), *(limit for _, _, limit in _limits())])


def _limits() -> Iterator[tuple[Path, _Files, int]]:
    """Yield those of `_groups` that have a limit, with its bytes."""
    for group, files in _groups():
        try:
            limit = int((group / files.limit).read_text())
        except (OSError, ValueError):  # no such file, or no number in it
            continue
        yield group, files, limit


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the process's control groups and their parents, each of which may have a limit.

    A container may see its own group as the root, whatever path `_MINE` names.
    """
    lines = ["0::/"]
    with suppress(OSError):
        lines += _MINE.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (_ROOT / "memory", _VERSION_1) if controllers else (_ROOT, _VERSION_2)
        group = base / path.strip("/")
        for around in (group, *group.parents):
            if around.is_relative_to(base):
                yield around, files


def forget_peak() -> None:
    """Reset the peak of this process, where the system can: a sweep has several runs in one process."""
    with suppress(OSError):  # not Linux, or not permitted
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
