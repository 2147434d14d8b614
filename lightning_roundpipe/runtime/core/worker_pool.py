"""Everybody who works on a step, started together and stopped together: workers, microbatch threads, devices.

main thread ── wait, under a watchdog ── [1]      a thread died, or nothing moves: all stacks are reported
     │
   rest ── everybody has come back ── [2]         or, after a failure, is given a grace to
     │      devices reset, arenas free ── [3]     or the pool is broken: a new one has to be made
   close ── joined ── [4]                         all but threads that are stuck in code that is not ours
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, intraop_threads
from lightning_roundpipe.devices.errors import is_sticky
from lightning_roundpipe.runtime.core.slot_queues import WorkerQueue
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.faults.notes import add_remedy
from lightning_roundpipe.runtime.threads.sync import CancelScope, Waiter
from lightning_roundpipe.runtime.threads.task_thread import Task, TaskThread, within
from lightning_roundpipe.runtime.user_code.bypassed_gradients import functions_given_stand_ins
from lightning_roundpipe.runtime.user_code.process_state import one_at_a_time

GRACE = 5.0
"""Seconds that threads get to come back after the main thread has given up on them."""
LOOK = 0.25
"""Seconds between two looks of the watchdog."""


class WorkerPool:
    """The threads and devices of one engine.

    Args:
        devices: one per worker.
        watchdog_timeout: seconds without any progress after which a step fails.
        sums: whether gradients are summed on the host, by a thread.
        prefetch: whether weights of a worker's next slot are uploaded while one is open.

    Attributes:
        queues: for each worker, the planned slots that it opens next.
        next_slot: the index of the next slot in the global sequence.
        accelerator: the devices' type; None where they are emulated.
        device_types: all types that can compute.
        staging: the device whose host memory tensors of the host go to workers from; None where workers read any.
        summing: that thread.
        broken: whether a thread never came back; the others are joined by ``close`` all the same.
    """

    def __init__(
        self, devices: list[Device], watchdog_timeout: float, *, sums: bool = False, prefetch: bool = True
    ) -> None:
        self.devices = devices
        self._around = contextlib.ExitStack()
        self._around.enter_context(devices[0].process_settings())  # before there are threads, which take them over
        self.workers = [Worker(d) for d in devices]
        self.queues = [WorkerQueue(worker, prefetch=prefetch) for worker in self.workers]
        self.next_slot = itertools.count().__next__
        types = {d.torch_device.type for d in devices}
        self.device_types = tuple(sorted({"cpu", *types}))
        self.accelerator = next(iter(types - {"cpu"}), None)
        self.staging = devices[0] if self.accelerator is not None else None
        self.summing = TaskThread("roundpipe-sums") if sums else None
        self.broken = False
        self._limit = watchdog_timeout
        self._threads: list[TaskThread] = []
        self._around.enter_context(one_at_a_time(devices))
        self._around.enter_context(functions_given_stand_ins())

    def refuse_broken(self) -> None:
        """``RoundPipeError`` if there is no going on."""
        if self.broken:
            raise RoundPipeError(
                "a thread of an earlier step never came back, so this engine cannot go on: call the Trainer's fit() "
                "again, or better start a new process, because the thread may still hold what others need."
            )

    def locate(self, tensor: Tensor, newest: Device | None) -> Device | None:
        """The device that ``tensor`` lives on; None is the host. ``newest`` is where its microbatch ran last."""
        there = [d for d in self.devices if d.torch_device == tensor.device]
        return newest if newest in there else next(iter(there), None)

    def thread(self, index: int) -> TaskThread:
        """The thread of microbatch ``index``, started when first asked for."""
        while len(self._threads) <= index:
            self._threads.append(TaskThread(f"roundpipe-microbatch{len(self._threads)}"))
        return self._threads[index]

    def _everybody(self) -> list[TaskThread]:
        summing = [self.summing] if self.summing is not None else []
        return [*(worker.thread for worker in self.workers), *summing, *self._threads]

    def abort(self) -> None:
        """Wake everybody who waits for a device."""
        for device in self.devices:
            device.abort()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, cancel_scope: CancelScope, *, unless_failed: bool = False) -> None:
        """Wait for ``waiter`` in the main thread [1]. Ctrl-C comes through here.

        Raises:
            TimeoutError: nothing at all happened for the watchdog's time.
            RoundPipeError: a thread has died.
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
                        f"code between layers, really takes that long. All threads:\n{stacks()}"
                    )

    def _look_for_the_dead(self) -> None:
        for thread in self._everybody():
            if not thread.alive:
                raise RoundPipeError(
                    f"thread {thread.name!r} has died ({thread.died!r}), so the step cannot go on. All threads:\n"
                    f"{stacks()}"
                ) from thread.died

    # -- coming to rest -----------------------------------------------------------------------------------------------

    def rest(self, cancel_scope: CancelScope, tasks: Sequence[Task[Any]] = (), *, given_up: bool = False) -> None:
        """After a step: nothing is running. After a failure, devices and workers start afresh.

        The caller looks at outputs from a stream of its own, which knows nothing of ours; so all is computed by then.

        Args:
            cancel_scope: of the step; what goes wrong here fails it.
            tasks: what microbatch threads were given.
            given_up: whether the main thread waits no more: a watchdog's or user's decision.
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
                    device.compute.synchronize()
            except BaseException as error:
                cancel_scope.fail(error)
        if cancel_scope.failed:
            self.broken = not (self._all_come(late) and self._reset(cancel_scope))

    def _all_come(self, late: Sequence[Waiter]) -> bool:
        deadline = time.monotonic() + GRACE
        try:
            with interrupts_allowed():
                return all(self._comes(waiter, deadline) for waiter in late)
        except BaseException:  # a second Ctrl-C
            return False

    def _comes(self, waiter: Waiter, deadline: float) -> bool:
        while not waiter.wait_for(LOOK):
            if time.monotonic() > deadline or not all(thread.alive for thread in self._everybody()):
                return False
        return True

    def _reset(self, cancel_scope: CancelScope) -> bool:
        """Make devices and workers usable again [3]. On a thread of its own: a stream may be stuck as well."""

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
        """Stop all threads and give everything on the devices back [4].

        If a thread is stuck in user code there is nobody to stop it: it is left to end with the process.
        """
        deadline = time.monotonic() + 1.0 if self.broken else None
        for thread in self._everybody():
            thread.stop()  # all of them, before the first that is stuck takes all the time
        threads, self._threads = self._threads, []
        with contextlib.ExitStack() as rest:  # in reverse, each of them even if another one fails
            if self.broken:  # a GPU may be why, which fails again at each call, and the first error is on its way
                rest.enter_context(contextlib.suppress(torch.AcceleratorError))
            rest.callback(self._around.close)
            if self.broken:
                rest.callback(within, GRACE, self._close_devices)
            else:
                rest.callback(self._close_devices)
            for thread in threads:
                rest.callback(thread.join, deadline)
            if self.summing is not None:
                rest.callback(self.summing.join, deadline)
            for worker in self.workers:
                rest.callback(worker.close, deadline)

    def _close_devices(self) -> None:
        with contextlib.ExitStack() as rest:
            for device in self.devices:
                rest.callback(device.close)


class WatchedCancelScope(CancelScope):
    """For a step that the main thread runs itself: its waits are under the watchdog."""

    def __init__(self, worker_pool: WorkerPool) -> None:
        super().__init__(worker_pool.abort)
        self.given_up = False
        """Whether a wait ended without what it waited for."""
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
    """Where each thread of the process is, by name."""
    frames = sys._current_frames()
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {known.get(ident, 'not started by Python')!r} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
