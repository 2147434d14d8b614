"""A switch that wakes every waiter of a device.

A failing thread cannot know which threads wait for work that it will now never do, so it throws the switch. Every
thread that waits, sleeps or calls ``check`` then raises ``StreamAborted``. Each waiter brings its own
``threading.Event``, which both the switch and the awaited work may set: no thread polls, and no waiter wakes another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices import interpreter_lease
from lightning_roundpipe.devices.errors import StreamAborted


class AbortSwitch:
    """The abort switch of one device. ``why`` is ``None`` until it is thrown, then the reason for the error message."""

    def __init__(self, device: str) -> None:
        self.why: str | None = None
        self._device = device
        self._lock = threading.Lock()
        self._wakes: set[threading.Event] = set()

    def throw(self, why: str) -> None:
        """Wake all present waiters, and let later ones return at once."""
        with self._lock:
            self.why = why
            for wake in self._wakes:
                wake.set()

    def clear(self) -> None:
        """Take the switch back, so that waits block again."""
        with self._lock:
            self.why = None

    def check(self) -> None:
        """Raise ``StreamAborted`` if the switch is thrown."""
        if (why := self.why) is not None:
            raise StreamAborted(f"{self._device} was {why}.")

    @contextmanager
    def wakes(self, wake: threading.Event) -> Iterator[None]:
        """Let ``throw`` set ``wake`` while the context is open; set it at once if the switch is thrown already."""
        with self._lock:
            self._wakes.add(wake)
            if self.why is not None:
                wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._wakes.discard(wake)

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``; raise ``StreamAborted`` as soon as the switch is thrown."""
        if seconds > 0:
            wake = threading.Event()
            with self.wakes(wake):
                interpreter_lease.released(wake.wait, seconds)
        self.check()
