"""Events that a thread of this process reaches. An abort wakes their waiters."""

from __future__ import annotations

import time

from lightning_roundpipe.devices import core_semaphore
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.base import Event
from lightning_roundpipe.devices.errors import StreamAborted, raise_kept
from lightning_roundpipe.devices.waiter import Waiter


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
