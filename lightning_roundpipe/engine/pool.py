"""The engine's threads and devices: started, watched, brought to rest and closed together.

The first error of a step fails its `CancelScope`: every thread of the step that waits is woken, and the devices abort.
The main thread, which is to raise the error, waits until all threads have returned, and resets devices and workers. A
thread that does not return in time breaks the pool: no further step runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, intraop_threads
from lightning_roundpipe.devices.errors import is_sticky
from lightning_roundpipe.devices.interpreter import unwalked_objects
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.engine.executor import Executor
from lightning_roundpipe.engine.main_thread import MainThread
from lightning_roundpipe.engine.process_state import noticed_changes
from lightning_roundpipe.engine.randomness import Randomness
from lightning_roundpipe.engine.sync import Baton, CancelScope, Runner, Signal
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.faults.interrupts import deliver_interrupts
from lightning_roundpipe.faults.notes import add_remedy
from lightning_roundpipe.threads.task_thread import LOOK, Task, TaskThread, stacks, within
from lightning_roundpipe.user_code.bypassed_gradients import functions_given_stand_ins

GRACE = 5.0
"""Seconds that threads have to return after the main thread has stopped waiting for a failed step."""


class Pool:
    """See above.

    Args:
        watchdog_timeout: seconds without progress after which a step fails.
        prefetch: whether workers upload the weights of their next slot ahead.
        executor: makes what runs calls on a worker.
        elsewhere: returns what the step waits for from other machines, as a sentence or nothing.

    Attributes:
        main: the main thread beside a step in flight.
        randomness: seeds the generators of the host and the devices.
        executors: what runs calls, by worker.
        accelerator: the devices' type; None if they are emulated.
        broken: whether no further step may run.
    """

    def __init__(
        self, devices: Sequence[Device], watchdog_timeout: float, executor: Callable[[Worker, Randomness], Executor], *,
        prefetch: bool, elsewhere: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self.devices = list(devices)
        self._limit, self._elsewhere = watchdog_timeout, elsewhere
        self._around = contextlib.ExitStack()
        self._around.enter_context(devices[0].process_settings())  # first, as new threads inherit the settings
        self._around.enter_context(unwalked_objects())
        self.baton, self.randomness = Baton(), Randomness(devices)
        self.workers = [Worker(device, self.baton, prefetch=prefetch) for device in devices]
        self.executors = [executor(worker, self.randomness) for worker in self.workers]
        self.main = MainThread(self.baton, devices, self.randomness, self.wait)
        types = {device.torch_device.type for device in devices}
        self.device_types = tuple(sorted({"cpu", *types}))
        self.accelerator = next(iter(types - {"cpu"}), None)
        self.broken, self._slots = False, itertools.count()
        self._threads: list[TaskThread] = []
        self._summing: dict[int, TaskThread] = {}
        self._around.enter_context(functions_given_stand_ins())
        self._around.enter_context(noticed_changes())

    def thread(self, index: int) -> TaskThread:
        """Return the thread of microbatch ``index``, and start it if needed."""
        while len(self._threads) <= index:
            self._threads.append(TaskThread(f"roundpipe-microbatch{len(self._threads)}"))
        return self._threads[index]

    def summing(self, worker: int) -> TaskThread:
        """Return the thread that adds gradients of ``worker`` on the host, and start it if needed."""
        if worker not in self._summing:
            self._summing[worker] = TaskThread(f"roundpipe-sums{worker}")
        return self._summing[worker]

    def next_slot(self) -> int:
        """Return the index of the next slot in the sequence of all."""
        return next(self._slots)

    def align_slots(self) -> None:
        """Skip slots until the next one is the first worker's.

        Stages that are cut for one of unequal workers come to it in all steps then; slots of evaluation and of other
        calls would shift them.
        """
        for _ in range(-(self.next_slot() + 1) % len(self.workers)):
            self.next_slot()

    def refuse_broken(self) -> None:
        """Raise `RoundPipeError` if no further step may run."""
        if self.broken:
            raise RoundPipeError(
                "a thread of an earlier step never came back, so this engine cannot go on: call the Trainer's fit() "
                "again, or better start a new process, because the thread may still hold what others need."
            )

    def fail(self, scope: CancelScope) -> None:
        """Wake everybody who takes part in a failed step."""
        self.baton.wake(scope)
        for device in self.devices:
            device.abort()

    def wait_for(self, signal: Signal, scope: CancelScope) -> None:
        """Wait in the main thread until ``signal`` is reached."""
        waiter = Waiter()
        if signal.then(waiter.wake):
            self.wait(waiter, scope)

    def wait(self, waiter: Waiter | Runner, scope: CancelScope) -> None:
        """Wait in the main thread, under the watchdog. Interrupts are delivered here, at the latest after `LOOK`.

        Raises:
            TimeoutError: there was no progress for ``watchdog_timeout`` seconds.
            RoundPipeError: a thread has died.
        """
        intraop_threads.release_intraop_threads()
        seen, since = scope.moved, time.monotonic()
        deliver_interrupts()
        while not waiter.wait_for(min(LOOK, self._limit)):
            deliver_interrupts()
            for thread in self._everybody():
                thread.check()
            if scope.moved != seen:
                seen, since = scope.moved, time.monotonic()
            elif time.monotonic() - since > self._limit:
                raise TimeoutError(
                    f"nothing happened for watchdog_timeout={self._limit:g} seconds. Raise it if a layer, or the "
                    f"code between layers, really takes that long. {self._elsewhere()}\nAll threads:\n{stacks()}"
                )

    def _everybody(self) -> list[TaskThread]:
        return [*self._threads, *self._summing.values(), *(worker.sender for worker in self.workers)]

    def rest(self, scope: CancelScope, tasks: Sequence[Task[None]], *, given_up: bool) -> None:
        """Wait until nothing of a step runs. After a failure, also reset devices and workers.

        Args:
            tasks: those of the microbatches.
            given_up: whether the watchdog or the user has ended the wait: threads then get `GRACE` seconds.
        """
        late = []
        for waiter in (*(t.waiter for t in tasks if not t.finished), *(w.sender.fence() for w in self.workers)):
            if not given_up:
                try:
                    self.wait(waiter, scope)
                    continue
                except BaseException as error:
                    scope.fail(error)
                    given_up = True
            late.append(waiter)
        if not scope.failed:
            try:
                for worker in self.workers:
                    worker.in_flight.wait_until_idle()
            except BaseException as error:
                scope.fail(error)
        if scope.failed and not (self._all_return(late) and self._reset(scope)):
            self.broken = True

    @staticmethod
    def _all_return(late: Sequence[Waiter]) -> bool:
        deadline = time.monotonic() + GRACE
        try:
            for waiter in late:
                while not waiter.wait_for(LOOK):
                    deliver_interrupts()
                    if time.monotonic() > deadline:
                        return False
        except BaseException:  # a second Ctrl-C
            return False
        return True

    def _reset(self, scope: CancelScope) -> bool:
        def reset() -> None:
            for worker in self.workers:
                worker.stop_uploads()
            for device in self.devices:
                device.reset()
            for worker in self.workers:
                worker.abandon()

        try:
            return within(GRACE, reset)
        except Exception as error:
            if scope.error is not None and is_sticky(error):
                add_remedy(scope.error)
            elif scope.error is not None:
                scope.error.add_note(f"roundpipe: afterwards, the devices could not be reset: {error!r}")
            return False

    def close(self) -> None:
        """Stop all threads and free all device memory. A thread that is stuck ends with the process."""
        deadline = time.monotonic() + 1.0 if self.broken else None
        threads = self._everybody()
        for thread in threads:
            thread.stop()
        with contextlib.ExitStack() as rest:  # runs in reverse order, and each callback even if another one raises
            if self.broken:  # a broken GPU raises again at each call, and its first error is being raised already
                rest.enter_context(contextlib.suppress(torch.AcceleratorError))
            rest.callback(self._around.close)
            if self.broken:
                rest.callback(within, GRACE, self._close_devices)
            else:
                rest.callback(self._close_devices)
                for worker in self.workers:
                    rest.callback(worker.close)
            for thread in threads:
                rest.callback(functools.partial(thread.join, deadline))

    def _close_devices(self) -> None:
        with contextlib.ExitStack() as rest:
            for device in self.devices:
                rest.callback(device.close)
