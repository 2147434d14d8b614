"""torch's intra-op threads: how many each computing thread has, and when it has none.

Every thread that computes has its own OpenMP team. GNU's OpenMP, which torch on Linux comes with, lets a team's threads
spin for some milliseconds until the next operation. If the teams of the process together have more threads than cores,
they sleep after each operation instead, and waking them costs more than many operations take. So a thread that waits
ends its team. Other OpenMP libraries are left alone.

A team's thread that loses its core to another process delays the whole team, operation by operation. So emulated
devices compute with small teams, several devices at once: with fewer than eight cores an operation has one thread, and
no team. The number of threads decides how sums round, so it does not depend on the number of devices.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_roundpipe.devices.process_context import shared_context

CONCURRENT_DEVICES = 4
"""How many emulated devices compute at once, given as many cores."""

_SOFT = 1
"""``omp_pause_soft``: ends the threads, keeps the settings."""


@functools.cache
def _torch_cpu() -> ctypes.PyDLL | None:
    """Load the library that torch computes with, and its dependencies; None where it is not known, as off Linux."""
    try:
        return ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


@functools.cache
def _openmp() -> ctypes.PyDLL | None:
    """Return torch's library if it computes with GNU's OpenMP, else None."""
    torch_cpu = _torch_cpu()
    # hasattr also looks into the library's dependencies. LLVM's and Intel's OpenMP pause the whole process.
    ours = hasattr(torch_cpu, "omp_pause_resource_all") and not hasattr(torch_cpu, "kmp_set_blocktime")
    return torch_cpu if ours else None


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_device() -> int:
    """Return an emulated device's intra-op threads: its share of the cores, at most ``torch.get_num_threads()``."""
    return min(torch.get_num_threads(), max(1, cores() // CONCURRENT_DEVICES))


@shared_context
def limit_num_threads() -> Iterator[None]:
    """Limit the calling main thread, and threads that call `apply_num_threads`, to an emulated device's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_device())
    yield
    torch.set_num_threads(before)


@contextmanager
def reserve_cores(others: int) -> Iterator[None]:
    """Limit the calling thread's team to all cores but ``others``, at least one, and never more than torch's setting.

    ``torch.set_num_threads`` would limit new threads as well. Where torch's OpenMP is not found, nothing changes.
    """
    before = torch.get_num_threads()
    _set_num_threads(min(before, max(1, cores() - others)))
    try:
        yield
    finally:
        _set_num_threads(before)


def _set_num_threads(size: int) -> None:
    getattr(_torch_cpu(), "omp_set_num_threads", lambda size: None)(size)


def apply_num_threads() -> None:
    """Give a new thread a team of the size that torch was set to last.

    Otherwise the thread uses OpenMP's default until torch first asks for the size, after its first matrix product.
    """
    torch.get_num_threads()


def release_intraop_threads() -> None:
    """End the calling thread's team, before it waits. Its next operation starts a new one, in less than 0.1 ms."""
    if torch.get_num_threads() > 1 and (openmp := _openmp()) is not None:
        openmp.omp_pause_resource_all(_SOFT)
