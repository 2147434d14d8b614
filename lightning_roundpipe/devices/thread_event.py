"""Events that a thread of our own reaches: wait for them, or be woken by an abort."""

from __future__ import annotations

import threading
import time

from lightning_roundpipe.devices import core_semaphore
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event
from lightning_roundpipe.devices.errors import StreamAborted, raise_kept


class ThreadEvent(Event):
    """A condition that comes true once: reached, or failed with an error."""

    def __init__(self, stream: str, switch: AbortSwitch, timed: bool) -> None:
        self._stream, self._switch, self._timed = stream, switch, timed
        self._lock = threading.Lock()
        self._wakes: list[threading.Event] = []
        self._settled_at: float | None = None
        self._error: BaseException | None = None

    def settle(self, error: BaseException | None) -> None:
        """The point is reached, or never will be because of ``error``."""
        with self._lock:
            self._error = error
            self._settled_at = time.perf_counter()
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake.set()

    def wait(self) -> None:
        self.wait_on_behalf_of(self._switch)

    def wait_on_behalf_of(self, switch: AbortSwitch) -> None:
        """``wait()`` that ``switch`` ends too: a stream may wait for another device's event, and its own is aborted."""
        core_semaphore.assert_none_held()
        if not self.done():
            wake = threading.Event()
            with self._switch.wakes(wake), switch.wakes(wake):
                with self._lock:
                    if self._settled_at is None:
                        self._wakes.append(wake)
                    else:
                        wake.set()
                wake.wait()
        self._switch.check()
        switch.check()
        if self._settled_at is None:  # woken by an abort that is over by now
            raise StreamAborted(f"{self._stream} was aborted.")
        self._raise_error()

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
