"""`Waiter`: one thread's wait for one event that other threads of the process bring about."""

from __future__ import annotations

import contextlib
import threading

from lightning_roundpipe.devices import interpreter_lease


class _Bell:
    """Wakes a thread at once, whoever holds the interpreter's lease; see `interpreter_lease.Ticket`."""

    __slots__ = ("_rung", "wait")

    def __init__(self) -> None:
        self._rung = threading.Lock()
        self._rung.acquire()
        self.wait = self._rung.acquire

    def submit(self) -> None:
        self._rung.release()


class Waiter:
    """One thread's wait for one event.

    A thread that holds the interpreter's lease releases it while it waits, and is woken when it has it again
    (`interpreter_lease`).

    A waiter stays woken: Ctrl-C may interrupt the thread after it has been woken, and it then waits a second time.
    """

    __slots__ = ("_parked", "_woken")

    def __init__(self) -> None:
        self._parked: list[interpreter_lease.Ticket | _Bell] = []
        """What wakes the waiting thread. Whoever pops it, the waker or that thread, decides whether the thread sleeps.
        A wait that Ctrl-C has ended may leave one behind, below that of the next wait."""
        self._woken = False

    @property
    def woken(self) -> bool:
        """Whether a wait returns at once."""
        return self._woken

    def wake(self) -> None:
        self._woken = True
        try:
            parked = self._parked.pop()
        except IndexError:
            return
        parked.submit()

    def wait(self) -> None:
        if self._woken:
            return
        ticket = interpreter_lease.ticket() or _Bell()
        self._parked.append(ticket)
        if not self._withdraw():
            interpreter_lease.release()
            ticket.wait()

    def _withdraw(self) -> bool:
        """Take back what was parked, if the waiter was woken before it was there."""
        if not self._woken:
            return False
        try:
            self._parked.pop()
        except IndexError:
            return False  # the waker has it, and submits it
        return True

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether the waiter was woken."""
        if self._woken:
            return True
        bell = _Bell()
        self._parked.append(bell)
        try:
            if not self._withdraw():
                interpreter_lease.released(bell.wait, True, seconds)
        finally:
            with contextlib.suppress(ValueError):  # the waker has taken it
                self._parked.remove(bell)
        return self._woken
