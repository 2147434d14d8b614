"""The wire of an emulated device: how long a transfer takes, what else delays it, and the moving of the bytes."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

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
    """One direction of a device's wire, which two streams share.

    Each transfer reserves the next free stretch of time in order of arrival. (A lock around the sleep would let the
    stream that has just released it take it again at once, and chunks of weights would starve the activations.)
    """

    def __init__(self, bandwidth: float | None, latency: float, switch: AbortSwitch) -> None:
        self._bandwidth, self._latency, self._switch = bandwidth, latency, switch
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, nbytes: int, move: Callable[[], None]) -> None:
        """Run ``move`` and return when ``nbytes`` would have arrived."""
        self._switch.sleep(self._latency)
        if self._bandwidth is None:
            move()
            return
        with self._lock:
            starts = max(time.perf_counter(), self._free_at)
            arrives = self._free_at = starts + nbytes / self._bandwidth
        self._switch.sleep(starts - time.perf_counter())
        move()
        self._switch.sleep(arrives - time.perf_counter())

    def clear(self) -> None:
        """Forget reservations of transfers that were aborted."""
        with self._lock:
            self._free_at = 0.0


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
