"""Waiting for each other, and leaving together."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest
from patience import PATIENCE_S, join, start, until

from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.threads.sync import Cancelled, CancelScope, UserLock

# ------------------------------------------------------------------------------------------------------------- failures


def test_a_failure_wakes_everybody() -> None:
    """The first one is kept, those who come to wait later leave as well, and devices are told once."""
    told: list[str] = []
    cancel_scope = CancelScope(lambda: told.append(threading.current_thread().name))
    left: list[type] = []

    def wait() -> None:
        try:
            cancel_scope.wait(Waiter())
        except Cancelled as error:
            left.append(type(error))

    threads = start(*[wait] * 5)
    until(lambda: len(cancel_scope._waiters) == 5)
    cancel_scope.check()
    first = ValueError("first")
    cancel_scope.fail(first)
    cancel_scope.fail(ValueError("second"))
    join(threads)
    assert left == [Cancelled] * 5 and cancel_scope.error is first and cancel_scope.failed
    assert told == [threading.current_thread().name]
    assert not cancel_scope._waiters
    with pytest.raises(Cancelled):
        cancel_scope.wait(Waiter())
    with pytest.raises(Cancelled):
        cancel_scope.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_failure_at_any_moment_leaves_nobody_behind(seed: int) -> None:
    """Between being registered and waiting, while being woken, or before: each thread leaves with `Cancelled`."""
    cancel_scope, drawn = CancelScope(), random.Random(seed)
    delays = [drawn.random() * 0.004 for _ in range(12)]
    left: list[int] = []

    def wait(delay: float, number: int) -> Callable[[], None]:
        def run() -> None:
            time.sleep(delay)
            try:
                cancel_scope.wait(Waiter())
            except Cancelled:
                left.append(number)

        return run

    threads = start(*(wait(delay, number) for number, delay in enumerate(delays)))
    time.sleep(0.002)
    cancel_scope.fail(ValueError())
    join(threads)
    assert sorted(left) == list(range(12))


def test_user_code_does_not_catch_an_abort() -> None:
    """``except Exception`` in a training_step must not swallow the failure of another thread."""
    assert issubclass(Cancelled, BaseException) and not issubclass(Cancelled, Exception)


def test_a_wake_before_the_wait_is_not_lost() -> None:
    waiter, cancel_scope = Waiter(), CancelScope()
    waiter.wake()
    cancel_scope.wait(waiter)


def test_a_wake_is_not_lost_to_an_interrupt_behind_the_wait() -> None:
    """Whoever was interrupted just after being woken asks once more, as `WorkerPool.rest` does."""
    waiter = Waiter()
    assert not waiter.wait_for(0.0)
    waiter.wake()
    waiter.wait()
    assert waiter.wait_for(0.0)
    waiter.wait()


def test_waiting_is_progress() -> None:
    """What the watchdog looks at: a step in which nobody goes on is stuck."""
    cancel_scope, waiter = CancelScope(), Waiter()
    before = cancel_scope.progress
    waiter.wake()
    cancel_scope.wait(waiter)
    assert cancel_scope.progress > before


# ------------------------------------------------------------------------------------------------------ the user's lock


def test_user_code_runs_lowest_first() -> None:
    """By (slot, microbatch), and first come first served where these are equal, whoever came first."""
    lock, cancel_scope = UserLock(), CancelScope()
    lock.acquire((0, 0), cancel_scope)
    order: list[tuple[int, int]] = []

    def take(priority: tuple[int, int]) -> Callable[[], None]:
        def run() -> None:
            lock.acquire(priority, cancel_scope)
            order.append(priority)
            lock.release()

        return run

    wanted = [(3, 1), (1, 2), (3, 0), (1, 0), (-1, 4)]
    threads: list[threading.Thread] = []
    for count, priority in enumerate(wanted, 1):
        threads += start(take(priority))
        until(lambda count=count: len(lock._queue) == count)  # type: ignore[misc]
    lock.release()
    join(threads)
    assert order == sorted(wanted)
    lock.acquire((0, 0), cancel_scope)  # free again
    lock.release()


def test_equal_priorities_are_served_in_order() -> None:
    lock, cancel_scope = UserLock(), CancelScope()
    lock.acquire((0, 0), cancel_scope)
    order: list[int] = []

    def take(number: int) -> Callable[[], None]:
        def run() -> None:
            lock.acquire((1, 1), cancel_scope)
            order.append(number)
            lock.release()

        return run

    threads: list[threading.Thread] = []
    for number in range(4):
        threads += start(take(number))
        until(lambda number=number: len(lock._queue) == number + 1)  # type: ignore[misc]
    lock.release()
    join(threads)
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_one_at_a_time(seed: int) -> None:
    lock, cancel_scope = UserLock(), CancelScope()
    inside, most, done = itertools.count(), [0], [0]
    level = [0]

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            drawn = random.Random(seed * 100 + number)
            for _ in range(20):
                lock.acquire((drawn.randint(0, 5), number), cancel_scope)
                level[0] += 1
                most[0] = max(most[0], level[0])
                next(inside)
                if drawn.random() < 0.2:
                    time.sleep(0.0002)
                level[0] -= 1
                done[0] += 1
                lock.release()

        return run

    join(start(*(work(number) for number in range(6))))
    assert most == [1] and done == [120]


class Late(CancelScope):
    """Its waits return late."""

    def __init__(self) -> None:
        super().__init__()
        self.woken, self.gate = threading.Event(), threading.Event()

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        self.woken.set()
        assert self.gate.wait(PATIENCE_S)


@pytest.mark.parametrize("again", [1, 3])
def test_a_running_thread_need_not_wait_for_one_that_was_woken(again: int) -> None:
    """That one tries again, and is not forgotten."""
    lock, cancel_scope, late = UserLock(), CancelScope(), Late()
    order: list[str] = []

    def take() -> None:
        lock.acquire((0, 0), late)
        order.append("woken")
        lock.release()

    lock.acquire((1, 0), cancel_scope)
    threads = start(take)
    until(lambda: len(lock._queue) == 1)
    lock.release()
    assert late.woken.wait(PATIENCE_S)
    for _ in range(again):
        lock.acquire((1, 0), cancel_scope)  # hangs if the lock belongs to a thread that does not run
        order.append("running")
        lock.release()
    lock.acquire((1, 0), cancel_scope)
    late.gate.set()
    until(lambda: len(lock._queue) == 1)
    lock.release()
    join(threads)
    assert order == ["running"] * again + ["woken"]


def test_nobody_overtakes_in_the_same_section() -> None:
    """What the section adds to is added in the order of microbatches, also if one that was woken comes late."""
    lock, cancel_scope, late = UserLock(), CancelScope(), Late()
    order: list[str] = []

    def take(name: str, priority: tuple[int, int], scope: CancelScope) -> Callable[[], None]:
        def run() -> None:
            lock.acquire(priority, scope, "a")
            order.append(name)
            lock.release()

        return run

    lock.acquire((1, 0), cancel_scope, "a")
    threads = start(take("woken", (0, 1), late))
    until(lambda: len(lock._queue) == 1)
    lock.release()
    assert late.woken.wait(PATIENCE_S)
    threads += start(take("behind", (0, 2), cancel_scope))
    until(lambda: len(lock._queue) == 2)  # although the lock is free
    lock.acquire((0, 0), cancel_scope, "a")  # the one before comes first
    order.append("before")
    lock.release()
    late.gate.set()
    join(threads)
    assert order == ["before", "woken", "behind"]


@pytest.mark.parametrize("seed", range(4))
def test_no_wake_is_lost(seed: int) -> None:
    """Whatever pauses, resumes, fails and comes again: all threads end, and the lock is free."""
    lock, scopes = UserLock(), [CancelScope() for _ in range(3)]
    inside, most = [0], [0]

    def within() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            drawn = random.Random(seed * 100 + number)
            scope = scopes[number % 3]
            with contextlib.suppress(Cancelled):
                for turn in range(60):
                    priority = drawn.randint(0, 5), number
                    lock.acquire(priority, scope, piece := drawn.choice("ab"))
                    within()
                    if drawn.random() < 0.3:
                        lock.pause(piece)
                        time.sleep(drawn.choice((0.0, 0.0003)))
                        lock.resume(priority, scope, piece)
                        within()
                    lock.release()
                    if number == 0 and turn == 30:
                        scopes[0].fail(ValueError())

        return run

    join(start(*(work(number) for number in range(9))))
    assert most == [1]
    for piece in "ab":
        lock.acquire((0, 0), CancelScope(), piece)
        lock.release()


def test_a_failure_wakes_those_who_wait_for_the_lock() -> None:
    cancel_scope = CancelScope()
    lock = UserLock()
    lock.acquire((0, 0), cancel_scope)
    left: list[bool] = []

    def take() -> None:
        try:
            lock.acquire((1, 0), cancel_scope)
        except Cancelled:
            left.append(True)

    threads = start(*[take] * 3)
    until(lambda: len(cancel_scope._waiters) == 3)
    cancel_scope.fail(ValueError())
    join(threads)
    assert left == [True] * 3
    lock.release()
    lock.acquire((1, 0), CancelScope())  # nobody waits who has left
    lock.release()


def test_who_pauses_lets_others_run_but_not_the_same_piece() -> None:
    lock, cancel_scope = UserLock(), CancelScope()
    order: list[str] = []

    def take(name: str, piece: str) -> Callable[[], None]:
        def run() -> None:
            lock.acquire((1, int(name[-1])), cancel_scope, piece)
            order.append(name)
            lock.release()

        return run

    lock.acquire((1, 0), cancel_scope, "a")
    threads = start(take("same 1", "a"), take("other 2", "b"))
    until(lambda: len(lock._queue) == 2)
    lock.pause("a")
    until(lambda: order == ["other 2"])
    threads += start(take("same 3", "a"), take("other 4", "b"))
    until(lambda: order == ["other 2", "other 4"] and len(lock._queue) == 2)
    lock.resume((1, 0), cancel_scope, "a")
    order.append("resumed")
    lock.release()
    join(threads)
    assert order == ["other 2", "other 4", "resumed", "same 1", "same 3"]


@pytest.mark.parametrize("idle", [True, False])
def test_who_fails_in_a_pause_holds_nobody_up(idle: bool) -> None:
    """A step behind it waits for the same piece."""
    failing, other, lock = CancelScope(), CancelScope(), UserLock()
    done: list[bool] = []

    def take() -> None:
        lock.acquire((2, 0), other, "a")
        done.append(True)
        lock.release()

    lock.acquire((1, 0), failing, "a")
    lock.pause("a")
    threads = start(take)
    until(lambda: len(lock._queue) == 1)
    if not idle:
        lock.acquire((2, 1), other, "b")
    failing.fail(ValueError())
    if not idle:
        with pytest.raises(Cancelled):
            lock.resume((1, 0), failing, "a")
        lock.release()
    else:
        lock.resume((1, 0), failing, "a")  # which is free
        lock.release()
    join(threads)
    assert done == [True]


def test_steps_that_share_the_lock_fail_alone() -> None:
    """Who leaves is not given the lock, or gives it on; who is of another step waits on."""
    failing, other = CancelScope(), CancelScope()
    lock = UserLock()
    lock.acquire((0, 0, 0), other)
    order: list[str] = []

    def take(name: str, priority: tuple[int, int, int], cancel_scope: CancelScope) -> Callable[[], None]:
        def run() -> None:
            try:
                lock.acquire(priority, cancel_scope)
            except Cancelled:
                order.append(f"{name} left")
                return
            order.append(name)
            lock.release()

        return run

    threads = start(take("failing", (0, 1, 0), failing), take("other", (1, 0, 0), other))
    until(lambda: len(lock._queue) == 2)
    failing.fail(ValueError())
    until(lambda: order == ["failing left"])
    lock.release()
    join(threads)
    assert order == ["failing left", "other"]


def test_what_fails_a_step_fails_the_one_behind_it_and_not_the_other_way_round() -> None:
    first = CancelScope()
    second = CancelScope(before=first)
    second.fail(ValueError("second"))
    assert not first.failed
    first, error = CancelScope(), ValueError("first")
    second = CancelScope(before=first)
    first.fail(error)
    assert second.failed and second.error is error
    assert CancelScope(before=first).failed, "one that comes later"
    first = CancelScope()
    second = CancelScope(before=first)
    first.progress += 3
    second.progress += 1
    assert second.moved == 4
    second.part()
    assert second.moved == 1


def test_a_wait_whose_time_is_over_at_once_ends() -> None:
    """`SimpleQueue.get` of Python 3.11 waits for ever if its time is over before it sleeps."""
    for seconds in (0.0, 1e-9, 1e-7, 1e-6, 1e-5):
        for _ in range(500):
            assert not Waiter().wait_for(seconds)
    woken = Waiter()
    woken.wake()
    assert woken.wait_for(0.0) and woken.wait_for(1.0)
    late = Waiter()
    threading.Timer(0.01, late.wake).start()
    assert late.wait_for(60.0)
