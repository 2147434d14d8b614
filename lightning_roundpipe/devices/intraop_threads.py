"""torch's intra-op threads, of which every thread that computes has a team of its own, and who has one when.

GNU's OpenMP, with which torch comes on Linux, lets a team's threads look out for the next operation for some
milliseconds, unless the teams of the process together have more threads than there are cores: then it puts them to
sleep after each operation, and waking them costs more than many operations take. So whoever waits has no team. Another
OpenMP is left alone.

A thread of a team that has lost its core to another process keeps the others waiting, operation by operation. So
emulated devices compute with small teams, and several devices at once: with fewer than eight cores an operation has
one thread, and there is no team. How many threads an operation has decides how sums are rounded, so the number does not
depend on how many devices there are.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CONCURRENT_DEVICES = 4
"""Emulated devices that compute at once, if there are so many cores."""
_before: list[int] = []
"""For each who limits teams now, how large they were before."""

_SOFT = 1
"""``omp_pause_soft``: threads go, settings stay."""


@functools.cache
def _torch_cpu() -> ctypes.PyDLL | None:
    """What torch computes with, and the libraries that it depends on."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def _openmp() -> ctypes.PyDLL | None:
    """GNU's, if it is what torch computes with."""
    if (torch_cpu := _torch_cpu()) is None:
        return None
    # A symbol is looked for in what a library depends on, too. LLVM's and Intel's pause the whole process.
    ours = hasattr(torch_cpu, "omp_pause_resource_all") and not hasattr(torch_cpu, "kmp_set_blocktime")
    return torch_cpu if ours else None


@functools.cache
def _pause() -> Callable[[int], object]:
    openmp = _openmp()
    return (lambda kind: None) if openmp is None else openmp.omp_pause_resource_all


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_device() -> int:
    """Intra-op threads of an emulated device: a share of the cores, or fewer if the process is told to use fewer."""
    return min(torch.get_num_threads(), max(1, cores() // CONCURRENT_DEVICES))


@contextmanager
def limit_num_threads() -> Iterator[None]:
    """Within, threads that `apply_num_threads` compute as emulated devices do, and so does the calling one. For the
    main thread.

    Several may be within at the same time; the last one out restores the number that the first one found.
    """
    size = threads_per_device()
    _before.append(torch.get_num_threads())
    torch.set_num_threads(size)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            torch.set_num_threads(before)


@contextmanager
def reserve_cores(others: int) -> Iterator[None]:
    """Within, the calling thread's team has all cores but ``others``, and one at least. Never more than torch was told.

    Other threads keep their size, for which ``torch.set_num_threads`` would not do: it sets that of new threads, too.
    Where torch's OpenMP is not found, which is known on Linux, nothing changes.
    """
    before = torch.get_num_threads()
    _set_num_threads(min(before, max(1, cores() - others)))
    try:
        yield
    finally:
        _set_num_threads(before)


def _set_num_threads(size: int) -> None:
    torch_cpu = _torch_cpu()
    if torch_cpu is not None and hasattr(torch_cpu, "omp_set_num_threads"):
        torch_cpu.omp_set_num_threads(size)


def apply_num_threads() -> None:
    """At the start of a thread: its team is as large as torch was told last.

    Without this, a thread takes OpenMP's own default until torch first asks how large the team is, which comes after
    the thread's first matrix product.
    """
    torch.get_num_threads()


def release_intraop_threads() -> None:
    """Before the calling thread waits: end its team. Its next operation starts a new one, in less than 0.1 ms."""
    _pause()(_SOFT)
