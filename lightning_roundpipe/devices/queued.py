"""A stream that is a FIFO thread: the emulation's copy streams, and a GPU's for pageable memory.

      caller                 stream thread (FIFO)              somebody's thread
        │ copy(dst, src) ──────► [1] the copy
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
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Stream
from lightning_roundpipe.devices.errors import raise_kept


class QueuedStream(Stream):
    """Its thread is started by its first work."""

    def __init__(self, name: str, switch: AbortSwitch) -> None:
        self.name = name
        self._switch = switch
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._enqueued = self._finished = 0
        """Pieces of work that were enqueued, and that the thread is done with."""

    @property
    def _is_idle(self) -> bool:
        """Whether all work that was enqueued is done, without an error."""
        return self._enqueued == self._finished and self._error is None and self._switch.why is None

    def synchronize(self) -> None:
        self.record().wait()

    def settle(self) -> None:
        """After an abort: return when the queue is empty, and forget the error. The switch must be thrown still."""
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
                del work  # or the last copy's tensors live until the next one
                self._finished += 1

    def _attempt(self, work: Callable[..., object], *given: Any) -> None:
        """What is to be copied is ``given``: a frame that is cleared lets go of arguments, but not of a closure."""
        if self._error is None:
            try:
                work(*given)
            except BaseException as error:  # whatever it is, it must reach a waiter and not end this thread
                # Events keep it, and its frames, this one too, hold what was to be copied.
                traceback.clear_frames(error.__traceback__)
                del work, given
                self._error = error
