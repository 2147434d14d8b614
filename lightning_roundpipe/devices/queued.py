"""Streams that are FIFO threads, and their events: emulated copy streams, and a GPU's streams for pageable memory.

      caller                 stream thread (FIFO)              waiting thread
        │ copy(dst, src) ──────► [1] the copy
        │ record() ─► event ───► [2] event.settle() ──────────► [3] event.wait() returns
        │                                                            (or raises: failed, aborted)
        │ wait(other) ─────────► [3] as well, in the stream

The stream keeps its first error, skips all later work, and settles later events with that error, so that no waiter
hangs or takes the data as written. Every use of the stream raises the error again until the device is reset.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lightning_roundpipe.devices import core_semaphore, intraop_threads, thread_end
from lightning_roundpipe.devices.base import Event, Stream
from lightning_roundpipe.devices.errors import StreamAborted, raise_kept
from lightning_roundpipe.devices.waiter import AbortSwitch, Waiter


class ThreadEvent(Event):
    """A condition that comes true once: reached, or failed with an error.

    It needs no lock. `settle` sets the time and then wakes the waiters in the list; a waiter adds itself to the list
    and then reads the time. In either order, one of them sees the other.

    Args:
        stream: name of the stream, for errors.
        switch: abort switch of the stream's device.
        timed: whether `time` may be called.
        reached: when the point was reached, if it has been already.
    """

    __slots__ = ("_error", "_settled_at", "_stream", "_switch", "_timed", "_waiters")

    def __init__(self, stream: str, switch: AbortSwitch, timed: bool, reached: float | None = None) -> None:
        self._stream, self._switch, self._timed = stream, switch, timed
        self._settled_at = reached
        self._error: BaseException | None = None
        self._waiters: list[Waiter] | None = [] if reached is None else None

    def settle(self, error: BaseException | None) -> None:
        """Mark the event as reached, or as failed with ``error``, and wake its waiters."""
        self._error = error
        self._settled_at = time.perf_counter()
        for waiter in list(self._waiters or ()):
            waiter.wake()

    def wait(self) -> None:
        self.wait_on_behalf_of(self._switch)

    def wait_on_behalf_of(self, switch: AbortSwitch) -> None:
        """Wait as ``wait()`` does, and abort with ``switch`` too: a stream may wait for another device's event."""
        core_semaphore.assert_none_held()
        if self.is_reached and switch.why is None:
            return
        if not self.done():
            self._wait_until_settled(switch)
        self._switch.check()
        if switch is not self._switch:
            switch.check()
        if self._settled_at is None:  # woken by an abort that has been cleared since
            raise StreamAborted(f"{self._stream} was aborted.")
        self._raise_error()

    def _wait_until_settled(self, switch: AbortSwitch) -> None:
        waiter = Waiter()
        with self._switch.wakes(waiter), switch.wakes(waiter):
            assert self._waiters is not None, "an event that was reached from the start is done"
            self._waiters.append(waiter)
            if self._settled_at is not None:
                waiter.wake()
            waiter.wait()

    @property
    def is_reached(self) -> bool:
        """Whether the event is reached, without an error of its stream or an abort of its device."""
        return self._settled_at is not None and self._error is None and self._switch.why is None

    def done(self) -> bool:
        return self._settled_at is not None or self._switch.why is not None

    def time(self) -> float:
        if not self._timed:
            raise RuntimeError("this event has no time: record it with timed=True.")
        self._raise_error()
        if self._settled_at is None:
            raise RuntimeError("this event has no time yet: wait for it first.")
        return self._settled_at

    def _raise_error(self) -> None:
        if self._error is not None:
            raise_kept(self._error, self._stream)


class QueuedStream(Stream):
    """A stream whose thread starts with its first work."""

    def __init__(self, name: str, switch: AbortSwitch) -> None:
        self.name = name
        self._switch = switch
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._enqueued = self._finished = 0
        """Counts of work that was enqueued, and that the thread has finished."""

    @property
    def _is_idle(self) -> bool:
        """Whether all enqueued work is done, without an error or abort."""
        return self._enqueued == self._finished and self._error is None and self._switch.why is None

    def settle(self) -> None:
        idle = threading.Event()
        with self._lock:
            if self._thread is not None:
                self._enqueued += 1
                self._work.put(idle.set)
            else:
                idle.set()
        idle.wait()
        self._error = None

    def join(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread_end.join(thread)

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._switch.check()
        if (error := self._error) is not None:
            raise_kept(error, self.name)
        with self._lock:
            self._switch.check()  # again, under the lock: work put after join() would never settle its event
            self._enqueued += 1
            self._work.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        intraop_threads.apply_num_threads()
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()
                del work  # or the last copy's tensors live until the next copy
                self._finished += 1

    def _attempt(self, work: Callable[..., object], *given: Any) -> None:
        """Run ``work(*given)`` unless the stream has failed, and keep its error.

        The tensors to copy come as ``given``, because clearing a frame releases arguments but not a closure.
        """
        if self._error is None:
            try:
                work(*given)
            except BaseException as error:  # any error must reach a waiter and not end this thread
                # Events keep the error, and its frames, including this one, refer to the tensors.
                traceback.clear_frames(error.__traceback__)
                del work, given
                self._error = error
