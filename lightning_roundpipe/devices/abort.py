"""A switch that wakes every waiter of a device.

A thread that fails cannot know who waits for what it will now never do. It throws the switch instead: whoever waits,
or sleeps, or asks later, leaves with ``StreamAborted``. Each waiter brings its own ``threading.Event``, which both the
switch and the thing that it waits for may set, so nobody polls and nobody wakes others up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices.errors import StreamAborted


class AbortSwitch:
    """One device's. ``why`` is ``None`` while all is well, else what the message says of the device."""

    def __init__(self, device: str) -> None:
        self.why: str | None = None
        self._device = device
        self._lock = threading.Lock()
        self._wakes: set[threading.Event] = set()

    def throw(self, why: str) -> None:
        """Wake all waiters, now and from now on."""
        with self._lock:
            self.why = why
            for wake in self._wakes:
                wake.set()

    def clear(self) -> None:
        """Let waits wait again."""
        with self._lock:
            self.why = None

    def check(self) -> None:
        """Raise ``StreamAborted`` if the switch is thrown."""
        if (why := self.why) is not None:
            raise StreamAborted(f"{self._device} was {why}.")

    @contextmanager
    def wakes(self, wake: threading.Event) -> Iterator[None]:
        """Inside, throwing the switch sets ``wake``; it is set at once if the switch is thrown already."""
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
        """Sleep, or raise ``StreamAborted`` as soon as the switch is thrown."""
        if seconds > 0:
            wake = threading.Event()
            with self.wakes(wake):
                wake.wait(seconds)
        self.check()
