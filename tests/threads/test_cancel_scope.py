"""Waiting for each other, and leaving together."""

import random
import threading
import time

import pytest
from patience import join, start

from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.threads.cancel_scope import Cancelled, CancelScope


def _after(first):
    second = CancelScope()
    second.follow(first)
    return second


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("seed", range(5))
def test_a_failure_at_any_moment_leaves_nobody_behind(seed):
    """Between being registered and waiting, while being woken, or before: each thread leaves with `Cancelled`.

    The first error is kept, and devices are told once.
    """
    told, drawn, first = [], random.Random(seed), ValueError("first")
    cancel_scope = CancelScope(lambda: told.append(threading.current_thread().name))
    delays = [drawn.random() * 0.004 for _ in range(12)]
    left = []

    def wait(delay, number):
        def run():
            time.sleep(delay)
            try:
                cancel_scope.wait(Waiter())
            except Cancelled:
                left.append(number)

        return run

    threads = start(*(wait(delay, number) for number, delay in enumerate(delays)))
    time.sleep(0.002)
    cancel_scope.fail(first)
    cancel_scope.fail(ValueError("second"))
    join(threads)
    assert sorted(left) == list(range(12)) and told == [threading.current_thread().name]
    assert cancel_scope.error is first and not cancel_scope._waiters
    with pytest.raises(Cancelled):
        cancel_scope.check()


def test_what_fails_a_step_fails_the_one_behind_it_and_not_the_other_way_round():
    first = CancelScope()
    second = _after(first)
    second.fail(ValueError("second"))
    assert not first.failed
    first, error = CancelScope(), ValueError("first")
    second = _after(first)
    first.fail(error)
    assert second.failed and second.error is error
    assert _after(first).failed, "one that comes later"
    first = CancelScope()
    second = _after(first)
    first.progress += 3
    second.progress += 1
    assert second.moved == 4
    second.unfollow()
    assert second.moved == 1


def test_a_wait_whose_time_is_over_at_once_ends():
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


def test_an_interrupt_takes_the_place_of_an_error_that_it_may_have_caused():
    scope = CancelScope()
    scope.fail(RuntimeError("the compiler was interrupted"))
    scope.fail(Cancelled())
    scope.fail(ValueError("a later error"))
    scope.fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scope.raise_error()
