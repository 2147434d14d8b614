"""How much of the host's memory there is to pin."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

SHARE = 0.75
"""Of the memory that is free: what weights that could stay in files may take."""

_CONTAINER = Path("/sys/fs/cgroup")


def worth_copying(nbytes: int, pin_memory: str) -> bool:
    """Whether to pin a copy of so many bytes that could be read from files: ``"auto"`` does if there is room."""
    if pin_memory == "auto":
        return nbytes <= SHARE * free_bytes()
    return pin_memory == "on"


def free_bytes(container: Path = _CONTAINER) -> int:
    """Memory that is free or can be freed; in a container, no more than what is left to it."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        room = int((container / "memory.max").read_text()) - int((container / "memory.current").read_text())
        read = re.search(r"^inactive_file (\d+)$", (container / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, room + (int(read[1]) if read else 0))
    return free
