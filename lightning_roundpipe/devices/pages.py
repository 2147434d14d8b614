"""Allocates the pages of large host buffers with several threads.

A mapping has no pages until it is touched. Page-locking touches all of them in one thread, which zeroes less than the
memory's bandwidth allows, and takes them from the memory of one processor where the machine has two. Here several
threads touch pieces in turn, on whichever cores the process may use. This needs no privileges, also in a container.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices.intraop_threads import cores

PIECE = 4 << 20
"""Consecutive bytes that one thread touches."""
MOST = 16
"""Most threads: as many zero as fast as memory allows."""
_HUGE = 2 << 20
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python 3.11 does not define."""


def make_pages(fresh: Tensor) -> None:
    """Allocate the pages of ``fresh`` (uint8, a whole untouched mapping), as huge pages where the system has them.

    Pages that cannot be allocated here are allocated at their first use. Their number is the same either way.
    """
    if sys.platform != "linux" or fresh.numel() < 2 * PIECE:
        return
    whole = fresh.numel() // _HUGE * _HUGE  # a last huge page would be larger than the rest of the buffer
    _madvise(fresh[:whole], mmap.MADV_HUGEPAGE)
    pieces = torch.split(fresh, PIECE)
    threads = min(MOST, cores(), len(pieces))
    makers = [
        threading.Thread(target=_make, args=(pieces[i::threads],), name="roundpipe-pages") for i in range(threads)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()


def _make(pieces: tuple[Tensor, ...]) -> None:
    for piece in pieces:
        if not _madvise(piece, _POPULATE_WRITE):
            piece.numpy()[:: mmap.PAGESIZE] = 0  # an older kernel, or a sandbox


def _madvise(memory: Tensor, advice: int) -> bool:
    """Call madvise, return whether the kernel took the advice. Unlike ``mmap.madvise``, it lets other threads run."""
    call: Any = ctypes.CDLL(None).madvise
    return int(call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), advice)) == 0
