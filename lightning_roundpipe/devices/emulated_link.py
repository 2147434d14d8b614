"""The link of an emulated device: moves the bytes, and takes the time of a transfer and of random delays."""

from __future__ import annotations

import ctypes
import heapq
import math
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_roundpipe.devices import copy_priority
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.waiter import Waiter


class Link:
    """One direction of a device's link. Two streams share it, one copy at a time.

    The link chooses the next copy when it becomes free: the first of the copies with priority, else the first in line.
    (Python's locks are not fair: the stream that released one would acquire it again at once, and chunks of weights
    would starve the activations.)

    Threads wake up late, on a busy machine very late. So the link keeps a time of its own: a copy begins when the one
    before it has arrived, no matter when its thread wakes up, and ends that much sooner.

    Attributes:
        chunk_bytes: chunk size in bytes of copies without priority.
        takes_no_time: whether copies take no longer than moving the bytes.
    """

    def __init__(self, bandwidth: float | None, latency: float, switch: AbortSwitch) -> None:
        self._bandwidth, self._latency, self._switch = bandwidth, latency, switch
        self.chunk_bytes = math.inf if bandwidth is None else bandwidth * copy_priority.MAX_WAIT_S
        self.takes_no_time = bandwidth is None and not latency
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._taken = False
        self._tickets = 0
        self._waiting: list[tuple[bool, int, Waiter]] = []

    def arise(self) -> float:
        """Sleep for the latency that precedes a copy. Return when the copy asks for the link."""
        self._switch.sleep(self._latency)
        return time.perf_counter()

    def carry(self, nbytes: int, move: Callable[[], None], asked: float, *, first: bool) -> float:
        """Wait for the link, ``move`` the bytes, and sleep until ``nbytes`` would have arrived.

        Args:
            asked: when the copy could have begun; for a later chunk, when the one before it arrived.
            first: whether the copy has priority over those without.

        Returns:
            When the bytes arrived, by the link's own time.
        """
        if self._bandwidth is None:
            move()
            return asked
        self._take(first)
        try:
            arrives = self._free_at = max(asked, self._free_at) + nbytes / self._bandwidth
            move()
            self._switch.sleep(arrives - time.perf_counter())
        finally:
            self._give()
        return arrives

    def _take(self, first: bool) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = Waiter()
            self._tickets += 1
            heapq.heappush(self._waiting, (not first, self._tickets, turn))
        with self._switch.wakes(turn):
            turn.wait()
        self._switch.check()  # if it was thrown, the link is unused until `clear`

    def _give(self) -> None:
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting)[2].wake()
            else:
                self._taken = False

    def clear(self) -> None:
        """Reset the link after an abort."""
        with self._lock:
            self._free_at = 0.0
            self._taken = False
            self._waiting.clear()


def move(dst: Tensor, src: Tensor) -> None:
    """Copy bytes on one core, hidden from autograd.

    ``copy_`` would start intra-op threads in every stream's thread, which compete with those of the layers.
    """
    lazy = src.is_conj() or src.is_neg()  # user code may have made it; the engine has made ``dst``
    if not lazy and dst.is_contiguous() and src.is_contiguous():
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.nbytes)
    else:
        with torch.inference_mode():
            dst.copy_(src)
