"""A CUDA copy stream that gives the driver all chunks of a copy at once and still lets activations in between.

A GPU's copy engine does one copy at a time in each direction and does not interrupt it. The priority of a stream counts
for kernels, not for copies. So weights and gradients go in chunks of half the time that activations may wait. Chunks
alone are not enough: the engine may stay with a stream as long as the next copy there is ready. So chunks alternate
between two streams, and each waits for the event at the end of the one before it:

    even: chunk 0 ─► event      ┌─ wait ── chunk 2 ─► event      ┌─ ...
                       └─ wait ─│─ chunk 1 ─► event ─┘     └─ wait ── chunk 3 ...          [1]
    activations:                    copy                                                   [2] ready, and first in line

At most one chunk is ready at any time [1]. The end of a chunk makes the next one ready, and by then a copy of
activations that was issued meanwhile is in line already [2]. Activations wait for the chunk that is under way, and for
one more if the engine serves streams in turn. No thread of the process takes part. Every event is recorded before a
stream waits for it, so work of the driver depends on earlier work only, and an abort leaves nothing that never ends.

CUDA's copies from and to pageable memory block the thread that issues them until the stream's earlier work is done and
the pages are read. So the first such copy moves the stream's work to a thread of its own, for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event, check_copy, check_fill
from lightning_roundpipe.devices.copy_priority import MAX_WAIT_S, MIN_CHUNK_BYTES, chunks
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream, GpuEvent
from lightning_roundpipe.devices.queued import QueuedStream
from lightning_roundpipe.devices.thread_event import ThreadEvent

IN_FRONT = 2
"""Chunks that activations wait for at most."""

FIRST_GUESS = 4e9
"""Bytes a second of a link of which nothing is known: no slower ones are left."""


class QueuedEvent(GpuEvent):
    """An event that the stream's thread records when it gets there.

    Args:
        given: reached when it has been recorded.
    """

    def __init__(self, given: ThreadEvent) -> None:
        self.given = given
        self.recorded: CudaEvent | None = None

    def on_gpu(self, switch: AbortSwitch) -> CudaEvent:
        """The recorded event, once there is one. ``switch`` ends the wait too."""
        self.given.wait_on_behalf_of(switch)
        assert self.recorded is not None
        return self.recorded

    def wait(self) -> None:
        self.given.wait()
        assert self.recorded is not None
        self.recorded.wait()

    def done(self) -> bool:
        return self.given.done() and (self.recorded is None or self.recorded.done())

    def time(self) -> float:
        if self.recorded is None:
            raise RuntimeError("this event has no time yet: wait for it first.")
        return self.recorded.time()


class ChunkedCopyStream(QueuedStream):
    """Copies of weights or gradients in one direction.

    Args:
        name: for errors and profilers.
        lanes: the two streams. Work is always added to the one that the last chunk went to.
        switch: of the device.

    Attributes:
        bytes_per_second: of the link, from copies that were timed: the most that was seen, as others only slow it down.
    """

    def __init__(self, name: str, lanes: Sequence[CudaStream], switch: AbortSwitch) -> None:
        super().__init__(name, switch)
        self.lanes = tuple(lanes)
        self.bytes_per_second = FIRST_GUESS
        self._last, self._other = self.lanes
        self._order = threading.Lock()
        """Held while work is added: two threads' chunks do not mix."""
        self._by_thread = False
        self._timed: tuple[CudaEvent, CudaEvent, int] | None = None
        """Start and end of a copy, and its bytes."""

    @property
    def chunk_bytes(self) -> float:
        """How large a chunk is."""
        return max(MIN_CHUNK_BYTES, self.bytes_per_second * MAX_WAIT_S / IN_FRONT)

    def record(self, *, timed: bool = False) -> Event:
        with self._order:
            return self._record_later(timed) if self._by_thread else self._last.record(timed=timed)

    def wait(self, event: Event) -> None:
        self._add(self._wait, event)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        to, of = check_copy(dst, src)
        if not self._by_thread and to.numel() and _is_pageable(to, of):
            with self._order:
                self._by_thread = True
        self._add(self._copy, to, of)

    def fill(self, buffer: Tensor, byte: int) -> None:
        self._add(self._fill, check_fill(buffer, byte), byte)

    def poison(self, buffer: Tensor) -> None:
        pass  # a GPU runs what the emulation has checked

    def running(self) -> AbstractContextManager[None]:
        return self._last.running()

    def drop_finished(self) -> None:
        """Keep no longer what is over."""
        for lane in self.lanes:
            lane.drop_finished()

    def settle(self) -> None:
        """Wait for all work, abort or not."""
        super().settle()
        self._timed = None
        for lane in self.lanes:
            lane.settle()

    def _add(self, work: Callable[..., None], *given: Any) -> None:
        with self._order:
            if self._by_thread:
                self._enqueue(partial(self._attempt, work, *given))
            else:
                work(*given)

    def _record_later(self, timed: bool) -> QueuedEvent:
        event = QueuedEvent(ThreadEvent(self.name, self._switch, timed=False))

        def record() -> None:
            event.recorded = self._last.record(timed=timed)

        def work() -> None:
            self._attempt(record)
            event.given.settle(self._error)

        self._enqueue(work)
        return event

    def _wait(self, event: Event) -> None:
        self._last.wait(event)

    def _fill(self, buffer: Tensor, byte: int) -> None:
        self._last.fill(buffer, byte)

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        self._learn_rate()
        start = self._last.record(timed=True) if self._timed is None else None
        try:
            for to, of in chunks(dst, src, self.chunk_bytes):
                end = self._last.record()
                self._last, self._other = self._other, self._last
                self._last.wait(end)  # [1]
                self._last.move(to, of)
        finally:  # an abort may come between two chunks, and the first ones are on their way
            self._last.keep(dst, src)
        if start is not None:
            self._timed = start, self._last.record(timed=True), dst.numel() * dst.element_size()

    def _learn_rate(self) -> None:
        """By the copy that was timed last, if it is over."""
        if self._timed is not None and self._timed[1].passed():
            start, end, nbytes = self._timed
            self._timed = None
            if (seconds := end.since(start)) > 0:
                self.bytes_per_second = max(self.bytes_per_second, nbytes / seconds)


def _is_pageable(to: Tensor, of: Tensor) -> bool:
    """Whether the host's side of a copy is memory that is not pinned."""
    hosts = [t for t in (to, of) if t.device.type == "cpu"]
    return bool(hosts) and not any(t.is_pinned() for t in hosts)
