"""Turns under random timing: in order, never two at once, and everybody leaves when one fails."""

from __future__ import annotations

import random
import threading
import time

import pytest

from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.control import Aborted, Control, UserLock, Waiter
from lightning_roundpipe.runtime.slots import PlannedSlots, Slot

pytestmark = pytest.mark.timeout(30)


class Pool:
    """Workers that open their slots in order, on threads of their own."""

    def __init__(self, plan: Plan, workers: int, microbatches: int) -> None:
        self.control = Control()
        self.order: list[list[Slot]] = [[] for _ in range(workers)]
        rounds: list[list[Slot]] = []
        index = 0
        for start in range(0, microbatches, plan.round_microbatches):
            mine = range(start, min(start + plan.round_microbatches, microbatches))
            row = []
            for stage in plan.stages():
                before = rounds[-1][stage.position] if rounds else None
                calls = range(stage.first, stage.last + 1)
                slot = Slot(index, index % workers, len(rounds), stage.phase, calls, [], {}, mine, before)
                self.order[index % workers].append(slot)
                row.append(slot)
                index += 1
            rounds.append(row)
        self.slots = PlannedSlots(rounds, plan, self.control, self.close)
        for queue in self.order:
            if queue:
                self.open(queue[0])

    def open(self, slot: Slot) -> None:
        def wait() -> None:
            slot.wait_for_predecessor(self.control)
            slot.open()

        threading.Thread(target=wait, name="roundpipe-test", daemon=True).start()

    def close(self, slot: Slot) -> None:
        slot.close()
        queue = self.order[slot.worker]
        queue.pop(0)
        if queue:
            self.open(queue[0])


@pytest.mark.parametrize("seed", range(12))
def test_turns(seed: int) -> None:
    """Fails if a slot lets two in, serves out of order, or opens before the slot before it on its worker is closed."""
    rng = random.Random(seed)
    calls, workers, microbatches = rng.randint(2, 6), rng.randint(1, 5), rng.randint(1, 7)
    plan = Plan.per_call(calls, rng.randint(1, microbatches))
    pool = Pool(plan, workers, microbatches)
    ran: dict[int, list[tuple[int, int]]] = {w: [] for w in range(workers)}
    inside = [0] * workers
    errors: list[BaseException] = []

    def enter(m: int, slot: Slot, call: int) -> None:
        inside[slot.worker] += slot.phase != "fused"
        assert inside[slot.worker] <= 1
        ran[slot.worker].append((slot.index, m))
        time.sleep(rng.random() * 0.002)
        inside[slot.worker] -= slot.phase != "fused"
        pool.slots.after(m, slot, call)

    def run(m: int) -> None:
        try:
            drawn = random.Random(seed * 100 + m)
            made = [c for c in range(calls) if c == calls - 1 or drawn.random() < 0.8]  # some leave calls out
            for call in made:
                enter(m, pool.slots.forward(m, call, None), call)  # type: ignore[arg-type]
            for call in reversed(made):
                enter(m, pool.slots.backward(m, call, None, None), call)  # type: ignore[arg-type]
            pool.slots.finish(m)
        except BaseException as error:
            errors.append(error)
            pool.control.fail(error)

    threads = [threading.Thread(target=run, args=(m,), name="roundpipe-test") for m in range(microbatches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors and not any(t.is_alive() for t in threads)
    for order in ran.values():
        assert order == sorted(order), "a worker ran something out of turn"
    assert not any(pool.order), "a slot was left open"


def test_a_failure_wakes_everybody() -> None:
    control = Control()
    left: list[type] = []

    def wait() -> None:
        try:
            control.wait(Waiter())
        except Aborted as error:
            left.append(type(error))

    threads = [threading.Thread(target=wait, name="roundpipe-test") for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    first = ValueError("first")
    control.fail(first)
    control.fail(ValueError("second"))
    for thread in threads:
        thread.join(5)
    assert left == [Aborted] * 5 and control.error is first
    with pytest.raises(Aborted):
        control.wait(Waiter())


def test_user_code_runs_lowest_first() -> None:
    control = Control()
    lock = UserLock(control)
    lock.acquire((0, 0))
    order: list[tuple[int, int]] = []

    def take(priority: tuple[int, int]) -> None:
        lock.acquire(priority)
        order.append(priority)
        lock.release()

    wanted = [(3, 1), (1, 2), (3, 0), (1, 0)]
    threads = [threading.Thread(target=take, args=(p,), name="roundpipe-test") for p in wanted]
    for thread in threads:
        thread.start()
    while len(lock._queue) < len(wanted):
        time.sleep(0.001)
    lock.release()
    for thread in threads:
        thread.join(5)
    assert order == sorted(wanted)
