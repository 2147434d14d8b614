"""Turns: slots in order, their microbatches in order, whatever is left out, and whoever is late."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from patience import PATIENCE_S

from lightning_roundpipe.engine.slots import Slot, SlotTurns
from lightning_roundpipe.engine.sync import Baton, Cancelled, CancelScope, GivenUp, Runner

pytestmark = pytest.mark.timeout(4 * PATIENCE_S)


def slots_of(count: int, workers: int, microbatches: int, scope: CancelScope) -> list[Slot]:
    recorder: Any = None
    return [
        Slot(index, index % workers, "forward", [index], [], {}, range(microbatches), 0, recorder, scope)
        for index in range(count)
    ]


class Played:
    """Microbatches that go through slots on several workers, and leave some out.

    Args:
        seed: of the delays, and of what is left out.
        fails: whether one of them fails on its way.
    """

    def __init__(self, seed: int, *, fails: bool = False) -> None:
        draw = random.Random(seed)
        self.workers, self.microbatches = draw.randint(1, 4), draw.randint(1, 6)
        self.baton = Baton()
        self.scope = CancelScope(lambda: self.baton.wake(self.scope))
        self.slots = slots_of(draw.randint(1, 8), self.workers, self.microbatches, self.scope)
        self.served: list[list[tuple[int, int]]] = [[] for _ in range(self.workers)]
        self.closed: list[list[int]] = [[] for _ in range(self.workers)]
        closed = self.closed
        self.turns = [
            SlotTurns(self.baton, lambda slot, worker=worker: closed[worker].append(slot.index))  # type: ignore[misc]
            for worker in range(self.workers)
        ]
        for slot in self.slots:
            self.turns[slot.worker].add(slot)
        self.visits = [
            [slot for slot in self.slots if draw.random() < 0.8] for _ in range(self.microbatches)
        ]  # what each microbatch does not leave out
        self.failing = draw.randrange(self.microbatches) if fails else -1
        self.cancelled = 0
        self._delays = [random.Random(draw.random()) for _ in range(self.microbatches)]

    def run(self) -> None:
        threads = [threading.Thread(target=self._go, args=[i], daemon=True) for i in range(self.microbatches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a microbatch hangs"

    def _go(self, number: int) -> None:
        runner, left, delays = Runner(self.scope, number), 0, self._delays[number]
        self.baton.acquire(runner)
        try:
            for slot in self.visits[number]:
                position = self.slots.index(slot)
                for passed in self.slots[left:position]:
                    self.turns[passed.worker].leave(passed, number)
                left = position
                self.turns[slot.worker].enter(slot, number, runner)
                self.served[slot.worker].append((slot.index, number))
                with GivenUp(self.baton, runner):
                    time.sleep(delays.random() * 5e-4)
                if number == self.failing and delays.random() < 0.3:
                    raise ValueError
            for passed in self.slots[left:]:
                self.turns[passed.worker].leave(passed, number)
        except Cancelled:
            self.cancelled += 1
        except ValueError as error:
            self.scope.fail(error)
        finally:
            self.baton.release()


@pytest.mark.parametrize("seed", range(40))
def test_each_worker_serves_in_order(seed: int) -> None:
    played = Played(seed)
    played.run()
    for worker, (served, closed) in enumerate(zip(played.served, played.closed, strict=True)):
        assert served == sorted(served)
        assert closed == [slot.index for slot in played.slots if slot.worker == worker]
    assert sum(map(len, played.served)) == sum(map(len, played.visits))


@pytest.mark.parametrize("seed", range(40))
def test_a_failure_ends_all_and_turns_can_be_used_again(seed: int) -> None:
    played = Played(seed, fails=True)
    played.run()
    for served in played.served:
        assert served == sorted(served)
    scope = CancelScope()
    for turns in played.turns:
        turns.clear()
        slots = slots_of(2, 1, 1, scope)
        runner = Runner(scope)
        played.baton.acquire(runner)
        for slot in slots:
            turns.add(slot)
        for slot in slots:
            turns.enter(slot, 0, runner)
            turns.leave(slot, 0)
        played.baton.release()
