"""`Waiter`: one thread's wait for one event that other threads of the process bring about."""

from __future__ import annotations

import threading


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
