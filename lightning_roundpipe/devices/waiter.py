"""Waits for what other threads of the process bring about, and the switch that ends those for a device.

A failing thread cannot know which threads wait for work that it will now never do, so it throws the `AbortSwitch` of a
device. Every thread that waits, sleeps or calls ``check`` then raises ``StreamAborted``. Each waiting thread brings a
`Waiter`, which both the switch and the awaited work may wake: no thread polls, and no waiting thread wakes another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices.errors import StreamAborted


class Waiter:
    """One thread's wait for one event. Faster than `threading.Event`, which any number of threads may wait for.

    A waiter stays woken: Ctrl-C may interrupt the thread after it has been woken, and it then waits a second time.
    """

    __slots__ = ("_bell", "_woken")

    def __init__(self) -> None:
        self._bell = threading.Lock()
        """Held until the waiter is woken."""
        self._bell.acquire()
        self._woken = False

    def wake(self) -> None:
        self._woken = True  # first: the waiting thread looks here before it takes the lock, and after
        try:
            self._bell.release()
        except RuntimeError:  # it was woken before
            return

    def wait(self) -> None:
        if not self._woken:
            self._bell.acquire()

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether the waiter was woken."""
        if not self._woken:
            self._bell.acquire(timeout=seconds)
        return self._woken


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
