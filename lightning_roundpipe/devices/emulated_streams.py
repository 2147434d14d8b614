"""Streams of emulated devices: layers run in the calling thread, copies in threads of their own, over a shared link."""

from __future__ import annotations

import ctypes
import heapq
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import MAX_WAIT_S, POISON, Event, Stream, check_copy, chunks
from lightning_roundpipe.devices.queued import QueuedStream, ThreadEvent
from lightning_roundpipe.devices.waiter import AbortSwitch, Waiter

SMALL_BYTES = 256 << 10
"""Largest copy that the calling thread makes itself: some 30 µs, as long as waking the stream's thread takes."""


Delays = Callable[[], float]
"""Returns the next random pause, in seconds."""


def _fail(error: Exception) -> NoReturn:
    raise error


def _overwrite(buffer: Tensor) -> None:
    with torch.inference_mode():  # which may write inference tensors and others
        buffer.data.view(-1).view(torch.uint8).fill_(POISON)


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
        self.chunk_bytes = math.inf if bandwidth is None else bandwidth * MAX_WAIT_S
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


class InlineStream(Stream):
    """``compute``: the calling thread itself. Work is done when the call that enqueues it returns."""

    def __init__(self, name: str, switch: AbortSwitch, poisons: bool, delays: Delays | None) -> None:
        self.name = name
        self._switch, self._poisons, self._delays = switch, poisons, delays
        self._reached = ThreadEvent(name, switch, timed=False, reached=0.0)

    def record(self, *, timed: bool = False) -> Event:
        # No delay where a call is timed: the thread holds a core permit there, and layers have their own delay.
        if self._delays is not None and not timed:
            self._switch.sleep(self._delays())
        if self._switch.why is not None:
            self._switch.check()
        return ThreadEvent(self.name, self._switch, True, time.perf_counter()) if timed else self._reached

    def wait(self, event: Event) -> None:
        assert type(event) is ThreadEvent
        event.wait_on_behalf_of(self._switch)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._switch.check()
        move(*check_copy(dst, src))

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self._switch.check()
            _overwrite(buffer)


class ThreadStream(QueuedStream):
    """A copy stream with a thread of its own.

    The calling thread makes small copies on an idle stream itself, unless the emulation makes copies take time: waking
    the stream's thread takes longer than the copy.

    Args:
        name: of the stream and its thread.
        link: the link that it shares with another stream.
        switch: the device's abort switch.
        poisons: whether `poison` overwrites buffers.
        delays: pauses before each copy.
        first: whether its copies have priority on the link, and go whole. Other copies go in chunks.
    """

    def __init__(
        self, name: str, link: Link, switch: AbortSwitch, poisons: bool, delays: Delays | None, *, first: bool
    ) -> None:
        super().__init__(name, switch)
        self._link, self._poisons, self._delays, self._first = link, poisons, delays, first
        self._at_once = delays is None and link.takes_no_time

    def record(self, *, timed: bool = False) -> Event:
        if self._at_once and self._is_idle:
            return ThreadEvent(self.name, self._switch, timed, time.perf_counter())
        event = ThreadEvent(self.name, self._switch, timed)
        self._enqueue(lambda: event.settle(self._error))
        return event

    def wait(self, event: Event) -> None:
        assert type(event) is ThreadEvent
        if not (event.is_reached and self._is_idle):
            self._enqueue(partial(self._attempt, event.wait_on_behalf_of, self._switch))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        to, of = check_copy(dst, src)
        if self._at_once and of.nbytes <= SMALL_BYTES and self._is_idle:
            try:
                move(to, of)
            except Exception as error:
                # The stream keeps the error, as it does its thread's. It drops the callers' frames and their tensors.
                self._enqueue(partial(self._attempt, _fail, error.with_traceback(None)))
        else:
            self._enqueue(partial(self._attempt, self._transfer, to, of))

    def _transfer(self, to: Tensor, of: Tensor) -> None:
        if self._delays is not None:
            self._switch.sleep(self._delays())
        asked = self._link.arise()
        for there, here in [(to, of)] if self._first else chunks(to, of, self._link.chunk_bytes):
            asked = self._link.carry(here.nbytes, partial(move, there, here), asked, first=self._first)

    def settle(self) -> None:
        super().settle()
        self._link.clear()  # the last of its streams leaves it unused

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self._enqueue(partial(self._attempt, _overwrite, buffer))
