"""How the threads of a step wait for each other, and how all of them leave when one fails.

Every waiter has a lock of its own: waking everybody to let one go on costs ten times as much with 32 waiters. All
waiters of a step are known to its `CancelScope`, so the first failure wakes them all and each leaves with `Cancelled`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable

from lightning_roundpipe.devices import intraop_threads

Priority = tuple[int, ...]


class Cancelled(BaseException):
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


class CancelScope:
    """The fate of one step: the first error, and everybody who waits.

    Args:
        on_failure: called once, in the failing thread, to wake those who wait for a device.
        before: of the step before, if that is still on its way: what fails it fails this one.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None, before: CancelScope | None = None) -> None:
        self.error: BaseException | None = None
        """The first one, until it is raised."""
        self.failed = False
        self.progress = 0
        """Grows with everything that happens; the watchdog looks at it."""
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
        """The step before is over."""
        self._before = None

    def end(self) -> None:
        """The step itself is over: it is known to nobody any more."""
        self._on_failure = lambda: None
        self._before = self._after = None

    @property
    def moved(self) -> int:
        """Grows with everything that happens here, and in the step before, which may be all that there is to do."""
        return self.progress + (self._before.progress if self._before is not None else 0)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake everybody."""
        with self._lock:
            if self.failed:
                return
            self.error = error
            self.failed = True
            waiters, after = list(self._waiters), self._after
        for waiter in waiters:
            waiter.wake()
        self._on_failure()
        if after is not None:
            after.fail(error)

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
            raise Cancelled

    def wait(self, waiter: Waiter) -> None:
        """Wait until somebody wakes ``waiter``.

        Raises:
            Cancelled: if the step has failed.
        """
        with self._lock:
            if self.failed:
                raise Cancelled
            self._waiters.add(waiter)
        intraop_threads.release_intraop_threads()
        try:
            waiter.wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        self.progress += 1
        self.check()


class UserLock:
    """Lets one microbatch thread at a time run user code, the one with the lowest priority first, whatever its step.

    A thread may pause: others run user code until it resumes, but not the same ``piece`` of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._queue: list[tuple[Priority, int, Waiter, Hashable]] = []
        self._tickets = 0
        self._paused: set[Hashable] = set()

    def acquire(self, priority: Priority, cancel_scope: CancelScope, piece: Hashable = None) -> None:
        """Wait for the lock.

        Args:
            priority: (step, slot, microbatch).
            cancel_scope: of the step; if it fails, the lock is not held.
            piece: what stands for the code that is going to run; None for any.
        """
        with self._lock:
            if not self._held and piece not in self._paused:
                self._held = True
                return
            waiter = Waiter()
            self._tickets += 1
            self._queue.append((priority, self._tickets, waiter, piece))
        try:
            cancel_scope.wait(waiter)
        except BaseException:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: Waiter) -> None:
        with self._lock:
            others = [ticket for ticket in self._queue if ticket[2] is not waiter]
            given = len(others) == len(self._queue)
            self._queue = others
            if given:
                self._give_on()

    def pause(self, piece: Hashable) -> None:
        """Give the lock on, but to no thread that is to run ``piece``, which is not None."""
        with self._lock:
            self._paused.add(piece)
            self._give_on()

    def resume(self, priority: Priority, cancel_scope: CancelScope, piece: Hashable) -> None:
        """End the pause as soon as the lock is free. Arguments as for `acquire`."""
        try:
            self.acquire(priority, cancel_scope)
        except BaseException:
            with self._lock:
                self._paused.discard(piece)
                if not self._held:
                    self._give_on()
            raise
        with self._lock:
            self._paused.discard(piece)

    def release(self) -> None:
        """Give the lock on."""
        with self._lock:
            self._give_on()

    def _give_on(self) -> None:
        first = min((ticket for ticket in self._queue if ticket[3] not in self._paused), default=None)
        self._held = first is not None
        if first is not None:
            self._queue.remove(first)
            first[2].wake()
