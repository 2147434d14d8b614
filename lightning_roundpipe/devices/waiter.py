"""`Waiter`: one thread's wait for one event that other threads of the process bring about."""

from __future__ import annotations

import queue

from lightning_roundpipe.devices import interpreter_lease


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
        self._parked: list[interpreter_lease.Ticket] = []
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
        try:
            interpreter_lease.released(self._wakes.get, True, seconds)
        except queue.Empty:
            return False
        return True
