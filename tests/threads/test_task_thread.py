"""Functions that another thread runs in place of a task thread."""

import random
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S, join, start

from lightning_roundpipe.devices.thread_owner import _stash
from lightning_roundpipe.threads.task_thread import TaskThread


@pytest.fixture
def thread():
    thread = TaskThread("roundpipe-test")
    yield thread
    thread.stop()
    assert thread.join(time.monotonic() + 60)


def test_what_is_submitted_during_a_turn_runs_after_it(thread):
    order = []
    assert thread.take_turn()
    task = thread.submit(lambda: order.append("task"))
    assert not task.waiter.wait_for(0.05)
    order.append("turn")
    thread.end_turn()
    task.waiter.wait()
    assert order == ["turn", "task"]


@pytest.mark.parametrize("seed", range(3))
def test_one_function_at_a_time(seed, thread):
    inside = []
    most = [0]
    submitted = threading.Event()

    def function():
        inside.append(1)
        most[0] = max(most[0], len(inside))
        time.sleep(0)
        inside.pop()

    def work(number):
        drawn = random.Random(100 * seed + number)
        for _ in range(100):
            if thread.take_turn():
                try:
                    function()
                finally:
                    thread.end_turn()
            else:
                submitted.set()
                thread.submit(function).waiter.wait()
            time.sleep(drawn.random() * 0.0002)

    assert thread.take_turn()
    threads = start(*(lambda number=number: work(number) for number in range(4)))
    assert submitted.wait(PATIENCE_S), "nobody submits while the turn is taken"
    thread.end_turn()
    join(threads)
    assert thread.take_turn(), "the turn was not given back"
    thread.end_turn()
    assert most == [1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list threads")
def test_a_joined_thread_has_released_what_torch_kept_for_it():
    """It is released after the thread's Python code, and aborts the process if the interpreter is finalized by then."""
    released = []

    class Kept:
        def __del__(self):
            time.sleep(0.2)
            released.append(threading.get_ident())

    thread = TaskThread("roundpipe-test")
    ident = thread.submit(lambda: (_stash(Kept()), threading.get_ident())[1])
    thread.stop()
    assert thread.join(time.monotonic() + 60)
    assert released == [ident.result()]
