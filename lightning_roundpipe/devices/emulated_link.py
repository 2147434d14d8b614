"""The link of an emulated device: how long a transfer takes, what else delays it, and the moving of the bytes."""

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

MAX_DELAY = 0.002
"""Seconds: the longest random delay. Longer than a small layer, short enough for tests with hundreds of copies."""


class Delays:
    """Random pauses that depend on nothing but the seed, the name and how many came before."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed}/{name}")
        self._lock = threading.Lock()

    def next(self) -> float:
        """Seconds, from 0 to ``MAX_DELAY``."""
        with self._lock:
            return self._random.uniform(0, MAX_DELAY)


class Link:
    """One direction of a device's link, which two streams share, one copy at a time.

    Who goes next is decided when the link gets free: of those that wait, the first one that goes first, else the first
    one. (Python's locks have no order: the stream that has just let go would take it again at once, and chunks of
    weights would starve the activations.)

    Threads wake up late, and on a busy machine very late. So the link keeps its own time: a copy begins when the one
    before it has arrived, whenever its thread came to know, and is that much sooner done.
    """

    def __init__(self, bandwidth: float | None, latency: float, switch: AbortSwitch) -> None:
        self._bandwidth, self._latency, self._switch = bandwidth, latency, switch
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._taken = False
        self._tickets = 0
        self._waiting: list[tuple[bool, int, threading.Event]] = []

    @property
    def takes_no_time(self) -> bool:
        """Whether bytes arrive as soon as they are moved."""
        return self._bandwidth is None and not self._latency

    @property
    def chunk_bytes(self) -> float | None:
        """How large the pieces are of what gives way to others; None: as large as they come."""
        return None if self._bandwidth is None else self._bandwidth * copy_priority.MAX_WAIT_S

    def arise(self) -> float:
        """What a copy takes before it asks for the link. Returns when it asks."""
        self._switch.sleep(self._latency)
        return time.perf_counter()

    def carry(self, nbytes: int, move: Callable[[], None], asked: float, *, first: bool) -> float:
        """Run ``move`` when it is its turn, and return when ``nbytes`` would have arrived.

        Args:
            nbytes: that are moved.
            move: moves them.
            asked: since when it could have begun; of a chunk, when the one before it arrived.
            first: whether it goes before those that do not go first.

        Returns:
            When they arrived, by the link's own time.
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
            turn = threading.Event()
            self._tickets += 1
            heapq.heappush(self._waiting, (not first, self._tickets, turn))
        with self._switch.wakes(turn):
            turn.wait()
        self._switch.check()  # if it was thrown, nobody uses the link until it is cleared

    def _give(self) -> None:
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting)[2].set()
            else:
                self._taken = False

    def clear(self) -> None:
        """Forget transfers that were aborted."""
        with self._lock:
            self._free_at = 0.0
            self._taken = False
            self._waiting.clear()


def move(dst: Tensor, src: Tensor) -> None:
    """Copy bytes, past autograd, with one core.

    ``copy_`` would bring in the intra-op threads, one team for every stream thread, that then compete with the layers'.
    """
    plain = dst.is_contiguous() and src.is_contiguous() and not any(t.is_conj() or t.is_neg() for t in (dst, src))
    if plain:
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.numel() * dst.element_size())
    else:
        with torch.inference_mode():
            dst.copy_(src)
