"""CUDA streams and events, with the two things that torch's own lack: a host clock, and the lifetime of memory.

Whatever a copy reads or writes is kept here until the copy is done. ``Tensor.record_stream`` would do that for memory
of the GPU, but when it comes back is then up to the allocator: peaks would depend on timing.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event, Stream, check_copy, check_fill

CLOCK_PERIOD = 10.0
"""Seconds after which a clock is set again: CUDA gives 32-bit floats of milliseconds, exact to 1 µs for 16 s."""


def _new_event(*, timed: bool, blocking: bool = True) -> torch.cuda.Event:
    # blocking: a thread that waits for it leaves its core to others
    return torch.cuda.Event(enable_timing=timed, blocking=blocking)  # type: ignore[no-untyped-call]


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_making = threading.Lock()


def stream_of(torch_device: torch.device, role: str) -> torch.cuda.Stream:
    """The GPU's stream for ``role``: one for the life of the process.

    torch's allocator and cuBLAS's workspaces keep memory for each stream, and a stream never ends. With new ones, each
    fit would leave behind what no later one can use.
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
    """Make ``torch_device`` the current GPU of a thread whose current GPU this process does not use.

    A new thread's current GPU is number 0. Whatever enters a stream restores the current GPU as it leaves, and CUDA
    then makes a context there: half a gigabyte on a GPU that ``devices=[1]`` leaves to others, or an error if it is
    full.
    """
    has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    if not getattr(_thread, "begun", False):
        _thread.begun = True
        if not has_context(torch.cuda.current_device()):
            torch.cuda.set_device(torch_device)


class EventClock:
    """Puts a GPU's events on the host's ``time.perf_counter``."""

    def __init__(self, torch_device: torch.device) -> None:
        self._stream = stream_of(torch_device, "clock")
        self._lock = threading.Lock()
        self._set()

    def time(self, event: torch.cuda.Event) -> float:
        """When a finished, timed event was reached, in seconds."""
        with self._lock:
            if time.perf_counter() - self._host > CLOCK_PERIOD:
                self._set()
            return self._host + float(self._reference.elapsed_time(event)) / 1e3

    def _set(self) -> None:
        """Reach an event on a stream that has nothing else to do, between two looks at the host's clock; best of 5."""
        best = float("inf")
        for _ in range(5):
            event = _new_event(timed=True, blocking=False)  # spinning sees the moment best
            before = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            after = time.perf_counter()
            if after - before < best:
                best, self._reference, self._host = after - before, event, (before + after) / 2


class GpuEvent(Event):
    """A CUDA event, recorded or to be recorded."""

    @abstractmethod
    def on_gpu(self, switch: AbortSwitch) -> CudaEvent:
        """The recorded event; blocks until there is one. ``switch`` ends the wait too."""


class CudaEvent(GpuEvent):
    """A recorded CUDA event."""

    def __init__(self, event: torch.cuda.Event, clock: EventClock | None, switch: AbortSwitch) -> None:
        self.event, self._clock, self._switch = event, clock, switch

    def on_gpu(self, switch: AbortSwitch) -> CudaEvent:
        return self

    def wait(self) -> None:
        # A GPU never waits for the host here, so its work always comes to an end and the wait needs no waking.
        self._switch.check()
        self.event.synchronize()
        self._switch.check()

    def done(self) -> bool:
        return self._switch.why is not None or _passed(self.event)

    def passed(self) -> bool:
        """Whether the GPU has reached it, abort or not."""
        return _passed(self.event)

    def since(self, before: CudaEvent) -> float:
        """Seconds from ``before`` to this; both are timed, and passed."""
        return float(before.event.elapsed_time(self.event)) / 1e3

    def time(self) -> float:
        if self._clock is None:
            raise RuntimeError("this event has no time: record it with timed=True.")
        if not _passed(self.event):
            raise RuntimeError("this event has no time yet: wait for it first.")
        return self._clock.time(self.event)


class CudaStream(Stream):
    """A CUDA stream, and the memory that it is not done with.

    Args:
        name: for errors and profilers.
        torch_device: the GPU.
        role: of its stream there; see `stream_of`.
        clock: of the GPU.
        switch: of the worker.
    """

    def __init__(
        self,
        name: str,
        torch_device: torch.device,
        role: str,
        clock: EventClock,
        switch: AbortSwitch,
    ) -> None:
        self.name, self._torch_device = name, torch_device
        self.stream = stream_of(torch_device, role)
        self._clock, self._switch = clock, switch
        self._lock = threading.Lock()
        self._flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def record(self, *, timed: bool = False) -> CudaEvent:
        self._switch.check()
        return CudaEvent(self._record(timed), self._clock if timed else None, self._switch)

    def wait(self, event: Event) -> None:
        """Blocks while ``event`` is not yet with the GPU: a stream that copies pageable memory may be behind."""
        self._switch.check()
        assert isinstance(event, GpuEvent)
        self.stream.wait_event(event.on_gpu(self._switch).event)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._switch.check()
        to, of = check_copy(dst, src)
        self.move(to, of)
        self.keep(to, of)

    def move(self, to: Tensor, of: Tensor) -> None:
        """``copy`` of what `check_copy` returns and `keep` is given afterwards."""
        with self.running(), torch.inference_mode():  # in which both inference tensors and others may be written
            to.copy_(of, non_blocking=True)

    def fill(self, buffer: Tensor, byte: int) -> None:
        self._switch.check()
        flat = check_fill(buffer, byte)
        with self.running(), torch.inference_mode():
            flat.fill_(byte)
        self.keep(flat)

    def poison(self, buffer: Tensor) -> None:
        pass  # a GPU runs what the emulation has checked

    def running(self) -> AbstractContextManager[None]:
        begin_on(self._torch_device)
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        self.record().wait()
        self.drop_finished()

    def settle(self) -> None:
        """Wait for all work, abort or not."""
        self.stream.synchronize()
        self.drop_finished()

    def _record(self, timed: bool) -> torch.cuda.Event:
        event = _new_event(timed=timed)
        event.record(self.stream)
        return event

    def keep(self, *tensors: Tensor) -> None:
        """Let no tensor's memory be reused before this stream has passed this point."""
        self.drop_finished()
        with self._lock:
            self._flying.append((self._record(timed=False), tensors))

    def drop_finished(self) -> None:
        """Keep no longer what the stream is done with."""
        with self._lock:
            while self._flying and _passed(self._flying[0][0]):
                self._flying.popleft()
