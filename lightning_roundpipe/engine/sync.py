"""Who runs when. Of the threads of microbatches, one runs Python at a time: the one that holds the `Baton`.

The baton guards everything that microbatches share: turns, arenas' order, attributes of modules, random generators. So
there is one way to wait, `Baton.wait`, and no other lock among them. Streams and the optimizer's thread meet them
through a `Signal`. A layer that computes for long gives the baton up meanwhile (`GivenUp`).

    wait ── give the baton up ── the lowest-ranked thread that can go on gets it ── the signal is set ── ready ── [1]
    a step fails ── all its threads that wait are made ready, and raise `Cancelled` ── [2]

Each thread sleeps on a semaphore of its own: waking all of 32 threads, so that one goes on, costs ten times as much.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from lightning_roundpipe.devices import Event, intraop_threads
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.threads.cancel_scope import Cancelled, CancelScope

Subscribe = Callable[[Callable[[], None]], bool]
"""Has a callback called once something has come; returns False, and calls nothing, if it has come already."""


class Signal(Versioned):
    """A point that is reached once, as version 1. Any thread may reach it."""

    __slots__ = ()

    @property
    def is_set(self) -> bool:
        return self.version > 0

    def set(self) -> None:
        """Reach it. Runs the callbacks in the calling thread."""
        self.publish(1)

    def then(self, callback: Callable[[], None]) -> bool:
        """Have ``callback`` called when it is reached; see `Subscribe`."""
        return self.when(1, callback)

    def wait(self, scope: CancelScope) -> None:
        """Block a thread that takes no part in the baton until it is reached.

        Raises `Cancelled` if the step has failed.
        """
        waiter = Waiter()
        if self.then(waiter.wake):
            scope.wait(waiter)


class Runner:
    """A thread that takes part: holds the baton, or waits for it.

    Attributes:
        rank: of threads that can go on, the one with the lowest rank goes first.
        scope: whose failure ends the thread's waits.
        inside: the layer whose code the thread runs, and which run it is ("forward", "recompute" or "backward"); None
            in user code.
    """

    __slots__ = ("_asleep", "inside", "rank", "scope")

    def __init__(self, scope: CancelScope, rank: int = 0) -> None:
        self.scope, self.rank = scope, rank
        self.inside: tuple[str, str] | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        self._asleep.release()

    def sleep(self) -> None:
        """Sleep until `wake`. The thread then holds the baton."""
        if not self._asleep.acquire(blocking=False):
            intraop_threads.release_intraop_threads()
            self._asleep.acquire()

    def wait_for(self, seconds: float) -> bool:
        """Sleep for at most ``seconds``, and return whether the thread was woken."""
        return self._asleep.acquire(timeout=seconds)


class Baton:
    """A lock that goes to the lowest-ranked thread that can go on."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holder: Runner | None = None
        self._computing = 0
        """The number of threads that compute without it."""
        self._exclusive: Runner | None = None
        """The thread that holds it, and waits until they have computed."""
        self._ready: list[tuple[int, int, Runner]] = []
        self._count = itertools.count()
        self._parked: set[Runner] = set()

    @property
    def runner(self) -> Runner:
        """The thread that holds it, which is the calling one."""
        assert self._holder is not None
        return self._holder

    def acquire(self, runner: Runner, sleep: Callable[[], object] | None = None) -> None:
        """Wait for the baton, and hold it also if the step has failed meanwhile.

        ``sleep`` sleeps until `Runner.wake`, on behalf of ``runner``. If it raises, the baton is not held.
        """
        with self._mutex:
            if self._holder is None:
                self._holder = runner
                return
            self._push(runner)
        try:
            (sleep or runner.sleep)()
        except BaseException:
            self._withdraw(runner)
            raise

    def acquire_exclusive(self, runner: Runner, sleep: Callable[[], object]) -> None:
        """As `acquire`; then also wait until no thread computes without it."""
        self.acquire(runner, sleep)
        with self._mutex:
            self._exclusive = runner if self._computing else None
            waits = bool(self._computing)
        try:
            if waits:
                sleep()
        except BaseException:
            with self._mutex:
                self._exclusive = None
            self.release()
            raise

    def release(self, *, computes: bool = False) -> None:
        """Hand the baton on; ``computes``: until `end_computing`, the thread computes without it."""
        with self._mutex:
            self._computing += computes
            following = self._holder = heapq.heappop(self._ready)[2] if self._ready else None
        if following is not None:
            following.wake()

    def computing(self) -> GivenUp:
        """Return a context in which the calling thread computes without it."""
        return GivenUp(self, computes=True)

    def end_computing(self) -> None:
        """Let a thread go on that holds the baton, and waits until none computes without it."""
        with self._mutex:
            self._computing -= 1
            exclusive = None if self._computing else self._exclusive
            self._exclusive = self._exclusive if self._computing else None
        if exclusive is not None:
            exclusive.wake()

    def wait(self, subscribe: Subscribe) -> bool:
        """Give the baton up until ``subscribe`` calls back [1].

        Returns:
            False if there was nothing to wait for.

        Raises:
            Cancelled: the step has failed [2]. The thread holds the baton.
        """
        runner = self._holder
        assert runner is not None
        with self._mutex:
            self._parked.add(runner)
        # After this, a failure finds the runner among the parked; before it, the runner finds the failure.
        if runner.scope.failed or not subscribe(lambda: self._make_ready(runner)):
            with self._mutex:
                left = runner in self._parked
                self._parked.discard(runner)
            if not left:  # made ready in between: it is queued, or was handed the baton, which it holds
                self.release()
                runner.sleep()
            runner.scope.check()
            return False
        self.release()
        runner.sleep()
        runner.scope.progress += 1
        runner.scope.check()
        return True

    def wait_for_event(self, event: Event) -> None:
        """Have the host wait for a point of a device's work. Others run meanwhile."""
        with GivenUp(self):
            event.wait()

    def offer(self) -> None:
        """Let a thread of lower rank that can go on go first.

        Raises `Cancelled` if the step has failed. The thread holds the baton.
        """
        runner = self._holder
        assert runner is not None
        runner.scope.check()
        with self._mutex:
            if not self._ready or self._ready[0][0] >= runner.rank:
                return
            self._push(runner)
            following = self._holder = heapq.heappop(self._ready)[2]
        following.wake()
        runner.sleep()
        runner.scope.check()

    def wake(self, scope: CancelScope) -> None:
        """Make all threads of a failed step ready [2]."""
        with self._mutex:
            parked = [runner for runner in self._parked if runner.scope is scope]
        for runner in parked:
            self._make_ready(runner)

    def _make_ready(self, runner: Runner) -> None:
        with self._mutex:
            if runner not in self._parked:
                return
            self._parked.remove(runner)
            if self._holder is not None:
                self._push(runner)
                return
            self._holder = runner
        runner.wake()

    def _withdraw(self, runner: Runner) -> None:
        """Let the baton go past a thread that waits for it no more, or on if it has been handed it already."""
        with self._mutex:
            others = [entry for entry in self._ready if entry[2] is not runner]
            queued = len(others) < len(self._ready)
            self._ready = others
            heapq.heapify(others)
        if not queued:
            self.release()

    def _push(self, runner: Runner) -> None:
        heapq.heappush(self._ready, (runner.rank, next(self._count), runner))


class GivenUp:
    """A context in which the calling thread has given the baton up: it waits for a device, or ``computes``."""

    __slots__ = ("_baton", "_computes", "_runner")

    def __init__(self, baton: Baton, *, computes: bool = False) -> None:
        self._baton, self._computes = baton, computes

    def __enter__(self) -> None:
        self._runner = self._baton.runner
        self._baton.release(computes=self._computes)

    def __exit__(self, *error: object) -> None:
        if self._computes:
            self._baton.end_computing()
        self._baton.acquire(self._runner)


__all__ = ["Baton", "CancelScope", "Cancelled", "GivenUp", "Runner", "Signal", "Subscribe"]
