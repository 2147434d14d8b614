"""Streams and events made of threads.

      caller                 stream thread (FIFO)              somebody's thread
        │ copy(dst, src) ──────► [1] the link's turn,
        │                            memmove, rest of the time
        │ record() ─► event ───► [2] event.settle() ──────────► [3] event.wait() returns
        │                                                            (or raises: failed, aborted)
        │ wait(other) ─────────► [3] as well, in the stream

The first error in a stream is kept, all later work on it is skipped, and its events are settled with that error, so no
waiter hangs and none believes that the data is there. It is raised again at every use of the stream until the device
is reset.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import POISON, Event, Stream, check_copy, check_fill
from lightning_roundpipe.devices.emulated_event import EmulatedEvent
from lightning_roundpipe.devices.emulated_link import Delays, Link, move
from lightning_roundpipe.devices.errors import raise_kept


class InlineStream(Stream):
    """``compute``: the calling thread itself. What it is asked to do is done when the call returns."""

    def __init__(self, name: str, switch: AbortSwitch, poisons: bool, delays: Delays | None) -> None:
        self.name = name
        self._switch, self._poisons, self._delays = switch, poisons, delays

    def record(self, *, timed: bool = False) -> Event:
        # Not where a call is timed: that is within the permit, and layers have their own delay.
        self._switch.sleep(0 if timed or self._delays is None else self._delays.next())
        event = EmulatedEvent(self.name, self._switch, timed)
        event.settle(None)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        event.wait_on_behalf_of(self._switch)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._switch.check()
        move(*check_copy(dst, src))

    def fill(self, buffer: Tensor, byte: int) -> None:
        self._switch.check()
        with torch.inference_mode():  # in which both inference tensors and others may be written
            check_fill(buffer, byte).fill_(byte)

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self.fill(buffer, POISON)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        self.record().wait()


class ThreadStream(Stream):
    """A copy stream: a FIFO thread, started by its first work."""

    def __init__(self, name: str, link: Link, switch: AbortSwitch, poisons: bool, delays: Delays | None) -> None:
        self.name = name
        self._link, self._switch, self._poisons, self._delays = link, switch, poisons, delays
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def record(self, *, timed: bool = False) -> Event:
        event = EmulatedEvent(self.name, self._switch, timed)
        self._enqueue(lambda: event.settle(self._error))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        self._enqueue(lambda: self._attempt(lambda: event.wait_on_behalf_of(self._switch)))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        to, of = check_copy(dst, src)

        def transfer() -> None:
            if self._delays is not None:
                self._switch.sleep(self._delays.next())
            self._link.carry(of.numel() * of.element_size(), lambda: move(to, of))

        self._enqueue(lambda: self._attempt(transfer))

    def fill(self, buffer: Tensor, byte: int) -> None:
        flat = check_fill(buffer, byte)

        def overwrite() -> None:
            flat.fill_(byte)

        self._enqueue(lambda: self._attempt(overwrite))

    def poison(self, buffer: Tensor) -> None:
        if self._poisons:
            self.fill(buffer, POISON)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        self.record().wait()

    def settle(self) -> None:
        """After an abort: return when the queue is empty, and forget the error. The switch must be thrown still."""
        idle = threading.Event()
        with self._lock:
            self._work.put(idle.set) if self._thread is not None else idle.set()
        idle.wait()
        self._error = None

    def join(self) -> None:
        """End the thread once it has worked off its queue. The switch must be thrown, or that may take for ever."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._switch.check()
        if (error := self._error) is not None:
            raise_kept(error, self.name)
        with self._lock:
            self._switch.check()  # under the lock: after join() no work may be put, or its event would never be settled
            self._work.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()
                del work  # or the last copy's tensors live until the next one

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except BaseException as error:  # whatever it is, it must reach a waiter and not end this thread
                self._error = error
