"""`Waiter`: one thread's wait for one event that other threads of the process bring about."""

from __future__ import annotations

import contextlib
import threading


class Waiter:
    """One thread's wait for one event.

    A waiter stays woken: Ctrl-C may interrupt the thread after it has been woken, and it then waits a second time.
    """

    __slots__ = ("_parked", "_woken")

    def __init__(self) -> None:
        self._parked: list[threading.Lock] = []
        """What wakes the waiting thread. Whoever pops it, the waker or that thread, decides whether the thread sleeps.
        A wait that Ctrl-C has ended may leave one behind, below that of the next wait."""
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        try:
            parked = self._parked.pop()
        except IndexError:
            return
        parked.release()

    def wait(self) -> None:
        if self._woken:
            return
        bell = _bell()
        self._parked.append(bell)
        if not self._withdraw():
            bell.acquire()

    def _withdraw(self) -> bool:
        """Take back what was parked, if the waiter was woken before it was there."""
        if not self._woken:
            return False
        try:
            self._parked.pop()
        except IndexError:
            return False  # the waker has it, and releases it
        return True

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether the waiter was woken."""
        if self._woken:
            return True
        bell = _bell()
        self._parked.append(bell)
        try:
            if not self._withdraw():
                bell.acquire(timeout=seconds)
        finally:
            with contextlib.suppress(ValueError):  # the waker has taken it
                self._parked.remove(bell)
        return self._woken


def _bell() -> threading.Lock:
    """Return a lock that is held: whoever waits acquires it, whoever wakes releases it."""
    bell = threading.Lock()
    bell.acquire()
    return bell
