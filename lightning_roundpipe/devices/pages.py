"""The pages of large host buffers: made by several threads, and spread over the memory of all processors.

Memory that is mapped has no pages until it is touched. Page-locking touches all of them, in one thread, which zeroes
less than the memory could take; and a page comes from the memory of the processor whose core touches it first. So all
GPUs of a machine with two processors would be fed by one of them. Here a thread for each share of a buffer makes the
pages beforehand, on a core of the processor that is to have them. That needs no privileges, also in a container, and
goes by what ``numactl`` or a scheduler has said for the process: cores and memory that it may not use are not used.
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
"""Bytes in a row from the memory of one processor: less than a chunk of a copy, so that each chunk comes from all."""
MOST = 16
"""Threads, at most: so many zero as fast as memory allows."""
_HUGE = 2 << 20
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python 3.11 does not name."""
_NODES = Path("/sys/devices/system/node")


def make_pages(fresh: Tensor) -> None:
    """Make the pages of ``fresh`` (uint8, a whole mapping that has not been touched), huge ones if the system has any.

    What cannot be made is left to its first use. The number of pages is the same as it would be then.
    """
    if sys.platform != "linux" or fresh.numel() < 2 * PIECE:
        return
    whole = fresh.numel() // _HUGE * _HUGE  # a huge page at the end would be larger than what is left
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
    """The cores that the calling thread may use, by the memory node that is theirs; one set if that is not known.

    A node without cores is not the host's: a GPU's memory may be one.
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
    """The numbers in a list such as ``0-3,8``."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return list(itertools.chain.from_iterable(range(int(span[0]), int(span[-1]) + 1) for span in spans))


def _make(pieces: tuple[Tensor, ...], cores: set[int]) -> None:
    with suppress(OSError):  # the process may have been moved meanwhile
        os.sched_setaffinity(0, cores)  # of this thread
    for piece in pieces:
        if not _madvise(piece, _POPULATE_WRITE):
            piece.numpy()[:: mmap.PAGESIZE] = 0  # an older kernel, or a sandbox


def _madvise(memory: Tensor, advice: int) -> bool:
    """Whether the kernel has taken the advice. Other threads run meanwhile, unlike under ``mmap.madvise``."""
    call: Any = ctypes.CDLL(None).madvise
    return int(call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), advice)) == 0
