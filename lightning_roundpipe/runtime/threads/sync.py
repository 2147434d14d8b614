"""Waiting and cancellation for the threads of a step.

Every waiter has a queue of its own, because waking all of 32 threads so that one may proceed costs ten times as much. A
step's `CancelScope` knows all its waiters: the first failure wakes them, and each waiting thread raises `Cancelled`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.devices.waiter import Waiter

Priority = tuple[int, ...]


class Cancelled(BaseException):
    """Raised in a thread when another thread of the step has failed.

    Not an ``Exception``, so that user code does not catch it by accident.
    """


class CancelScope:
    """The first error of a step, and the waiters that it wakes.

    Args:
        on_failure: called once, in the failing thread, to wake threads that wait for a device.
        before: scope of the step before, if that is still in flight. Its failure fails this scope too.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None, before: CancelScope | None = None) -> None:
        self.error: BaseException | None = None
        """The first error, until it is raised."""
        self.failed = False
        self.progress = 0
        """Counter that grows with each wait that ends; the watchdog observes it."""
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._on_failure = on_failure
        self._before = before
        self._after: CancelScope | None = None
        if before is not None:
            before._lead(self)

    def _lead(self, after: CancelScope) -> None:
        with self._lock:
            self._after, error = after, self.error
        if error is not None:
            after.fail(error)

    def part(self) -> None:
        """Drop the reference to the step before, which is over."""
        self._before = None

    def end(self) -> None:
        """End the scope with its step: drop all references to the step and its neighbours."""
        self._on_failure = lambda: None
        self._before = self._after = None

    @property
    def moved(self) -> int:
        """Progress of this step and the one before: for a while, only the latter may make any."""
        return self.progress + (self._before.progress if self._before is not None else 0)

    def fail(self, error: BaseException) -> None:
        """Store the first error and wake all waiters, in this step and the one after. Later errors are ignored."""
        with self._lock:
            if self.failed:
                return
            self.error = error
            self.failed = True
            waiters, after = self._waiters.copy(), self._after
        for waiter in waiters:
            waiter.wake()
        self._on_failure()
        if after is not None:
            after.fail(error)

    def raise_error(self) -> None:
        """Raise the error, if there was one, to the caller of the step.

        The scope does not keep the error. Its traceback refers to frames that refer to this scope, and the cycle would
        keep the step's tensors, also those on devices, until a garbage collection.
        """
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def check(self) -> None:
        if self.failed:
            raise Cancelled

    def wait(self, waiter: Waiter) -> None:
        """Wait until ``waiter`` is woken.

        Raises:
            Cancelled: if the step has failed.
        """
        self._waiters.add(waiter)  # before the look at `failed`, which `fail` sets before it copies the set: no lock
        try:
            if not self.failed:
                intraop_threads.release_intraop_threads()
                waiter.wait()
        finally:
            self._waiters.discard(waiter)
        self.progress += 1
        if self.failed:
            raise Cancelled


class _Ticket:
    """A thread that waits for the user-code lock.

    Attributes:
        rank: its priority, and its number among all tickets.
        piece: key of the section of code that it will run.
        waiter: woken when the thread is to try again; None once it has been woken.
    """

    __slots__ = ("piece", "rank", "waiter")

    def __init__(self, rank: tuple[Priority, int], piece: Hashable) -> None:
        self.rank, self.piece = rank, piece
        self.waiter: Waiter | None = None


class UserLock:
    """The lock under which microbatch threads run user code.

    The threads of all steps share it. Releasing it wakes the waiter with the smallest priority tuple, which then tries
    again: a thread that is running already may come first. A lock that is handed to a waiter stays locked until that
    thread runs, so every other one has to wait as well, and each section of user code takes two switches of threads.
    No thread overtakes one that waits to run the same ``piece`` (section) of code with a smaller priority, so what
    sections add to is added in the order of microbatches.

    A thread may pause: until it resumes, others run user code, except the same piece of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._queue: list[_Ticket] = []
        self._tickets = 0
        self._paused: set[Hashable] = set()

    def acquire(self, priority: Priority, cancel_scope: CancelScope, piece: Hashable = None) -> None:
        """Wait for the lock.

        Args:
            priority: (step, slot, microbatch).
            cancel_scope: the step's cancel scope. If the step fails, this raises and the lock is not held.
            piece: key of the section of code that will run; None for one that no pause excludes.
        """
        with self._lock:
            if not self._held and self._may_run(piece, (priority, self._tickets)):
                self._held = True
                return
            ticket = _Ticket((priority, self._tickets), piece)
            self._tickets += 1
            self._queue.append(ticket)
            waiter = ticket.waiter = Waiter()
        while True:
            try:
                cancel_scope.wait(waiter)
            except BaseException:
                with self._lock:
                    self._queue.remove(ticket)
                    self._wake_next()  # this thread may have been woken, and no other one
                raise
            with self._lock:
                if not self._held and self._may_run(piece, ticket.rank):
                    self._held = True
                    self._queue.remove(ticket)
                    return
                waiter = ticket.waiter = Waiter()

    def _may_run(self, piece: Hashable, rank: tuple[Priority, int]) -> bool:
        """Return whether ``piece`` is not paused, and no thread waits that has to run it before."""
        if piece in self._paused:
            return False
        return piece is None or not any(other.piece == piece and other.rank < rank for other in self._queue)

    def pause(self, piece: Hashable) -> None:
        """Release the lock, but until `resume` to no thread that will run ``piece``, which must not be None."""
        with self._lock:
            self._paused.add(piece)
            self._held = False
            self._wake_next()

    def resume(self, priority: Priority, cancel_scope: CancelScope, piece: Hashable) -> None:
        """Wait for the lock and end the pause. Arguments as for `acquire`."""
        try:
            self.acquire(priority, cancel_scope)
        except BaseException:
            with self._lock:
                self._paused.discard(piece)
                self._wake_next()
            raise
        with self._lock:
            self._paused.discard(piece)

    def release(self) -> None:
        """Release the lock, and wake the next waiter, if any."""
        with self._lock:
            self._held = False
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake the next waiter, if the lock is free.

        Whenever the lock is free and waiters may take it, one that has been woken has yet to try. It finds the lock
        free, or held by a thread that will wake the next one.
        """
        if self._held or not self._queue:
            return
        first = min((t for t in self._queue if t.piece not in self._paused), key=lambda t: t.rank, default=None)
        if first is not None and first.waiter is not None:
            waiter, first.waiter = first.waiter, None
            waiter.wake()
