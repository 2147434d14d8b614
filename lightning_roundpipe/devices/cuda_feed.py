"""A CUDA stream that is fed chunk by chunk, so that the copies of others get in between.

A GPU's copy engine does one copy at a time in each direction, and does not interrupt it; and the priority of a stream
counts for kernels only, not for copies. So whatever has been given to the driver may have to be waited for. Weights
and gradients are therefore held back here: a thread gives the driver two chunks at most, and the next one when the
first of them is done. Two, because with one the wire would rest while the thread wakes up; and each of half the time
that activations may wait.

    caller: copy ── record ─► event             wait(event) by another stream ── [2] blocks until it is on the GPU
                │                   ▲
    thread:     └─► chunk, chunk ── [1] the oldest is done ── chunk ... ── the event is recorded

Nothing waits in a circle: what has been given to the driver waits only for what was given to it earlier.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event, check_copy, check_fill
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream, GpuEvent
from lightning_roundpipe.devices.queued import QueuedStream
from lightning_roundpipe.devices.thread_event import ThreadEvent
from lightning_roundpipe.devices.wire import LEAST_BYTES, LONGEST_WAIT_S, Rate, chunks

AHEAD = 2
"""Chunks that the driver has at most."""

FIRST_GUESS = 4e9
"""Bytes a second of a wire of which nothing is known: no slower ones are left."""


class FedEvent(GpuEvent):
    """An event that is recorded when the stream's thread gets there.

    Args:
        given: reached when it has been recorded.
    """

    def __init__(self, given: ThreadEvent) -> None:
        self.given = given
        self.recorded: CudaEvent | None = None

    def on_gpu(self, switch: AbortSwitch) -> CudaEvent:
        """The recorded event, once there is one [2]. ``switch`` ends the wait too."""
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


class FedStream(QueuedStream):
    """Copies of weights or gradients in one direction.

    Args:
        stream: that is fed.
        switch: of its device.
    """

    def __init__(self, stream: CudaStream, switch: AbortSwitch) -> None:
        super().__init__(stream.name, switch)
        self.fed = stream
        self._rate = Rate(FIRST_GUESS)
        self._given: deque[tuple[CudaEvent, CudaEvent | None, int]] = deque()
        """Chunks that the driver has: end of each, end of the one before it if that was on its way, and bytes."""

    def record(self, *, timed: bool = False) -> Event:
        event = FedEvent(ThreadEvent(self.name, self._switch, timed=False))

        def record() -> None:
            event.recorded = self.fed.record(timed=timed)

        def work() -> None:
            self._attempt(record)
            event.given.settle(self._error)

        self._enqueue(work)
        return event

    def wait(self, event: Event) -> None:
        self._enqueue(partial(self._attempt, self.fed.wait, event))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._enqueue(partial(self._attempt, self._feed, *check_copy(dst, src)))

    def fill(self, buffer: Tensor, byte: int) -> None:
        self._enqueue(partial(self._attempt, self.fed.fill, check_fill(buffer, byte), byte))

    def poison(self, buffer: Tensor) -> None:
        pass  # a GPU runs what the emulation has checked

    def running(self) -> AbstractContextManager[None]:
        return self.fed.running()

    def drop_finished(self) -> None:
        """Keep no longer what is over."""
        self.fed.drop_finished()

    def settle(self) -> None:
        super().settle()
        self._given.clear()
        self.fed.settle()

    def _feed(self, dst: Tensor, src: Tensor) -> None:
        most = max(LEAST_BYTES, self._rate.bytes_per_second * LONGEST_WAIT_S / AHEAD)
        for to, of in chunks(dst, src, most):
            while len(self._given) >= AHEAD:
                self._take_back()  # [1]
            before = self._given[-1][0] if self._given else None
            self.fed.copy(to, of)
            self._given.append((self.fed.record(timed=True), before, of.numel() * of.element_size()))

    def _take_back(self) -> None:
        end, before, nbytes = self._given.popleft()
        end.wait()
        if before is not None:
            self._rate.observe(nbytes, end.since(before))
