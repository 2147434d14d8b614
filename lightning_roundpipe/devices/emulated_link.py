"""The link of an emulated device: moves the bytes, and takes the time of a transfer and of random delays."""

from __future__ import annotations

import ctypes
import heapq
import random
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_roundpipe.devices import copy_priority
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.waiter import Waiter

MAX_DELAY = 0.002
"""Longest random delay, in seconds: longer than a small layer, short enough for tests with hundreds of copies."""


class Delays:
    """Random pauses, determined by the seed, the name and the number of pauses before."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed}/{name}")
        self._lock = threading.Lock()

    def next(self) -> float:
        """Return the next pause in seconds, from 0 to ``MAX_DELAY``."""
        with self._lock:
            return self._random.uniform(0, MAX_DELAY)


class Link:
    """One direction of a device's link. Two streams share it, one copy at a time.

    The link chooses the next copy when it becomes free: the first of the copies with priority, else the first in line.
    (Python's locks are not fair: the stream that released one would acquire it again at once, and chunks of weights
    would starve the activations.)

    Threads wake up late, on a busy machine very late. So the link keeps a time of its own: a copy begins when the one
    before it has arrived, no matter when its thread wakes up, and ends that much sooner.
    """

    def __init__(self, bandwidth: float | None, latency: float, switch: AbortSwitch) -> None:
        self._bandwidth, self._latency, self._switch = bandwidth, latency, switch
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._taken = False
        self._tickets = 0
        self._waiting: list[tuple[bool, int, Waiter]] = []

    @property
    def takes_no_time(self) -> bool:
        """Whether copies take no longer than moving the bytes."""
        return self._bandwidth is None and not self._latency

    @property
    def chunk_bytes(self) -> float | None:
        """Chunk size in bytes of copies without priority; None: they go whole."""
        return None if self._bandwidth is None else self._bandwidth * copy_priority.MAX_WAIT_S

    def arise(self) -> float:
        """Sleep for the latency that precedes a copy. Return when the copy asks for the link."""
        self._switch.sleep(self._latency)
        return time.perf_counter()

    def carry(self, nbytes: int, move: Callable[[], None], asked: float, *, first: bool) -> float:
        """Wait for the link, run ``move``, and sleep until ``nbytes`` would have arrived.

        Args:
            nbytes: size of the copy.
            move: copies the bytes.
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

    Args:
        dst: memory that the engine has made, so that it holds its values as they are.
        src: a tensor that user code may have made, such as a conjugate, which only the tensor itself knows of.
    """
    lazy = src.is_conj() or src.is_neg()
    if not lazy and dst.is_contiguous() and src.is_contiguous():
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.nbytes)
    else:
        with torch.inference_mode():
            dst.copy_(src)
