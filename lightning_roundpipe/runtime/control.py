"""How the threads of a step wait for each other, and how all of them leave when one fails.

Every waiter has a lock of its own: waking everybody to let one go on costs ten times as much with 32 waiters. All
waiters of a step are known to its `Control`, so the first failure wakes them all and each leaves with `Aborted`.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable

Priority = tuple[int, int]


class Aborted(BaseException):
    """Another thread of the step failed. Not an ``Exception``, so that user code does not catch it by accident."""


class Waiter:
    """One thread's wait for one thing. A queue, because a semaphore of Python's own takes five times as long.

    Once woken it stays so: Ctrl-C may come between what the queue gave and whoever waited for it, who then asks again.
    """

    __slots__ = ("_wakes", "_woken")

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._wakes.put(None)

    def wait(self) -> None:
        if not self._woken:
            self._wakes.get()

    def wait_for(self, seconds: float) -> bool:
        """Wait at most ``seconds``; whether it was woken."""
        if self._woken:
            return True
        try:
            self._wakes.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


class Control:
    """The fate of one step: the first error, and everybody who waits.

    Args:
        on_failure: called once, in the failing thread, to wake those who wait for a device.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        """The first one, until it is raised."""
        self.failed = False
        self.progress = 0
        """Grows with everything that happens; the watchdog looks at it."""
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._on_failure = on_failure

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake everybody."""
        with self._lock:
            if self.failed:
                return
            self.error = error
            self.failed = True
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()
        self._on_failure()

    def raise_error(self) -> None:
        """Raise the error, if there was one, to the caller of the step.

        It is not kept: it knows all frames that it came through, which know this. In a circle, everything that was at
        work, on the devices too, would live on until a gc run, long after the caller has forgotten the error.
        """
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def check(self) -> None:
        if self.failed:
            raise Aborted

    def wait(self, waiter: Waiter) -> None:
        """Wait until somebody wakes ``waiter``.

        Raises:
            Aborted: if the step has failed.
        """
        with self._lock:
            if self.failed:
                raise Aborted
            self._waiters.add(waiter)
        try:
            waiter.wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        self.progress += 1
        self.check()


class UserLock:
    """Lets one microbatch thread at a time run user code, the one with the lowest (slot, microbatch) first."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._held = False
        self._queue: list[tuple[Priority, int, Waiter]] = []
        self._tickets = 0

    def acquire(self, priority: Priority) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            waiter = Waiter()
            self._tickets += 1
            heapq.heappush(self._queue, (priority, self._tickets, waiter))
        self._control.wait(waiter)

    def release(self) -> None:
        with self._lock:
            if self._queue:
                heapq.heappop(self._queue)[2].wake()
            else:
                self._held = False
