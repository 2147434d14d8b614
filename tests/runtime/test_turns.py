"""Turns under random timing: in order, never two at once, and everybody leaves when one fails."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zoo
from harness import assert_same, ours, run
from patience import PATIENCE_S, join, start, until
from torch import Tensor, nn

from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.core.turns import PlannedSlots, Slot
from lightning_roundpipe.runtime.threads.sync import Cancelled, CancelScope

NO_LAYER: Any = None


def make_slot(index: int, microbatches: list[int], phase: Any = "forward", predecessor: Slot | None = None) -> Slot:
    return Slot(index, 0, 0, phase, range(1), [], {}, microbatches, predecessor)


# ------------------------------------------------------------------------------------------------------------- one slot


def test_nobody_enters_a_slot_before_it_is_open() -> None:
    """Its weights would not be there."""
    slot, cancel_scope = make_slot(0, [0]), CancelScope()
    entered = threading.Event()

    def enter() -> None:
        slot.enter(0, cancel_scope)
        entered.set()

    threads = start(enter)
    assert not entered.wait(0.05)
    slot.open()
    join(threads)
    assert entered.is_set()


def test_turns_are_taken_in_order() -> None:
    """Gradients are added in microbatch order, whoever comes first: no timing changes a bit."""
    slot, cancel_scope = make_slot(0, [4, 5, 6]), CancelScope()
    slot.open()
    order: list[int] = []

    def run(m: int) -> Callable[[], None]:
        def enter() -> None:
            slot.enter(m, cancel_scope)
            order.append(m)
            slot.leave(m)

        return enter

    threads = start(run(6), run(5))
    time.sleep(0.03)
    assert order == []
    threads += start(run(4))
    join(threads)
    assert order == [4, 5, 6]


def test_one_microbatch_ahead_and_no_more() -> None:
    """What it brings takes memory. The last one in a slot is followed by the first one of its worker's next slot."""
    first, second = make_slot(0, [4, 5, 6, 7]), make_slot(1, [4, 5])
    near: list[tuple[int, int]] = []

    def come(*expected: tuple[int, int]) -> None:
        assert near == list(expected)
        near.clear()

    for slot, microbatch in ((first, 7), (first, 6), (first, 5), (second, 5), (second, 4)):
        slot.approach(microbatch, functools.partial(near.append, (slot.index, microbatch)))
    first.precede(second)
    come()
    first.open()
    come((0, 5))
    first.approach(4, lambda: near.append((0, 4)))
    come((0, 4))
    first.leave(4)
    come((0, 6))
    first.leave(5)
    come((0, 7))
    first.leave(6)
    come((1, 4))
    first.leave(7)
    come()
    second.open()
    come((1, 5))


def slow_upload(order: list[str]) -> tuple[threading.Event, threading.Event, Callable[[], None]]:
    """Return an upload that notes its end in ``order``, the event that it has begun, and one that it waits for."""
    begun, go_on = threading.Event(), threading.Event()

    def upload() -> None:
        begun.set()
        assert go_on.wait(5)
        order.append("uploaded")

    return begun, go_on, upload


def test_a_turn_begins_when_what_it_needs_is_on_its_way() -> None:
    """The thread that passes a turn on uploads for the microbatch behind the next one, which may have its turn soon."""
    slot, cancel_scope, order = make_slot(0, [0, 1, 2]), CancelScope(), list[str]()
    begun, go_on, upload = slow_upload(order)

    def enter() -> None:
        slot.approach(2, upload)
        slot.enter(2, cancel_scope)
        order.append("entered")

    slot.open()
    threads = start(enter)
    until(lambda: 2 in slot._waiting)
    threads += start(lambda: slot.leave(0))
    assert begun.wait(5)
    slot.leave(1)
    assert slot.is_turn_of(2)
    time.sleep(0.03)
    assert order == []
    go_on.set()
    join(threads)
    assert order == ["uploaded", "entered"]
    assert slot.leave(2)


def test_a_microbatch_that_arrives_during_its_upload_waits_for_the_end() -> None:
    slot, cancel_scope, order = make_slot(0, [0, 1, 2]), CancelScope(), list[str]()
    begun, go_on, upload = slow_upload(order)

    def enter() -> None:
        slot.enter(2, cancel_scope)
        order.append("entered")

    slot.open()
    slot.approach(2, upload)
    threads = start(lambda: slot.leave(0))
    assert begun.wait(5)
    slot.leave(1)
    threads += start(enter)
    time.sleep(0.03)
    assert order == []
    go_on.set()
    join(threads)
    assert order == ["uploaded", "entered"]


def test_an_upload_that_fails_holds_no_turn_back() -> None:
    slot, cancel_scope = make_slot(0, [0, 1, 2]), CancelScope()

    def upload() -> None:
        raise ValueError

    slot.open()
    slot.approach(2, upload)
    with pytest.raises(ValueError):
        slot.leave(0)
    slot.leave(1)
    slot.enter(2, cancel_scope)


def test_a_microbatch_that_is_cancelled_is_let_go() -> None:
    """What would upload for it refers to it, and it refers to its slots: only Python's collector would free it."""
    slot, cancel_scope = make_slot(0, [0, 1, 2]), CancelScope()
    slot.open()
    slot.approach(2, lambda: None)
    cancel_scope.fail(ValueError())
    with pytest.raises(Cancelled):
        slot.enter(2, cancel_scope)
    assert not slot._approaching


def test_the_last_to_leave_closes() -> None:
    """Also if it left out of turn, without having entered: a layer that is dropped."""
    slot = make_slot(0, [0, 1, 2])
    slot.open()
    assert not slot.leave(2)
    assert not slot.leave(0)
    slot.enter(1, CancelScope())
    assert slot.leave(1)


def test_a_microbatch_that_skips_lets_the_next_one_in() -> None:
    slot, cancel_scope = make_slot(0, [0, 1]), CancelScope()
    slot.open()
    threads = start(lambda: slot.enter(1, cancel_scope))
    time.sleep(0.02)
    assert threads[0].is_alive()
    slot.leave(0)
    join(threads)


def test_the_same_stage_of_the_next_round_waits() -> None:
    """It goes on adding to the same sums, which have to be on their way to the host."""
    first = make_slot(0, [0])
    second, cancel_scope = make_slot(1, [1], predecessor=first), CancelScope()
    threads = start(lambda: second.wait_for_predecessor(cancel_scope))
    time.sleep(0.03)
    assert threads[0].is_alive()
    first.close()
    join(threads)
    second.wait_for_predecessor(cancel_scope)  # closed already: at once
    make_slot(2, [0]).wait_for_predecessor(cancel_scope)  # there is none


def test_side_by_side_the_gradients_of_a_call_leave_behind_those_of_all_slots_before() -> None:
    """The second slot has none for this call, and is closed first."""
    sums, cancel_scope = Mock(), CancelScope()
    first = make_slot(0, [0])
    second = make_slot(1, [1], predecessor=first)
    third = make_slot(2, [2], predecessor=second)
    threads = start(lambda: third.wait_to_add_to(sums, cancel_scope))
    second.close()
    time.sleep(0.03)
    assert threads[0].is_alive() and not third.is_next_in(sums)
    first.sent(sums)
    join(threads)
    assert third.is_next_in(sums)
    third.wait_to_add_to(sums, cancel_scope)  # at once


@pytest.mark.parametrize("where", ["turn", "predecessor"])
def test_a_failure_wakes_those_who_wait_for_a_slot(where: str) -> None:
    cancel_scope, left = CancelScope(), []
    slot = make_slot(1, [0, 1], predecessor=make_slot(0, [0]))
    slot.open()

    def wait() -> None:
        try:
            slot.enter(1, cancel_scope) if where == "turn" else slot.wait_for_predecessor(cancel_scope)
        except Cancelled:
            left.append(True)

    threads = start(wait)
    time.sleep(0.02)
    cancel_scope.fail(ValueError())
    join(threads)
    assert left == [True]


# --------------------------------------------------------------------------------------------------------- a whole plan


class Pool:
    """Workers that open their slots in order, on threads of their own, after delays of their own."""

    def __init__(self, plan: Plan, workers: int, microbatches: int, seed: int) -> None:
        self.cancel_scope = CancelScope()
        self.drawn = random.Random(seed)
        self.order: list[list[Slot]] = [[] for _ in range(workers)]
        self.all: list[Slot] = []
        self.open_now: list[list[int]] = [[] for _ in range(workers)]
        self.faults: list[str] = []
        self.threads: list[threading.Thread] = []
        rounds: list[list[Slot]] = []
        for begin in range(0, microbatches, plan.round_microbatches):
            mine = range(begin, min(begin + plan.round_microbatches, microbatches))
            row = []
            for stage in plan.stages():
                before = rounds[-1][stage.position] if rounds else None
                index, calls = len(self.all), range(stage.first, stage.last + 1)
                slot = Slot(index, index % workers, len(rounds), stage.phase, calls, [], {}, mine, before)
                self.order[slot.worker].append(slot)
                self.all.append(slot)
                row.append(slot)
            rounds.append(row)
        self.slots = PlannedSlots(rounds, plan, self.cancel_scope, self.close)
        for queue in self.order:
            if queue:
                self.open(queue[0])

    def open(self, slot: Slot) -> None:
        delay = self.drawn.random() * 0.002

        def wait() -> None:
            try:
                time.sleep(delay)
                slot.wait_for_predecessor(self.cancel_scope)
                if slot.predecessor is not None and not slot.predecessor.closed:
                    self.faults.append(f"slot {slot.index} opened before the round before it was closed")
                if self.open_now[slot.worker]:
                    self.faults.append(f"slot {slot.index} opened while {self.open_now[slot.worker]} was open")
                self.open_now[slot.worker].append(slot.index)
                if slot.open():
                    self.close(slot)
            except Cancelled:
                pass

        self.threads += start(wait)

    def close(self, slot: Slot) -> None:
        if slot.index not in self.open_now[slot.worker]:
            self.faults.append(f"slot {slot.index} closed before it was open")
        queue = self.order[slot.worker]
        if queue[0] is not slot:
            self.faults.append(f"slot {slot.index} closed before {queue[0].index}")
        self.open_now[slot.worker].remove(slot.index)
        slot.close()
        queue.pop(0)
        if queue:
            self.open(queue[0])


class Microbatches:
    """Run through a pool as the engine does; ``fail_at`` is a (microbatch, call) whose forward raises."""

    def __init__(self, pool: Pool, calls: int, count: int, seed: int, fail_at: tuple[int, int] | None = None) -> None:
        self.pool = pool
        self.seed = seed
        self.ran: list[tuple[int, int, str]] = []
        self.inside: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self.made: dict[int, list[int]] = {}
        self.fail_at = fail_at
        self.threads = start(*(lambda m=m: self.run(m, calls) for m in range(count)))  # type: ignore[misc]

    def serve(self, m: int, slot: Slot, call: int, delay: float) -> None:
        holder = self.inside.setdefault(slot.index, m)
        if holder != m:
            self.pool.faults.append(f"slot {slot.index} serves {holder} and {m} at once")
        if slot.index not in self.pool.open_now[slot.worker]:
            self.pool.faults.append(f"slot {slot.index} serves {m} while it is not open")
        self.ran.append((slot.index, m, slot.phase))
        time.sleep(delay)
        if (m, call) == self.fail_at:
            raise ZeroDivisionError
        before = slot.index
        self.inside.pop(before)
        self.pool.slots.after(m, slot, call)

    def run(self, m: int, calls: int) -> None:
        try:
            drawn = random.Random(self.seed * 100 + m)
            # Some leave calls out, but not the last one: the loss hangs on it.
            self.made[m] = made = [c for c in range(calls) if c == calls - 1 or drawn.random() < 0.8]
            for call in made:
                self.serve(m, self.pool.slots.forward(m, call, NO_LAYER), call, drawn.random() * 0.001)
            for call in reversed(made):
                self.serve(m, self.pool.slots.backward(m, call, NO_LAYER, None), call, drawn.random() * 0.001)
            self.pool.slots.finish(m)
        except BaseException as error:
            self.errors.append(error)
            self.pool.cancel_scope.fail(error)


PLANS = [
    lambda n, r: Plan.per_call(n, r),
    lambda n, r: Plan.single(n, r),
    lambda n, r: Plan.parse(f"forward 0-{n - 2}; fused {n - 1}-{n - 1}; backward 0-{n - 2}; round {r}"),
]


@pytest.mark.parametrize("seed", range(15))
def test_a_step_under_random_timing(seed: int) -> None:
    """A slot serves its microbatches in order and one at a time, only while it is open; each worker has one open slot,
    in order, and a later round's comes after the earlier round's; no timing makes it hang, and all slots are closed."""
    rng = random.Random(seed)
    calls, workers, count = rng.randint(2, 6), rng.randint(1, 5), rng.randint(1, 7)
    plan = rng.choice(PLANS)(calls, rng.randint(1, count))
    pool = Pool(plan, workers, count, seed)
    step = Microbatches(pool, calls, count, seed)
    join(step.threads)
    join(pool.threads)
    assert not step.errors and not pool.faults
    for slot in pool.all:
        served = [m for index, m, _ in step.ran if index == slot.index]
        assert served == sorted(served), f"slot {slot.index} served {served}"
        expected = {m for m in slot.microbatches if set(step.made[m]) & set(slot.calls)}
        assert set(served) == expected, f"slot {slot.index} served {served}"
    assert not any(pool.order), "a slot was left open"


@pytest.mark.parametrize("seed", range(6))
def test_a_failing_microbatch_leaves_nobody_waiting(seed: int) -> None:
    """Whoever waits for a turn, a round or a lock leaves, and the first error is the one that is kept."""
    rng = random.Random(seed)
    calls, count = 4, 5
    pool = Pool(Plan.per_call(calls, rng.randint(1, count)), rng.randint(1, 3), count, seed)
    step = Microbatches(pool, calls, count, seed, fail_at=(rng.randrange(count), calls - 1))
    join(step.threads)
    join(pool.threads)
    assert type(pool.cancel_scope.error) is ZeroDivisionError and not pool.faults
    assert {type(e) for e in step.errors} <= {ZeroDivisionError, Cancelled}


def test_a_fused_turn_is_held_until_its_backward_is_done() -> None:
    """Loss, metrics and logging happen one microbatch at a time: nobody else enters between forward and backward."""
    plan, cancel_scope = Plan.single(2, 2), CancelScope()
    slot = Slot(0, 0, 0, "fused", range(2), [], {}, [0, 1])
    closed: list[Slot] = []
    slots = PlannedSlots([[slot]], plan, cancel_scope, closed.append)
    slot.open()
    for call in (0, 1):
        assert slots.forward(0, call, NO_LAYER) is slot
        slots.after(0, slot, call)
    threads = start(lambda: slots.after(1, slots.forward(1, 0, NO_LAYER), 0))
    for call in (1, 0):
        assert slots.backward(0, call, NO_LAYER, None) is slot
        slots.after(0, slot, call)
    assert threads[0].is_alive() and not closed
    slots.finish(0)
    join(threads)
    slots.finish(1)
    assert closed == [slot]


def test_a_stage_is_left_with_its_last_call_and_its_first_backward() -> None:
    """Left too late, the next microbatch waits for nothing; too early, two of them are in."""
    plan, cancel_scope = Plan.parse("forward 0-1; fused 2-2; backward 0-1; round 1"), CancelScope()
    row = [
        Slot(i, 0, 0, stage.phase, range(stage.first, stage.last + 1), [], {}, [0])
        for i, stage in enumerate(plan.stages())
    ]
    closed: list[int] = []
    slots = PlannedSlots([row], plan, cancel_scope, lambda slot: closed.append(slot.index))
    for slot in row:
        slot.open()
    seen = []
    for call in (0, 1, 2):
        slots.after(0, slots.forward(0, call, NO_LAYER), call)
        seen.append(list(closed))
    for call in (2, 1, 0):
        slots.after(0, slots.backward(0, call, NO_LAYER, None), call)
        seen.append(list(closed))
    assert seen == [[], [0], [0], [0], [0, 1], [0, 1, 2]]


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.1)
        return grad


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](SlowBackward.apply(x))


def test_a_slot_may_be_left_by_all_before_it_is_open() -> None:
    """A microbatch without any target has no backward, and may say so while its backward slot's worker is still busy
    with the round before. Closed unopened, the slot was opened afterwards, for nobody, and never closed: a hang."""
    module = zoo.PlainClassifier(Slow())
    batches = zoo.make_batches("mlp", 3)
    for batch in batches:
        batch["y"][2:4] = -100
    plain = run("auto", module, batches)
    plan = "forward 0-1; fused 2-2; backward 0-1; round 1"
    strategy = ours(
        num_microbatches=3, loss_weight="targets", plan=plan, layers=["Linear"], watchdog_timeout=PATIENCE_S
    )
    assert_same(plain, run(strategy, module, batches, devices=3))
