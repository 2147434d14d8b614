"""The threads and devices of an engine, started and stopped together.

main thread ── wait, under a watchdog ── [1]      a dead thread, or no progress: an error reports all stacks
     │
   rest ── all threads have returned ── [2]       after an error of the wait itself they get `GRACE` seconds for it
     │     the compute streams are done ── [3]    the caller reads outputs on a stream that does not wait for ours
     │     devices and workers are reset ── [4]   only after a failure, on a thread of its own: a stream may be stuck
     │
   close ── threads are joined ── [5]             except those that are stuck in user code or a driver

The first error of a step fails its `CancelScope`, which wakes every waiting thread of the step and aborts the devices.
Then the main thread, which is to raise the error, calls `rest`. If threads do not return, or the reset does not work,
the pool is broken.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, intraop_threads
from lightning_roundpipe.devices.errors import is_sticky
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.core.slot_queues import WorkerQueue
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.faults.notes import add_remedy
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task, TaskThread, within
from lightning_roundpipe.runtime.user_code.bypassed_gradients import functions_given_stand_ins
from lightning_roundpipe.runtime.user_code.process_state import one_at_a_time

GRACE = 5.0
"""Seconds that threads have to return after the main thread has stopped waiting for a failed step."""
LOOK = 0.25
"""Interval of the watchdog's checks, in seconds."""


class WorkerPool:
    """The threads and devices of one engine.

    The class uses many modules because threads of every kind, devices and process-wide patches have to start, be
    watched, come to rest and stop in one fixed order.

    Args:
        devices: one device per worker.
        watchdog_timeout: seconds without progress after which a step fails.
        elsewhere: returns what the step waits for from other machines, as a sentence or nothing.
        prefetch: whether workers upload the weights of their next slot while one is open.

    Attributes:
        queues: each worker's queue of planned slots.
        next_slot: function that returns the index of the next slot in the global sequence.
        accelerator: the devices' type, such as ``"cuda"``; None if they are emulated.
        device_types: all device types that compute, the host's included.
        staging: device whose page-locked host memory is used to upload host tensors; None if ordinary memory will do.
        broken: whether a thread did not return or a device could not be reset, so that no further step may run.
    """

    def __init__(
        self,
        devices: list[Device],
        watchdog_timeout: float,
        *,
        prefetch: bool = True,
        elsewhere: Callable[[], str] = str,
    ) -> None:
        self.devices = devices
        self._elsewhere = elsewhere
        self._around = contextlib.ExitStack()
        self._around.enter_context(devices[0].process_settings())  # first, as new threads inherit the settings
        self.workers = [Worker(d) for d in devices]
        self.queues = [WorkerQueue(worker, prefetch=prefetch) for worker in self.workers]
        self.next_slot = itertools.count().__next__
        types = {d.torch_device.type for d in devices}
        self.device_types = tuple(sorted({"cpu", *types}))
        self.accelerator = next(iter(types - {"cpu"}), None)
        self.staging = devices[0] if self.accelerator is not None else None
        self._summing: dict[int, TaskThread] = {}
        self.broken = False
        self._limit = watchdog_timeout
        self._threads: list[TaskThread] = []
        self._around.enter_context(one_at_a_time(devices))
        self._around.enter_context(functions_given_stand_ins())

    def refuse_broken(self) -> None:
        """Raise `RoundPipeError` if no further step may run."""
        if self.broken:
            raise RoundPipeError(
                "a thread of an earlier step never came back, so this engine cannot go on: call the Trainer's fit() "
                "again, or better start a new process, because the thread may still hold what others need."
            )

    def locate(self, tensor: Tensor, newest: Device | None) -> Device | None:
        """Return the device that holds ``tensor``; None for the host.

        Args:
            tensor: the tensor.
            newest: device that its microbatch ran on last. It is preferred among devices that share one
                ``torch.device``, as workers on one GPU and all emulated devices do.
        """
        home = tensor.device
        if newest is not None and newest.torch_device == home:
            return newest
        return next((device for device in self.devices if device.torch_device == home), None)

    def align_slots(self, every: int) -> None:
        """Skip slots until the next one's index is a multiple of ``every``.

        Stages that are cut for one of unequal workers have to come to it in all steps. Slots of the first batch and of
        evaluation would shift them. No other thread may make slots meanwhile.
        """
        index = self.next_slot()
        self.next_slot = itertools.count(index + -index % every).__next__

    def thread(self, index: int) -> TaskThread:
        """Return the thread of microbatch ``index``, and start it if needed."""
        while len(self._threads) <= index:
            self._threads.append(TaskThread(f"roundpipe-microbatch{len(self._threads)}", leases=True))
        return self._threads[index]

    def summing(self, worker: int) -> TaskThread:
        """Return the thread that adds gradients of ``worker`` on the host, and start it if needed."""
        if worker not in self._summing:
            self._summing[worker] = TaskThread(f"roundpipe-sums{worker}")
        return self._summing[worker]

    def _everybody(self) -> list[TaskThread]:
        return [*(worker.thread for worker in self.workers), *self._summing.values(), *self._threads]

    def abort(self) -> None:
        """Abort all devices, so that no thread keeps waiting for one."""
        for device in self.devices:
            device.abort()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, cancel_scope: CancelScope, *, unless_failed: bool = False) -> None:
        """Wait for ``waiter`` in the main thread [1]. Interrupts are delivered here.

        Args:
            waiter: the waiter.
            cancel_scope: the step's cancel scope, whose progress the watchdog observes.
            unless_failed: whether to return as soon as the step fails.

        Raises:
            TimeoutError: if there was no progress for ``watchdog_timeout`` seconds.
            RoundPipeError: if a thread has died.
        """
        intraop_threads.release_intraop_threads()
        seen, since = cancel_scope.moved, time.monotonic()
        with interrupts_allowed():
            while not (unless_failed and cancel_scope.failed) and not waiter.wait_for(min(LOOK, self._limit)):
                self._look_for_the_dead()
                if cancel_scope.moved != seen:
                    seen, since = cancel_scope.moved, time.monotonic()
                elif time.monotonic() - since > self._limit:
                    raise TimeoutError(
                        f"nothing happened for watchdog_timeout={self._limit:g} seconds. Raise it if a layer, or the "
                        f"code between layers, really takes that long. {self._elsewhere()}\nAll threads:\n{stacks()}"
                    )

    def _look_for_the_dead(self) -> None:
        for thread in self._everybody():
            if not thread.alive:
                raise RoundPipeError(
                    f"thread {thread.name!r} has died ({thread.died!r}), so the step cannot go on. All threads:\n"
                    f"{stacks()}"
                ) from thread.died

    def rest(self, cancel_scope: CancelScope, tasks: Sequence[Task[Any]] = (), *, given_up: bool = False) -> None:
        """Wait until nothing of a step is running. After a failure, also reset devices and workers.

        Args:
            cancel_scope: the step's cancel scope, which errors in here fail.
            tasks: the tasks of the microbatch threads.
            given_up: whether the watchdog or the user has ended the wait: threads then get `GRACE` seconds.
        """
        late: list[Waiter] = []
        for waiter in (*(t.waiter for t in tasks if not t.finished), *(w.fence() for w in self.workers)):
            if not given_up:
                try:
                    self.wait(waiter, cancel_scope)  # [2]
                    continue
                except BaseException as error:
                    cancel_scope.fail(error)
                    given_up = True
            late.append(waiter)
        if not cancel_scope.failed:
            try:
                for device in self.devices:
                    device.compute.synchronize()  # [3]
            except BaseException as error:
                cancel_scope.fail(error)
        if cancel_scope.failed and not (self._all_return(late) and self._reset(cancel_scope)):
            self.broken = True

    def _all_return(self, late: Sequence[Waiter]) -> bool:
        deadline = time.monotonic() + GRACE
        try:
            with interrupts_allowed():
                return all(self._returns(waiter, deadline) for waiter in late)
        except BaseException:  # a second Ctrl-C
            return False

    def _returns(self, waiter: Waiter, deadline: float) -> bool:
        while not waiter.wait_for(LOOK):
            if time.monotonic() > deadline or not all(thread.alive for thread in self._everybody()):
                return False
        return True

    def _reset(self, cancel_scope: CancelScope) -> bool:
        """Reset devices and workers [4]. Return success."""

        def reset() -> None:
            for device in self.devices:
                device.reset()
            for worker in self.workers:
                worker.abandon()

        try:
            return within(GRACE, reset)
        except Exception as error:
            if cancel_scope.error is not None and is_sticky(error):
                add_remedy(cancel_scope.error)
            elif cancel_scope.error is not None:
                cancel_scope.error.add_note(f"roundpipe: afterwards, the devices could not be reset: {error!r}")
            return False

    def close(self) -> None:
        """Stop all threads and free all device memory [5].

        A thread that is stuck in user code cannot be stopped: it is left to end with the process.
        """
        deadline = time.monotonic() + 1.0 if self.broken else None
        for thread in self._everybody():
            thread.stop()  # stop all before joining any: a stuck one would use up the others' time
        threads, self._threads = self._threads, []
        with contextlib.ExitStack() as rest:  # runs in reverse order, and each callback even if another one raises
            if self.broken:  # a broken GPU raises again at each call, and its first error is being raised already
                rest.enter_context(contextlib.suppress(torch.AcceleratorError))
            rest.callback(self._around.close)
            if self.broken:
                rest.callback(within, GRACE, self._close_devices)
            else:
                rest.callback(self._close_devices)
            for thread in threads:
                rest.callback(thread.join, deadline)
            for summing in self._summing.values():
                rest.callback(summing.join, deadline)
            for worker in self.workers:
                rest.callback(worker.close, deadline)

    def _close_devices(self) -> None:
        with contextlib.ExitStack() as rest:
            for device in self.devices:
                rest.callback(device.close)


class WatchedCancelScope(CancelScope):
    """Cancel scope of a step that the main thread runs itself: its waits are under the watchdog."""

    def __init__(self, worker_pool: WorkerPool) -> None:
        super().__init__(worker_pool.abort)
        self.given_up = False
        """Whether a wait ended with an error before its waiter was woken."""
        self._worker_pool = worker_pool

    def wait(self, waiter: Waiter) -> None:
        try:
            self._worker_pool.wait(waiter, self)
        except BaseException:
            self.given_up = True
            raise
        self.progress += 1
        self.check()


def stacks() -> str:
    """Return the stacks of all threads of the process, as text."""
    frames = sys._current_frames()
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {known.get(ident, 'not started by Python')!r} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
