"""CUDA streams and events, with what torch's own lack: a host clock, and the lifetime of memory.

A stream keeps the tensors that its copies read or write until the copies are done. ``Tensor.record_stream`` would do
that for GPU memory, but the allocator then decides when the memory is free again, and peaks would depend on timing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import Event, Stream, check_copy
from lightning_roundpipe.devices.queued import ThreadEvent
from lightning_roundpipe.devices.waiter import AbortSwitch

CLOCK_PERIOD = 10.0
"""Seconds after which `EventClock` is set again. CUDA returns float32 milliseconds, exact to 1 µs for 16 s."""


def _new_event(*, timed: bool, blocking: bool = True) -> torch.cuda.Event:
    # blocking: a thread that waits for the event leaves its core to others
    return torch.cuda.Event(enable_timing=timed, blocking=blocking)  # type: ignore[no-untyped-call]


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_making = threading.Lock()


def stream_of(torch_device: torch.device, role: str) -> torch.cuda.Stream:
    """Return the GPU's stream for ``role``, the same one for the life of the process.

    torch's allocator and cuBLAS's workspaces keep memory per stream, and streams are never destroyed. With new streams,
    each ``fit()`` would leave behind memory that no later one can use.
    """
    with _making:
        stream = _streams.get((torch_device, role))
        if stream is None:
            stream = _streams[torch_device, role] = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        return stream


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


_thread = threading.local()


def begin_on(torch_device: torch.device) -> None:
    """Make ``torch_device`` the thread's current GPU if this process has no context on the thread's current one.

    A new thread's current GPU is number 0. Leaving a stream's context restores the current GPU, and CUDA then creates a
    context there: half a gigabyte on a GPU that ``devices=[1]`` leaves to others, or an error if it is full.
    """
    has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    if not getattr(_thread, "begun", False):
        _thread.begun = True
        if not has_context(torch.cuda.current_device()):
            torch.cuda.set_device(torch_device)


class EventClock:
    """Converts times of a GPU's events to the host's ``time.perf_counter``."""

    def __init__(self, torch_device: torch.device) -> None:
        self._stream = stream_of(torch_device, "clock")
        self._lock = threading.Lock()
        self._set()

    def time(self, event: torch.cuda.Event) -> float:
        """Return when a finished, timed event was reached, in seconds."""
        with self._lock:
            if time.perf_counter() - self._host > CLOCK_PERIOD:
                self._set()
            return self._host + float(self._reference.elapsed_time(event)) / 1e3

    def _set(self) -> None:
        """Time an event on an idle stream between two readings of the host's clock. The closest of 5 pairs counts."""
        best = float("inf")
        for _ in range(5):
            event = _new_event(timed=True, blocking=False)  # spinning notices the event soonest
            before = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            after = time.perf_counter()
            if after - before < best:
                best, self._reference, self._host = after - before, event, (before + after) / 2


class CudaEvent(Event):
    """A CUDA event.

    Attributes:
        event: what is recorded; None before that.
        given: reached when the stream's own thread has recorded it; None if it was recorded at once.
    """

    def __init__(
        self, event: torch.cuda.Event | None, clock: EventClock | None, switch: AbortSwitch,
        given: ThreadEvent | None = None,
    ) -> None:  # fmt: skip
        self.event, self._clock, self._switch, self.given = event, clock, switch, given

    def on_gpu(self, switch: AbortSwitch) -> torch.cuda.Event:
        """Block until the event is recorded, and return it. ``switch`` aborts the wait too."""
        if self.given is not None:
            self.given.wait_on_behalf_of(switch)
        assert self.event is not None
        return self.event

    def wait(self) -> None:
        # The GPU never waits for the host here, so its work always ends and an abort need not wake this wait.
        self._switch.check()
        self.on_gpu(self._switch).synchronize()
        self._switch.check()

    def done(self) -> bool:
        if self._switch.why is not None:
            return True
        return (self.given is None or self.given.done()) and (self.event is None or _passed(self.event))

    def passed(self) -> bool:
        """Return whether the GPU has reached the event, even after an abort."""
        return self.event is not None and _passed(self.event)

    def since(self, before: CudaEvent) -> float:
        """Return the seconds from ``before`` to this event. Both must be timed and passed."""
        assert before.event is not None and self.event is not None
        return float(before.event.elapsed_time(self.event)) / 1e3

    def time(self) -> float:
        if self._clock is None:
            raise RuntimeError("this event has no time: record it with timed=True.")
        if self.event is None or not _passed(self.event):
            raise RuntimeError("this event has no time yet: wait for it first.")
        return self._clock.time(self.event)


class CudaStream(Stream):
    """A CUDA stream, and the tensors that its unfinished work uses. ``role``: which of the GPU's, see `stream_of`."""

    def __init__(
        self, name: str, torch_device: torch.device, role: str, clock: EventClock, switch: AbortSwitch
    ) -> None:
        self.name, self._torch_device = name, torch_device
        self.stream = stream_of(torch_device, role)
        self.clock, self._switch = clock, switch
        self._lock = threading.Lock()
        self._flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def record(self, *, timed: bool = False) -> CudaEvent:
        self._switch.check()
        return CudaEvent(self._record(timed), self.clock if timed else None, self._switch)

    def wait(self, event: Event) -> None:
        self._switch.check()
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.on_gpu(self._switch))

    def follow(self, other: torch.cuda.Stream) -> None:
        """Enqueue a wait for all that ``other``, a stream of the same GPU, has been given so far."""
        event = _new_event(timed=False)
        event.record(other)
        self.stream.wait_event(event)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._switch.check()
        to, of = check_copy(dst, src)
        self.move(to, of)
        self.keep(to, of)

    def move(self, to: Tensor, of: Tensor) -> None:
        """Copy a pair that `check_copy` returned. The caller passes it to `keep` afterwards."""
        with self.running(), torch.inference_mode():  # which may write inference tensors and others
            to.copy_(of, non_blocking=True)

    def running(self) -> AbstractContextManager[None]:
        begin_on(self._torch_device)
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        self.record().wait()
        self.drop_finished()

    def settle(self) -> None:
        self.stream.synchronize()
        self.drop_finished()

    def _record(self, timed: bool) -> torch.cuda.Event:
        event = _new_event(timed=timed)
        event.record(self.stream)
        return event

    def keep(self, *tensors: Tensor) -> None:
        """Keep the tensors alive until the stream has passed this point."""
        self.drop_finished()
        with self._lock:
            self._flying.append((self._record(timed=False), tensors))

    def drop_finished(self) -> None:
        with self._lock:
            while self._flying and _passed(self._flying[0][0]):
                self._flying.popleft()
