"""How a step is brought to rest, and a failed one taken apart.

The first error of a step fails its `CancelScope`, which wakes every waiting thread of the step and aborts the devices.
Then the main thread, which is to raise the error, calls `rest`:

    all threads have returned ── [1]       after an error of the wait itself they get `GRACE` seconds for it
    the compute streams are done ── [2]    the caller reads outputs on a stream that does not wait for ours
    devices and workers are reset ── [3]   only after a failure, and on a thread of its own: a stream may be stuck
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.errors import is_sticky
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.faults.notes import add_remedy
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task, within

GRACE = 5.0
"""Seconds that threads have to return after the main thread has stopped waiting for a failed step."""
LOOK = 0.25
"""Interval of the watchdog's checks, in seconds."""


class Pool(Protocol):
    """What is brought to rest."""

    devices: list[Device]
    workers: list[Worker]

    @property
    def all_alive(self) -> bool:
        """Whether no thread has died."""

    def wait(self, waiter: Waiter, cancel_scope: CancelScope) -> None:
        """Wait for ``waiter`` in the main thread, under the watchdog."""


def rest(pool: Pool, cancel_scope: CancelScope, tasks: Sequence[Task[Any]], *, given_up: bool) -> bool:
    """Wait until nothing of a step is running. After a failure, also reset devices and workers.

    Args:
        pool: the threads and devices.
        cancel_scope: the step's cancel scope, which errors in here fail.
        tasks: the tasks of the microbatch threads.
        given_up: whether the watchdog or the user has ended the wait already.

    Returns:
        Whether another step may run.
    """
    late: list[Waiter] = []
    for waiter in (*(t.waiter for t in tasks if not t.finished), *(w.fence() for w in pool.workers)):
        if not given_up:
            try:
                pool.wait(waiter, cancel_scope)  # [1]
                continue
            except BaseException as error:
                cancel_scope.fail(error)
                given_up = True
        late.append(waiter)
    if not cancel_scope.failed:
        try:
            for device in pool.devices:
                device.compute.synchronize()  # [2]
        except BaseException as error:
            cancel_scope.fail(error)
    return not cancel_scope.failed or (_all_return(pool, late) and _reset(pool, cancel_scope))


def _all_return(pool: Pool, late: Sequence[Waiter]) -> bool:
    deadline = time.monotonic() + GRACE
    try:
        with interrupts_allowed():
            return all(_returns(pool, waiter, deadline) for waiter in late)
    except BaseException:  # a second Ctrl-C
        return False


def _returns(pool: Pool, waiter: Waiter, deadline: float) -> bool:
    while not waiter.wait_for(LOOK):
        if time.monotonic() > deadline or not pool.all_alive:
            return False
    return True


def _reset(pool: Pool, cancel_scope: CancelScope) -> bool:
    """Reset devices and workers [3]. Return success."""

    def reset() -> None:
        for device in pool.devices:
            device.reset()
        for worker in pool.workers:
            worker.abandon()

    try:
        return within(GRACE, reset)
    except Exception as error:
        if cancel_scope.error is not None and is_sticky(error):
            add_remedy(cancel_scope.error)
        elif cancel_scope.error is not None:
            cancel_scope.error.add_note(f"roundpipe: afterwards, the devices could not be reset: {error!r}")
        return False
