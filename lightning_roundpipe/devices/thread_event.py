"""Events that a thread of our own reaches: wait for them, or be woken by an abort."""

from __future__ import annotations

import threading
import time

from lightning_roundpipe.devices import core_semaphore
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event
from lightning_roundpipe.devices.errors import StreamAborted, raise_kept


class ThreadEvent(Event):
    """A condition that comes true once: reached, or failed with an error.

    No lock guards it. `settle` sets the time and then wakes the waiters that it finds; a waiter adds itself and then
    looks at the time. Whichever comes first, the other one sees it.

    Args:
        stream: the name of the stream, for errors.
        switch: of the stream's device.
        timed: whether `time` may be asked for.
        reached: when the point was reached, if it is reached already.
    """

    def __init__(self, stream: str, switch: AbortSwitch, timed: bool, reached: float | None = None) -> None:
        self._stream, self._switch, self._timed = stream, switch, timed
        self._settled_at = reached
        self._error: BaseException | None = None
        self._wakes: list[threading.Event] = []

    def settle(self, error: BaseException | None) -> None:
        """The point is reached, or never will be because of ``error``."""
        self._error = error
        self._settled_at = time.perf_counter()
        for wake in list(self._wakes):
            wake.set()

    def wait(self) -> None:
        self.wait_on_behalf_of(self._switch)

    def wait_on_behalf_of(self, switch: AbortSwitch) -> None:
        """``wait()`` that ``switch`` ends too: a stream may wait for another device's event, and its own is aborted."""
        core_semaphore.assert_none_held()
        if not self.done():
            self._wait_until_settled(switch)
        self._switch.check()
        if switch is not self._switch:
            switch.check()
        if self._settled_at is None:  # woken by an abort that is over by now
            raise StreamAborted(f"{self._stream} was aborted.")
        self._raise_error()

    def _wait_until_settled(self, switch: AbortSwitch) -> None:
        wake = threading.Event()
        with self._switch.wakes(wake), switch.wakes(wake):
            self._wakes.append(wake)
            if self._settled_at is not None:
                wake.set()
            wake.wait()

    @property
    def is_reached(self) -> bool:
        """Whether the point is reached, and neither its stream nor its device has failed."""
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
