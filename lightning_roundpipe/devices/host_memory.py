"""How much of the host's memory there is to pin.

Pinned pages are a process's memory like any other: the limits of its control groups count them, and a process that
exceeds one is killed. The limit of locked memory (``ulimit -l``) is for ``mlock`` and does not count what CUDA pins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SHARE = 0.75
"""Of the memory that is free: what weights that could stay in files may take."""

_ROOT = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """A control group's limit and use, and what of that could be freed, by its name in ``memory.stat``."""

    limit: str
    used: str
    inactive: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def worth_copying(nbytes: int, pin_memory: str) -> bool:
    """Whether to pin a copy of so many bytes that could be read from files: ``"auto"`` does if there is room."""
    if pin_memory == "auto":
        return nbytes <= SHARE * free_bytes()
    return pin_memory == "on"


def free_bytes(root: Path = _ROOT, mine: Path = _MINE) -> int:
    """Memory that is free or can be freed; in a container or a job, no more than what is left to it.

    Args:
        root: where control groups are mounted.
        mine: says which of them the process is in.
    """
    free = int(psutil.virtual_memory().available)
    for group, files in _groups(root, mine):
        with suppress(OSError, ValueError):  # one without a limit
            room = int((group / files.limit).read_text()) - int((group / files.used).read_text())
            read = re.search(rf"^{files.inactive} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, room + (int(read[1]) if read else 0))
    return max(0, free)


def _groups(root: Path, mine: Path) -> Iterator[tuple[Path, _Files]]:
    """The process's control groups and those around them, each of which may have a limit.

    A container may see its own group as the root, whatever path is said to be its.
    """
    lines = ["0::/"]
    with suppress(OSError):
        lines += mine.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        group = base / path.strip("/")
        for around in (group, *group.parents):
            if around.is_relative_to(base):
                yield around, files
