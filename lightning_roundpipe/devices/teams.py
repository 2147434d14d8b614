"""torch's intra-op threads, of which every thread that computes has a team of its own, and who has one when.

GNU's OpenMP, with which torch comes on Linux, lets a team's threads look out for the next operation for some
milliseconds, unless the teams of the process together have more threads than there are cores: then it puts them to
sleep after each operation, and waking them costs more than many operations take. So whoever waits has no team. Another
OpenMP is left alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1
"""``omp_pause_soft``: threads go, settings stay."""


def _openmp() -> ctypes.PyDLL | None:
    """GNU's, if it is what torch computes with."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        torch_cpu = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    # A symbol is looked for in what a library depends on, too. LLVM's and Intel's pause the whole process.
    ours = hasattr(torch_cpu, "omp_pause_resource_all") and not hasattr(torch_cpu, "kmp_set_blocktime")
    return torch_cpu if ours else None


@functools.cache
def _pause() -> Callable[[int], object]:
    openmp = _openmp()
    return (lambda kind: None) if openmp is None else openmp.omp_pause_resource_all


def disband() -> None:
    """Before the calling thread waits: end its team. Its next operation starts a new one, in less than 0.1 ms."""
    _pause()(_SOFT)
