"""A switch that wakes every waiter of a device.

A failing thread cannot know which threads wait for work that it will now never do, so it throws the switch. Every
thread that waits, sleeps or calls ``check`` then raises ``StreamAborted``. Each waiting thread brings a `Waiter`, which
both the switch and the awaited work may wake: no thread polls, and no waiting thread wakes another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices.errors import StreamAborted
from lightning_roundpipe.devices.waiter import Waiter


class AbortSwitch:
    """The abort switch of one device.

    Attributes:
        why: the reason, for the error message, while the switch is thrown; else None.
        closed: whether the switch stays thrown.
    """

    def __init__(self, device: str) -> None:
        self.why: str | None = None
        self.closed = False
        self._device = device
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()

    def throw(self, why: str) -> None:
        """Wake all present waiters, and let later ones return at once. Nothing changes on a closed device."""
        with self._lock:
            if not self.closed:
                self.why = why
            for waiter in self._waiters:
                waiter.wake()

    def close(self) -> None:
        """Throw the switch for good."""
        self.throw("closed")
        self.closed = True

    def clear(self) -> None:
        """Take the switch back, so that waits block again."""
        with self._lock:
            self.why = None

    def check(self) -> None:
        """Raise ``StreamAborted`` if the switch is thrown."""
        if (why := self.why) is not None:
            raise StreamAborted(f"{self._device} was {why}.")

    @contextmanager
    def wakes(self, waiter: Waiter) -> Iterator[None]:
        """Let ``throw`` wake ``waiter`` while the context is open; wake it at once if the switch is thrown already."""
        with self._lock:
            self._waiters.add(waiter)
            if self.why is not None:
                waiter.wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``; raise ``StreamAborted`` as soon as the switch is thrown."""
        if seconds > 0:
            waiter = Waiter()
            with self.wakes(waiter):
                waiter.wait_for(seconds)
        self.check()
