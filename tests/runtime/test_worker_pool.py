"""Waiting under a watchdog, coming to rest, and closing whatever happened."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
from patience import PATIENCE_S, join, longer_each_try, start, until

from lightning_roundpipe.config import Emulation, RoundPipeError
from lightning_roundpipe.devices import StreamAborted, make_devices
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.memory import Reserved
from lightning_roundpipe.runtime.core import worker_pool
from lightning_roundpipe.runtime.core.worker_pool import WatchedCancelScope, WorkerPool, stacks
from lightning_roundpipe.runtime.threads.sync import Cancelled, CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task, TaskThread, within


def make(limit: float = 1e4) -> WorkerPool:
    return WorkerPool(make_devices("cpu", [torch.device("cpu")] * 2, Emulation()), limit)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setattr(worker_pool, "GRACE", PATIENCE_S)
    made = make()
    yield made
    made.close()
    until(lambda: harness.roundpipe_threads() == [], "a thread is left")  # a broken crew joins with a deadline


def kill(thread: TaskThread) -> None:
    thread._tasks.put(None if thread is None else "no task")  # type: ignore[arg-type]
    join([thread._thread])


# -------------------------------------------------------------------------------------------------------------- waiting


def test_it_waits_until_it_is_woken(pool: WorkerPool) -> None:
    waiter = Waiter()
    threading.Timer(0.05, waiter.wake).start()
    pool.wait(waiter, CancelScope())


def test_nothing_happens() -> None:
    pool = make(0.2)
    with pytest.raises(TimeoutError, match=r"(?s)watchdog_timeout=0.2 seconds.*test_nothing_happens"):
        pool.wait(Waiter(), CancelScope())
    pool.close()


@longer_each_try
def test_something_happens(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    pool, cancel_scope, waiter = make(times), CancelScope(), Waiter()
    monkeypatch.setattr(worker_pool, "LOOK", 0.05)

    def progress() -> None:
        for _ in range(12):
            time.sleep(0.1 * times)
            cancel_scope.progress += 1
        waiter.wake()

    threads = start(progress)
    try:
        pool.wait(waiter, cancel_scope)
    finally:
        join(threads)
        pool.close()


def test_unless_it_failed(pool: WorkerPool) -> None:
    cancel_scope = CancelScope()
    cancel_scope.fail(ValueError())
    pool.wait(Waiter(), cancel_scope, unless_failed=True)


@pytest.mark.parametrize("which", ["worker", "microbatch"])
def test_a_dead_thread_is_found(pool: WorkerPool, which: str) -> None:
    thread = pool.workers[0].thread if which == "worker" else pool.thread(1)
    assert pool.thread(1) is pool.thread(1)
    kill(thread)
    with pytest.raises(
        RoundPipeError, match=rf"(?s)'roundpipe-{which}\d' has died \(AttributeError.*MainThread"
    ) as caught:
        pool.wait(Waiter(), CancelScope())
    assert isinstance(caught.value.__cause__, AttributeError)
    pool.broken = True


def test_a_step_of_the_main_thread(pool: WorkerPool) -> None:
    cancel_scope = WatchedCancelScope(pool)
    woken = Waiter()
    woken.wake()
    cancel_scope.wait(woken)
    assert cancel_scope.progress == 1 and not cancel_scope.given_up
    kill(pool.workers[1].thread)
    with pytest.raises(RoundPipeError):
        cancel_scope.wait(Waiter())
    assert cancel_scope.given_up
    cancel_scope.fail(ValueError())
    woken.wake()
    pool.workers[1].thread = TaskThread("roundpipe-worker1")
    with pytest.raises(Cancelled):
        cancel_scope.wait(woken)


def test_stacks_name_threads_and_places() -> None:
    inside, done = threading.Event(), threading.Event()

    def somewhere() -> None:
        inside.set()
        done.wait(PATIENCE_S)

    thread = threading.Thread(target=somewhere, name="somebody")
    thread.start()
    inside.wait(PATIENCE_S)
    said = stacks()
    done.set()
    thread.join()
    assert re.search(r"Thread 'somebody' \(\d+\):\n(.*\n)+.*in somewhere\n", said)
    assert "Thread 'MainThread'" in said and "test_stacks_name_threads_and_places" in said


# ------------------------------------------------------------------------------------------------------- coming to rest


def a_while(pool: WorkerPool, seconds: float, done: list[int]) -> Task[None]:
    def work() -> None:
        time.sleep(seconds)
        done.append(1)

    return pool.thread(0).submit(work)


def test_everybody_has_come_back(pool: WorkerPool) -> None:
    done: list[int] = []
    cancel_scope = CancelScope()
    pool.workers[1].thread.submit(lambda: (time.sleep(0.05), done.append(2)))
    pool.rest(cancel_scope, [a_while(pool, 0.1, done)])
    assert sorted(done) == [1, 2] and not cancel_scope.failed and not pool.broken


@pytest.mark.parametrize("given_up", [False, True])
def test_after_a_failure(pool: WorkerPool, given_up: bool) -> None:
    """Threads that are late come back, and devices can be used again."""
    cancel_scope, done = CancelScope(pool.abort), []  # type: ignore[var-annotated]
    task = a_while(pool, 0.3, done)
    cancel_scope.fail(ValueError("first"))
    with pytest.raises(StreamAborted):
        pool.devices[0].compute.synchronize()
    pool.rest(cancel_scope, [task], given_up=given_up)
    assert done == [1] and not pool.broken
    pool.devices[0].compute.synchronize()
    with pytest.raises(ValueError, match="first"):
        cancel_scope.raise_error()
    assert cancel_scope.error is None and cancel_scope.failed


def test_somebody_does_not_come_back(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE", 0.3)
    cancel_scope, release = CancelScope(), threading.Event()
    task = pool.thread(0).submit(lambda: release.wait(PATIENCE_S))
    cancel_scope.fail(ValueError())
    pool.rest(cancel_scope, [task], given_up=True)
    assert pool.broken
    pool.close()  # joins all others
    until(lambda: harness.roundpipe_threads() == ["roundpipe-microbatch0"])
    release.set()
    until(lambda: not harness.roundpipe_threads())


def test_the_dead_are_not_waited_for(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE", 1e4)
    cancel_scope = CancelScope()
    kill(pool.thread(0))
    task = pool.thread(0).submit(lambda: None)
    cancel_scope.fail(ValueError())
    pool.rest(cancel_scope, [task], given_up=True)
    assert pool.broken


def test_what_a_device_was_doing_failed(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a GPU fails when somebody looks at it, which may be here."""

    def fails() -> None:
        raise RuntimeError("on the device")

    cancel_scope = CancelScope()
    monkeypatch.setattr(pool.devices[1].compute, "synchronize", fails)
    pool.rest(cancel_scope)
    assert not pool.broken
    with pytest.raises(RuntimeError, match="on the device"):
        cancel_scope.raise_error()


def test_a_device_that_cannot_be_reset(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    cancel_scope = CancelScope()
    cancel_scope.fail(ValueError("first"))
    monkeypatch.setattr(pool.devices[1], "reset", fails)
    pool.rest(cancel_scope)
    assert pool.broken
    with pytest.raises(ValueError, match="first") as caught:
        cancel_scope.raise_error()
    assert "could not be reset: RuntimeError('no')" in caught.value.__notes__[0]


# -------------------------------------------------------------------------------------------------------------- closing


def test_everything_is_closed_though_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    pool.thread(2)
    for worker in pool.workers:
        worker.reserve(Reserved(1000, copies=1000))

    def fails(*_: Any) -> None:
        raise RuntimeError("cannot be closed")

    real = pool.workers[0].close
    monkeypatch.setattr(pool.workers[0], "close", lambda deadline: (real(deadline), fails()))
    real_device = pool.devices[0].close
    monkeypatch.setattr(pool.devices[0], "close", lambda: (real_device(), fails()))
    with pytest.raises(RuntimeError, match="cannot be closed"):
        pool.close()
    assert harness.roundpipe_threads() == []
    assert [device.resident_bytes() for device in pool.devices] == [0, 0]


def test_within() -> None:
    done: list[int] = []
    assert within(PATIENCE_S, lambda: done.append(1)) and done == [1]
    with pytest.raises(ValueError, match="planted"):
        within(PATIENCE_S, lambda: exec("raise ValueError('planted')"))
    release = threading.Event()
    assert not within(0.1, lambda: release.wait(PATIENCE_S))
    release.set()
    until(lambda: not harness.roundpipe_threads())


def test_an_error_knows_no_circle() -> None:
    """The frames of an error know the task, which must not know the error."""
    thread = TaskThread("roundpipe-test")

    def fails() -> None:
        raise ValueError("planted")

    task = thread.submit(fails)
    task.waiter.wait()
    with pytest.raises(ValueError, match="planted"):
        task.result()
    assert task._error is None
    thread.stop()
    thread.join()
