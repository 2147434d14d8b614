"""The baton: one at a time, the lowest rank first, no wake-up lost, and no wait outlives a failure."""

import functools
import random
import time

import pytest
from patience import PATIENCE_S, join, start

from lightning_roundpipe.engine.slots import Slot, SlotGradients, TicketQueue
from lightning_roundpipe.engine.sync import Baton, Cancelled, CancelScope, GivenUp, Runner, Signal

pytestmark = pytest.mark.timeout(4 * PATIENCE_S)


class Alone:
    """Sees whether two threads are inside at once."""

    def __init__(self):
        self._inside = 0

    def __call__(self, pause=0.0):
        self._inside += 1
        time.sleep(pause)
        assert self._inside == 1, "two threads hold the baton"
        self._inside -= 1


@pytest.mark.parametrize("seed", range(8))
def test_one_at_a_time_and_no_wake_up_is_lost(seed):
    """Threads hand signals round, wait, give the baton up and offer it, at random moments."""
    draw, count, baton, alone = random.Random(seed), 6, Baton(), Alone()
    scope = CancelScope()
    signals = [[Signal() for _ in range(count)] for _ in range(8)]

    def run(number, pauses):
        runner = Runner(scope, pauses.randrange(4))
        baton.acquire(runner)
        for row in signals:
            alone(pauses.random() * 1e-3)
            row[number].set()
            others = list(row)
            pauses.shuffle(others)
            for other in others:
                baton.wait(other.then)
                alone()
            if pauses.random() < 0.5:
                with GivenUp(baton):
                    time.sleep(pauses.random() * 1e-3)
            runner.rank = pauses.randrange(4)
            baton.offer()
        alone()
        baton.release()

    pauses = [random.Random(draw.random()) for _ in range(count)]
    join(start(*(lambda n=n: run(n, pauses[n]) for n in range(count))))


@pytest.mark.parametrize("seed", range(8))
def test_a_failure_ends_every_wait(seed):
    """Also of threads that are just about to wait, or were just made ready."""
    draw, baton, alone = random.Random(seed), Baton(), Alone()
    scope = CancelScope(lambda: baton.wake(scope))
    signals = [Signal() for _ in range(5)]
    cancelled = []

    def run(number, pause):
        runner = Runner(scope, number)
        baton.acquire(runner)
        try:
            with GivenUp(baton):
                time.sleep(pause)
            baton.wait(signals[number].then)
            baton.wait(Signal().then)
        except Cancelled:
            alone()
            cancelled.append(number)
        finally:
            baton.release()

    def fail(pause):
        time.sleep(pause)
        scope.fail(ValueError())

    def set_some(pause):
        time.sleep(pause)
        for signal in signals[::2]:
            signal.set()

    pauses = [draw.random() * 3e-3 for _ in range(7)]
    runs = [lambda n=n: run(n, pauses[n]) for n in range(5)]
    join(start(*runs, lambda: fail(pauses[5]), lambda: set_some(pauses[6])))
    assert sorted(cancelled) == list(range(5))
    baton.acquire(Runner(CancelScope()))  # nobody has kept it


@pytest.mark.parametrize("handed", [False, True], ids=["in the queue", "handed over"])
def test_who_gives_up_waiting_for_the_baton_does_not_keep_it(handed):
    """As the main thread does on Ctrl-C, or when the watchdog barks."""
    baton, scope = Baton(), CancelScope()
    holder = Runner(scope)
    baton.acquire(holder)

    def sleep():
        if handed:
            baton.release()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        baton.acquire(Runner(scope), sleep)
    if not handed:
        baton.release()
    assert baton._holder is None and not baton._ready


def test_a_microbatch_goes_on_while_its_turns_have_come():
    """It runs on each worker before the next one begins, and does not hand the baton over in between."""
    baton, scope, order = Baton(), CancelScope(), list[tuple[int, int]]()
    workers = [TicketQueue(baton, lambda slot: None) for _ in range(3)]
    spec = None
    slots = [Slot(index, index % 3, "forward", [], [], range(3), spec, SlotGradients()) for index in range(6)]
    for slot in slots:
        workers[slot.worker].add(slot)

    def run(microbatch):
        runner = Runner(scope, microbatch)
        baton.acquire(runner)
        try:
            for slot in slots:
                if slot.index:
                    workers[(slot.index - 1) % 3].release(slots[slot.index - 1], microbatch)
                workers[slot.worker].acquire(slot, microbatch)
                order.append((microbatch, slot.index))
            workers[slots[-1].worker].release(slots[-1], microbatch)
        finally:
            baton.release()

    def begin():
        while len(baton._ready) < 3:
            time.sleep(1e-4)
        baton.release()

    baton.acquire(Runner(scope))
    join(start(begin, *(functools.partial(run, microbatch) for microbatch in range(3))))
    assert order == [(m, s) for stages in (range(3), range(3, 6)) for m in range(3) for s in stages]
