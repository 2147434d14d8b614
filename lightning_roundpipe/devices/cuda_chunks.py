"""A CUDA copy stream that enqueues all chunks of a copy at once and still lets activations in between.

A GPU's copy engine runs one copy at a time per direction and does not interrupt it. The priority of a stream counts
for kernels, not for copies. So weights and gradients go in chunks of half the time that activations may wait. Chunks
alone are not enough: the engine may stay with a stream as long as the next copy there is ready. So chunks alternate
between two streams, and each waits for the event at the end of the one before it:

    even: chunk 0 ─► event      ┌─ wait ── chunk 2 ─► event      ┌─ ...
                       └─ wait ─│─ chunk 1 ─► event ─┘     └─ wait ── chunk 3 ...          [1]
    activations:                    copy                                                   [2] ready, and first in line

At most one chunk is ready at any time [1]. The end of a chunk makes the next one ready, and a copy of activations that
was issued meanwhile is in line by then [2]. Activations wait for the chunk in progress, and for one more if the engine
serves streams in turn. No thread of the process takes part. Every event is recorded before a stream waits for it, so
the driver's work depends on earlier work only, and an abort leaves no work that never ends.

CUDA's copies from and to pageable memory block the calling thread until the stream's earlier work is done and the pages
are read. So the first such copy moves the stream's work to a thread of its own, permanently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_roundpipe.devices.base import MAX_WAIT_S, Event, check_copy, chunks
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream
from lightning_roundpipe.devices.queued import QueuedStream, ThreadEvent
from lightning_roundpipe.devices.waiter import AbortSwitch

MIN_CHUNK_BYTES = 1 << 16
"""Smallest chunk. Launching a smaller copy takes longer than the copy."""

IN_FRONT = 2
"""Most chunks that activations wait for."""

FIRST_GUESS = 4e9
"""Initial estimate of the link's rate, in bytes per second: that of the slowest link still in use."""


class ChunkedCopyStream(QueuedStream):
    """A stream of chunked copies, of weights or gradients, in one direction.

    Args:
        name: for errors and profilers.
        lanes: the two CUDA streams. Other work goes to the lane of the last chunk.
        switch: the device's abort switch.

    Attributes:
        bytes_per_second: the highest rate of all timed copies. The link's other traffic can only lower a copy's rate.
    """

    def __init__(self, name: str, lanes: Sequence[CudaStream], switch: AbortSwitch) -> None:
        super().__init__(name, switch)
        self.lanes = tuple(lanes)
        self.bytes_per_second = FIRST_GUESS
        self._last, self._other = self.lanes
        self._order = threading.Lock()
        """Held while work is enqueued, so that chunks of two threads do not mix."""
        self._by_thread = False
        self._timed: tuple[CudaEvent, CudaEvent, int] | None = None
        """Start event, end event and bytes of the copy that is being timed."""

    @property
    def chunk_bytes(self) -> float:
        return max(MIN_CHUNK_BYTES, self.bytes_per_second * MAX_WAIT_S / IN_FRONT)

    def record(self, *, timed: bool = False) -> Event:
        with self._order:
            return self._record_later(timed) if self._by_thread else self._last.record(timed=timed)

    def wait(self, event: Event) -> None:
        self._add(lambda: self._last.wait(event))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        to, of = check_copy(dst, src)
        if not self._by_thread and to.numel() and _is_pageable(to, of):
            with self._order:
                self._by_thread = True
        self._add(self._copy, to, of)

    def running(self) -> AbstractContextManager[None]:
        return self._last.running()

    def drop_finished(self) -> None:
        for lane in self.lanes:
            lane.drop_finished()

    def settle(self) -> None:
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

    def _record_later(self, timed: bool) -> CudaEvent:
        given = ThreadEvent(self.name, self._switch, timed=False)
        event = CudaEvent(None, self._last.clock if timed else None, self._switch, given)

        def record() -> None:
            event.event = self._last.record(timed=timed).event

        def work() -> None:
            self._attempt(record)
            given.settle(self._error)

        self._enqueue(work)
        return event

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        self._learn_rate()
        start = self._last.record(timed=True) if self._timed is None else None
        try:
            for to, of in chunks(dst, src, self.chunk_bytes):
                end = self._last.record()
                self._last, self._other = self._other, self._last
                self._last.wait(end)  # [1]
                self._last.move(to, of)
        finally:  # an abort may come between two chunks, while earlier chunks are still running
            self._last.keep(dst, src)
        if start is not None:
            self._timed = start, self._last.record(timed=True), dst.numel() * dst.element_size()

    def _learn_rate(self) -> None:
        """Update the rate from the copy timed last, if it is done."""
        if self._timed is not None and self._timed[1].passed():
            start, end, nbytes = self._timed
            self._timed = None
            if (seconds := end.since(start)) > 0:
                self.bytes_per_second = max(self.bytes_per_second, nbytes / seconds)


def _is_pageable(to: Tensor, of: Tensor) -> bool:
    """Return whether the host side of the copy is not pinned."""
    hosts = [t for t in (to, of) if t.device.type == "cpu"]
    return bool(hosts) and not any(t.is_pinned() for t in hosts)
