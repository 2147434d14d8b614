"""Allocates the pages of large host buffers with several threads, spread over the memory of all processors.

A mapping has no pages until it is touched. Page-locking touches all of them in one thread, which zeroes less than the
memory's bandwidth allows. A page comes from the memory of the processor whose core touches it first, so on a machine
with two processors one of them would feed all GPUs. Here each of several threads first touches its share of a buffer,
on a core of the processor whose memory it should use. This needs no privileges, also in a container, and uses only the
cores and memory that ``numactl`` or a scheduler allows the process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE = 4 << 20
"""Consecutive bytes of one processor's memory: less than a chunk of a copy, so that each chunk uses all of them."""
MOST = 16
"""Most threads: as many zero as fast as memory allows."""
_HUGE = 2 << 20
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python 3.11 does not define."""
_NODES = Path("/sys/devices/system/node")


def make_pages(fresh: Tensor) -> None:
    """Allocate the pages of ``fresh`` (uint8, a whole untouched mapping), as huge pages where the system has them.

    Pages that cannot be allocated here are allocated at their first use. Their number is the same either way.
    """
    if sys.platform != "linux" or fresh.numel() < 2 * PIECE:
        return
    whole = fresh.numel() // _HUGE * _HUGE  # a last huge page would be larger than the rest of the buffer
    _madvise(fresh[:whole], mmap.MADV_HUGEPAGE)
    nodes = cores_by_node()
    pieces = torch.split(fresh, PIECE)
    threads = min(MOST, sum(map(len, nodes)), len(pieces)) // len(nodes) * len(nodes)
    if threads < 2:
        return
    makers = [
        threading.Thread(target=_make, args=(pieces[i::threads], nodes[i % len(nodes)]), name="roundpipe-pages")
        for i in range(threads)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()


def cores_by_node(nodes: Path = _NODES) -> list[set[int]]:
    """Return the cores that the calling thread may use, by memory node, or in one set if nodes are not known.

    Nodes without cores are skipped: they are not the host's memory (a GPU's may be one).
    """
    allowed = os.sched_getaffinity(0)
    found = []
    with suppress(OSError, ValueError):
        for number in _listed((nodes / "has_memory").read_text()):
            cores = set(_listed((nodes / f"node{number}" / "cpulist").read_text()))
            if cores & allowed:
                found.append(cores & allowed)
    return found or [allowed]


def _listed(text: str) -> list[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return list(itertools.chain.from_iterable(range(int(span[0]), int(span[-1]) + 1) for span in spans))


def _make(pieces: tuple[Tensor, ...], cores: set[int]) -> None:
    with suppress(OSError):  # the process may have been moved to other cores meanwhile
        os.sched_setaffinity(0, cores)  # the calling thread's
    for piece in pieces:
        if not _madvise(piece, _POPULATE_WRITE):
            piece.numpy()[:: mmap.PAGESIZE] = 0  # an older kernel, or a sandbox


def _madvise(memory: Tensor, advice: int) -> bool:
    """Call madvise, return whether the kernel took the advice. Unlike ``mmap.madvise``, it lets other threads run."""
    call: Any = ctypes.CDLL(None).madvise
    return int(call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), advice)) == 0
