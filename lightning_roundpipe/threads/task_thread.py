"""A thread that runs submitted functions in order, and returns their results and exceptions.

While it has nothing to do, another thread may run a function in its place: a hand-off between threads takes tens of
microseconds, because both need the interpreter.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import intraop_threads, thread_end
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.messages import frames_of_threads

T = TypeVar("T")
LOOK = 0.25
"""Seconds between two checks of a thread that another one waits for."""


class Task(Generic[T]):
    """A function submitted to a `TaskThread`.

    Attributes:
        waiter: woken when the function has run.
        finished: whether the function has run.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self.waiter = Waiter()
        self.finished = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._function is not None
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self.finished = True
        self._function = None  # its closure may hold large tensors
        del self  # holds the error, whose traceback refers to this frame: a reference cycle would keep all of it alive

    def result(self) -> T:
        """Return the function's result, or raise its exception. Call it once, after ``waiter`` was woken."""
        error, self._error = self._error, None  # the traceback will refer to this task: no cycle, see `run`
        try:
            if error is not None:
                raise error
            return self._result  # type: ignore[return-value]
        finally:
            del error


class TaskThread:
    """A daemon thread that runs submitted functions in order. The constructor starts it.

    Args:
        name: name in debuggers and stack dumps.
        around: returns a context manager that the thread enters for its lifetime.

    Attributes:
        died: the exception that ended the thread, if `stop` did not.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.name = name
        self.died: BaseException | None = None
        self._around = around
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._turn, self._counting = threading.Lock(), threading.Lock()
        """`_turn` is held while a function runs, by whichever thread runs it."""
        self._submitted = 0
        """Number of tasks that have not run, and one more while another thread has the turn."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RoundPipeError` if the thread has ended."""
        if not self._thread.is_alive():
            raise RoundPipeError(
                f"thread {self.name!r} has died ({self.died!r}), so the step cannot go on. All threads:\n{stacks()}"
            ) from self.died

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # threads that wait for this one report it
            self.died = error

    def _loop(self) -> None:
        intraop_threads.apply_num_threads()
        with self._around():
            while (task := self._tasks.get()) is not None:
                with self._turn:
                    task.run()
                self._count(-1)  # first: the thread that is woken may take the turn at once
                task.waiter.wake()
                del task
                intraop_threads.release_intraop_threads()

    def _count(self, more: int) -> None:
        with self._counting:
            self._submitted += more

    def submit(self, function: Callable[[], T]) -> Task[T]:
        task = Task(function)
        self._count(1)
        self._tasks.put(task)
        return task

    def watch(self, wait_for: Callable[[float], bool]) -> None:
        """Call ``wait_for``, which waits for at most so many seconds for what this thread does, until it returns True.

        Raises `RoundPipeError` if the thread has ended.
        """
        while not wait_for(LOOK):
            self.check()

    def take_turn(self) -> bool:
        """Give the calling thread the turn to run a function, if nothing is submitted. It does not block.

        Until the caller calls `end_turn`, this thread runs nothing. Tasks that are submitted meanwhile run afterwards.

        Returns whether the calling thread has the turn.
        """
        with self._counting:
            if self._submitted:
                return False
            self._submitted = 1
            self._turn.acquire()  # free, since no task is left
        return True

    def end_turn(self) -> None:
        """End the calling thread's turn."""
        self._turn.release()
        self._count(-1)

    def stop(self) -> None:
        """Let the thread end once it has run everything submitted so far."""
        self._tasks.put(None)

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the end after `stop`, until ``deadline`` on the monotonic clock. Returns whether it has come."""
        return thread_end.join(self._thread, None if deadline is None else max(0.0, deadline - time.monotonic()))


def within(seconds: float, function: Callable[[], object]) -> bool:
    """Run ``function`` on a separate thread, and raise its exceptions here.

    Returns False if it has not returned after ``seconds``; the thread is then left behind.
    """
    thread = TaskThread("roundpipe-resting")
    task = thread.submit(function)
    thread.stop()
    if not task.waiter.wait_for(seconds):
        return False
    thread.join()
    task.result()
    return True


def stacks() -> str:
    """Return the stacks of all threads of the process, as text."""
    frames = frames_of_threads()
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {known.get(ident, 'not started by Python')!r} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
