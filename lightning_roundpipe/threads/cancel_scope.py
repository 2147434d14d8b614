"""Waiting and cancellation for the threads of a step.

Every waiter has a queue of its own, because waking all of 32 threads so that one may proceed costs ten times as much. A
step's `CancelScope` knows all its waiters: the first failure wakes them, and each waiting thread raises `Cancelled`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.devices.waiter import Waiter


class Cancelled(BaseException):
    """Raised in a thread when another thread of the step has failed.

    Not an ``Exception``, so that user code does not catch it by accident.
    """


class CancelScope:
    """The first error of a step, and the waiters that it wakes.

    Attributes:
        on_failure: called once, in the failing thread, to wake threads that wait for a device.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        """The first error, until it is raised."""
        self.failed = False
        self.progress = 0
        """Counter that grows with each wait that ends; the watchdog observes it."""
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self.on_failure = on_failure
        self._before: CancelScope | None = None
        self._after: CancelScope | None = None

    def follow(self, before: CancelScope) -> None:
        """Fail with the scope of the step before, which is in flight: at once if that has failed already."""
        self._before = before
        with before._lock:
            before._after, error = self, before.error
        if error is not None:
            self.fail(error)

    def unfollow(self) -> None:
        """Drop the reference to the step before, which is over."""
        self._before = None

    def end(self) -> None:
        """End the scope with its step: drop all references to the step and its neighbours."""
        self.on_failure = lambda: None
        self._before = self._after = None

    @property
    def moved(self) -> int:
        """Progress of this step and the one before: for a while, only the latter may make any."""
        return self.progress + (self._before.progress if self._before is not None else 0)

    def fail(self, error: BaseException) -> None:
        """Store the first error and wake all waiters, in this step and the one after.

        Later errors are ignored, but for an interrupt, whose effect the first one may be: compilers that layers wait
        for get it, too.
        """
        with self._lock:
            if self.failed:
                if isinstance(self.error, Exception) and not isinstance(error, (Exception, Cancelled)):
                    self.error = error
                return
            self.error = error
            self.failed = True
            waiters, after = self._waiters.copy(), self._after
        for waiter in waiters:
            waiter.wake()
        self.on_failure()
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
        """Wait until ``waiter`` is woken. Raises `Cancelled` if the step has failed."""
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
