"""A stream that is a FIFO thread: copy streams of emulated devices, and a GPU's streams for pageable memory.

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
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lightning_roundpipe.devices import intraop_threads, thread_end
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Stream
from lightning_roundpipe.devices.errors import raise_kept


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
