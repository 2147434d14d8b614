"""A thread that runs what it is given, one thing after another, and hands results and exceptions back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.runtime.threads.sync import Waiter

T = TypeVar("T")


class Task(Generic[T]):
    """A function on its way through a thread; ``waiter`` is woken when it has run."""

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
        self._function = None  # what it closed over may be large
        self.waiter.wake()
        del self  # which knows the error, whose frames know this one: in a circle, all of them would live on

    def result(self) -> T:
        """What the function returned, or raised. Once, and only after ``waiter`` was woken."""
        error, self._error = self._error, None  # whose frames will know this task, see above
        try:
            if error is not None:
                raise error
            return self._result  # type: ignore[return-value]
        finally:
            del error


class TaskThread:
    """A daemon thread, started at once.

    Args:
        name: shown by debuggers and in stack dumps.
        around: entered by the thread for as long as it lives.

    Attributes:
        died: what ended the thread, if that was not ``stop``.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.name = name
        self.died: BaseException | None = None
        self._around = around
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # whoever waits for this thread finds it, and says so
            self.died = error

    def _loop(self) -> None:
        intraop_threads.apply_num_threads()
        with self._around():
            while (task := self._tasks.get()) is not None:
                task.run()
                del task
                intraop_threads.release_intraop_threads()

    def submit(self, function: Callable[[], T]) -> Task[T]:
        task = Task(function)
        self._tasks.put(task)
        return task

    def stop(self) -> None:
        """Let the thread end when it has done what it was given."""
        self._tasks.put(None)

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the end of a thread that was told to stop; False if it is not there at ``deadline`` (monotonic)."""
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


def within(seconds: float, function: Callable[[], object]) -> bool:
    """Run ``function`` on a thread of its own; False if it is not done in time, and is left behind."""
    thread = TaskThread("roundpipe-resting")
    task = thread.submit(function)
    thread.stop()
    if not task.waiter.wait_for(seconds):
        return False
    thread.join()
    task.result()
    return True
