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
from lightning_roundpipe.runtime import crew as crew_module
from lightning_roundpipe.runtime.control import Aborted, Control, Waiter
from lightning_roundpipe.runtime.crew import Crew, WatchedControl, stacks
from lightning_roundpipe.runtime.threads import Task, TaskThread, within


def make(limit: float = 1e4) -> Crew:
    return Crew(make_devices("cpu", [torch.device("cpu")] * 2, Emulation()), limit)


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    monkeypatch.setattr(crew_module, "GRACE", PATIENCE_S)
    made = make()
    yield made
    made.close()
    until(lambda: harness.roundpipe_threads() == [], "a thread is left")  # a broken crew joins with a deadline


def kill(thread: TaskThread) -> None:
    thread._tasks.put(None if thread is None else "no task")  # type: ignore[arg-type]
    join([thread._thread])


# -------------------------------------------------------------------------------------------------------------- waiting


def test_it_waits_until_it_is_woken(crew: Crew) -> None:
    waiter = Waiter()
    threading.Timer(0.05, waiter.wake).start()
    crew.wait(waiter, Control())


def test_nothing_happens() -> None:
    crew = make(0.2)
    with pytest.raises(TimeoutError, match=r"(?s)watchdog_timeout=0.2 seconds.*test_nothing_happens"):
        crew.wait(Waiter(), Control())
    crew.close()


@longer_each_try
def test_something_happens(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    crew, control, waiter = make(times), Control(), Waiter()
    monkeypatch.setattr(crew_module, "LOOK", 0.05)

    def progress() -> None:
        for _ in range(12):
            time.sleep(0.1 * times)
            control.progress += 1
        waiter.wake()

    threads = start(progress)
    try:
        crew.wait(waiter, control)
    finally:
        join(threads)
        crew.close()


def test_unless_it_failed(crew: Crew) -> None:
    control = Control()
    control.fail(ValueError())
    crew.wait(Waiter(), control, unless_failed=True)


@pytest.mark.parametrize("which", ["worker", "microbatch"])
def test_a_dead_thread_is_found(crew: Crew, which: str) -> None:
    thread = crew.workers[0].thread if which == "worker" else crew.thread(1)
    assert crew.thread(1) is crew.thread(1)
    kill(thread)
    with pytest.raises(
        RoundPipeError, match=rf"(?s)'roundpipe-{which}\d' has died \(AttributeError.*MainThread"
    ) as caught:
        crew.wait(Waiter(), Control())
    assert isinstance(caught.value.__cause__, AttributeError)
    crew.broken = True


def test_a_step_of_the_main_thread(crew: Crew) -> None:
    control = WatchedControl(crew)
    woken = Waiter()
    woken.wake()
    control.wait(woken)
    assert control.progress == 1 and not control.given_up
    kill(crew.workers[1].thread)
    with pytest.raises(RoundPipeError):
        control.wait(Waiter())
    assert control.given_up
    control.fail(ValueError())
    woken.wake()
    crew.workers[1].thread = TaskThread("roundpipe-worker1")
    with pytest.raises(Aborted):
        control.wait(woken)


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


def a_while(crew: Crew, seconds: float, done: list[int]) -> Task[None]:
    def work() -> None:
        time.sleep(seconds)
        done.append(1)

    return crew.thread(0).submit(work)


def test_everybody_has_come_back(crew: Crew) -> None:
    done: list[int] = []
    control = Control()
    crew.workers[1].thread.submit(lambda: (time.sleep(0.05), done.append(2)))
    crew.rest(control, [a_while(crew, 0.1, done)])
    assert sorted(done) == [1, 2] and not control.failed and not crew.broken


@pytest.mark.parametrize("given_up", [False, True])
def test_after_a_failure(crew: Crew, given_up: bool) -> None:
    """Threads that are late come back, and devices can be used again."""
    control, done = Control(crew.abort), []  # type: ignore[var-annotated]
    task = a_while(crew, 0.3, done)
    control.fail(ValueError("first"))
    with pytest.raises(StreamAborted):
        crew.devices[0].compute.synchronize()
    crew.rest(control, [task], given_up=given_up)
    assert done == [1] and not crew.broken
    crew.devices[0].compute.synchronize()
    with pytest.raises(ValueError, match="first"):
        control.raise_error()
    assert control.error is None and control.failed


def test_somebody_does_not_come_back(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "GRACE", 0.3)
    control, release = Control(), threading.Event()
    task = crew.thread(0).submit(lambda: release.wait(PATIENCE_S))
    control.fail(ValueError())
    crew.rest(control, [task], given_up=True)
    assert crew.broken
    crew.close()  # joins all others
    until(lambda: harness.roundpipe_threads() == ["roundpipe-microbatch0"])
    release.set()
    until(lambda: not harness.roundpipe_threads())


def test_the_dead_are_not_waited_for(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "GRACE", 1e4)
    control = Control()
    kill(crew.thread(0))
    task = crew.thread(0).submit(lambda: None)
    control.fail(ValueError())
    crew.rest(control, [task], given_up=True)
    assert crew.broken


def test_what_a_device_was_doing_failed(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a GPU fails when somebody looks at it, which may be here."""

    def fails() -> None:
        raise RuntimeError("on the device")

    control = Control()
    monkeypatch.setattr(crew.devices[1].compute, "synchronize", fails)
    crew.rest(control)
    assert not crew.broken
    with pytest.raises(RuntimeError, match="on the device"):
        control.raise_error()


def test_a_device_that_cannot_be_reset(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    control = Control()
    control.fail(ValueError("first"))
    monkeypatch.setattr(crew.devices[1], "reset", fails)
    crew.rest(control)
    assert crew.broken
    with pytest.raises(ValueError, match="first") as caught:
        control.raise_error()
    assert "could not be reset: RuntimeError('no')" in caught.value.__notes__[0]


# -------------------------------------------------------------------------------------------------------------- closing


def test_everything_is_closed_though_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = make()
    crew.thread(2)
    for worker in crew.workers:
        worker.reserve(1000, 1000)

    def fails(*_: Any) -> None:
        raise RuntimeError("cannot be closed")

    real = crew.workers[0].close
    monkeypatch.setattr(crew.workers[0], "close", lambda deadline: (real(deadline), fails()))
    real_device = crew.devices[0].close
    monkeypatch.setattr(crew.devices[0], "close", lambda: (real_device(), fails()))
    with pytest.raises(RuntimeError, match="cannot be closed"):
        crew.close()
    assert harness.roundpipe_threads() == []
    assert [device.resident_bytes() for device in crew.devices] == [0, 0]


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
