"""`Waiter`: one thread's wait for one event that other threads of the process bring about."""

from __future__ import annotations

import contextlib
import queue
import threading

from lightning_roundpipe.devices import interpreter_lease


class _Bell:
    """Wakes a thread that waits for a limited time, with or without the lease."""

    __slots__ = ("_rung", "acquire")

    def __init__(self) -> None:
        self._rung = threading.Lock()
        self._rung.acquire()
        self.acquire = self._rung.acquire

    def submit(self) -> None:
        self._rung.release()


class Waiter:
    """One thread's wait for one event. It uses a ``SimpleQueue``, which is five times as fast as a semaphore.

    A thread that holds the interpreter's lease releases it while it waits, and is woken when it has it again
    (`interpreter_lease`).

    A waiter stays woken: Ctrl-C may interrupt the thread after it has taken the item from the queue, and it then waits
    a second time.
    """

    __slots__ = ("_parked", "_wakes", "_woken")

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._parked: list[interpreter_lease.Ticket | _Bell] = []
        """The ticket of the thread that waits, if it is to get the lease. Whoever pops it, the waker or that thread,
        decides whether the thread sleeps."""
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        try:
            ticket = self._parked.pop()
        except IndexError:
            self._wakes.put(None)
        else:
            ticket.submit()

    def wait(self) -> None:
        if self._woken:
            return
        if not interpreter_lease.holds():
            self._wakes.get()
            return
        ticket = interpreter_lease.Ticket()
        self._parked.append(ticket)
        if not self._withdraw():
            interpreter_lease.release()
            ticket.wait()

    def _withdraw(self) -> bool:
        """Take the ticket back if the waiter was woken before the ticket was there."""
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
        # Not `SimpleQueue.get`, which waits without end if its time is over before it sleeps (Python 3.11).
        bell = _Bell()
        self._parked.append(bell)
        try:
            if not self._withdraw():
                interpreter_lease.released(bell.acquire, True, seconds)
        finally:  # after Ctrl-C too: a later wait must not miss its wake
            with contextlib.suppress(ValueError):  # the waker has taken it
                self._parked.remove(bell)
        return self._woken
