"""The engine's threads run Python one at a time; long layers, waits and leases that have expired delay nobody."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import pytest
import torch
from harness import loader, ours, trainer_of
from patience import until
from torch import Tensor, nn

from lightning_roundpipe.devices import core_semaphore, emulated_work, interpreter_lease, intraop_threads
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.core_semaphore import Semaphore
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.devices.thread_event import ThreadEvent
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.memory.grad_buffers import _Added


class Layer(nn.Module):
    """Counts how many of its kind run at the same time."""

    inside = most = 0
    seconds = 0.0
    counting = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self)
        with kind.counting:
            kind.inside += 1
            kind.most = max(kind.most, kind.inside)
        time.sleep(kind.seconds)
        with kind.counting:
            kind.inside -= 1
        return x * self.weight


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:  # the first batch ran in order
            Layer.most = 0
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(seconds: float, monkeypatch: pytest.MonkeyPatch, term: float) -> None:
    """Train on four devices with layers that take ``seconds``."""
    monkeypatch.setattr(intraop_threads, "cores", lambda: 4)
    monkeypatch.setattr(interpreter_lease, "TERM_S", term)
    Layer.seconds = seconds
    strategy = ours(num_microbatches=4, layers=["Layer"], plan="forward 0-1; fused 2-3; backward 0-1; round 4")
    trainer_of(strategy, devices=4).fit(Model(), loader([torch.ones(4, 4)] * 3))


def test_short_calls_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    train(0.002, monkeypatch, term=60.0)  # a lease does not expire, however busy the machine is
    assert Layer.most == 1


def test_long_calls_run_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    train(0.05, monkeypatch, term=0.02)
    assert Layer.most > 1


class Looking(torch.autograd.Function):
    """Notes whether the thread that runs it holds the lease."""

    held: ClassVar[dict[str, set[bool]]] = {}

    @classmethod
    def look(cls, where: str) -> None:
        cls.held.setdefault(where, set()).add(getattr(interpreter_lease._mine, "lease", None) is not None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Looking.look("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Looking.look("backward")
        return grad


class LookingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Looking.apply(super().forward(x))
        return result


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_short_calls_hold_the_lease(seconds: float, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones release it at once, and so does a backward that autograd runs elsewhere."""
    own = EmulatedDevice.__init__

    def made(device: EmulatedDevice, *args: Any) -> None:
        own(device, *args)
        device.backward_needs_interpreter = on_host

    monkeypatch.setattr(EmulatedDevice, "__init__", made)
    monkeypatch.setattr(interpreter_lease, "TERM_S", 0.02 if seconds else 60.0)
    monkeypatch.setattr(Layer, "seconds", seconds)
    module = Model()
    module.layers = nn.ModuleList(LookingLayer() for _ in range(4))
    strategy = ours(num_microbatches=4, layers=["LookingLayer"], plan="forward 0-1; fused 2-3; backward 0-1; round 4")
    Looking.held.clear()
    trainer_of(strategy, devices=2).fit(module, loader([torch.ones(4, 4)] * 5))
    assert (True in Looking.held["forward"]) == (not seconds)
    assert (True in Looking.held["backward"]) == (on_host and not seconds)


def beside(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def is_free() -> bool:
    """Whether exactly one thread may be granted the lease, and none waits for it."""
    return len(interpreter_lease._free) == 1 and not interpreter_lease._line


def test_a_lease_that_has_expired_is_taken_over() -> None:
    interpreter_lease.acquire()
    had = []

    def other() -> None:
        interpreter_lease.acquire()  # after `TERM_S`, although nothing is released
        had.append(interpreter_lease.release())

    beside(other).join()
    assert had == [True]
    assert interpreter_lease.release(), "the thread is told that it had a lease"
    assert not interpreter_lease.release()
    assert is_free(), "what had expired was not released a second time, nor kept"


def test_a_lease_has_one_holder_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets it, by release or by expiry: while no lease expires, nobody else is inside."""
    monkeypatch.setattr(interpreter_lease, "TERM_S", 60.0)
    inside, most = [], []

    def work() -> None:
        for _ in range(200):
            interpreter_lease.acquire()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            interpreter_lease.release()

    for thread in [beside(work) for _ in range(8)]:
        thread.join()
    assert max(most) == 1
    assert is_free()


def test_many_threads_whose_leases_expire_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take over, release late and take over again. The lease is free in the end."""
    monkeypatch.setattr(interpreter_lease, "TERM_S", 0.0005)

    def work() -> None:
        for i in range(100):
            interpreter_lease.acquire()
            if i % 7 == 0:
                time.sleep(0.001)
            interpreter_lease.release()

    for thread in [beside(work) for _ in range(8)]:
        thread.join()
    assert is_free()


def test_a_thread_that_waits_holds_no_lease(make_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_lease, "TERM_S", 10.0)
    (device,) = make_all(1)
    waiter = Waiter()
    waits: list[tuple[str, Callable[[], object], Callable[[], object]]] = []
    sleeping = threading.Event()
    waits.append(("a waiter", waiter.wait, waiter.wake))
    permits = Semaphore(0)
    waits.append(("a core", permits.acquire, permits.release))
    event = ThreadEvent("a stream", AbortSwitch("a device"), timed=False)
    waits.append(("an event", event.wait, lambda: event.settle(None)))
    added = _Added(cast(Any, SimpleNamespace(alive=True)))
    waits.append(("a sum", added.wait, lambda: added.after(event, lambda: None)))
    for name, wait, wake in waits:
        order: queue.SimpleQueue[str] = queue.SimpleQueue()
        interpreter_lease.acquire()
        since = time.perf_counter()

        def other(order: Any = order, wake: Any = wake) -> None:
            interpreter_lease.acquire()  # comes back only if the wait has released the lease
            order.put("other")
            interpreter_lease.release()
            wake()

        thread = beside(other)
        wait()
        order.put("waited")
        assert interpreter_lease.release(), f"{name}: the lease was acquired again"
        thread.join()
        assert [order.get(), order.get()] == ["other", "waited"], name
        assert time.perf_counter() - since < 10, f"{name}: the lease has expired"

    with device.acquire_core():
        interpreter_lease.acquire()
        had = []

        def during() -> None:
            sleeping.wait()
            interpreter_lease.acquire()
            had.append(interpreter_lease.release())

        thread = beside(during)
        sleeping.set()
        emulated_work(0.2)
        assert interpreter_lease.release()
    thread.join()
    assert had == [True]


@pytest.fixture
def without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease expires, however busy the machine is."""
    monkeypatch.setattr(interpreter_lease, "TERM_S", 60.0)


def test_a_woken_thread_sleeps_until_it_gets_the_lease(without_end: None) -> None:
    """It would take the interpreter from the holder, twice, only to wait again."""
    waiter, ready, order = Waiter(), threading.Event(), []

    def waits() -> None:
        interpreter_lease.acquire()
        ready.set()
        waiter.wait()
        order.append("woken")
        assert interpreter_lease.release()

    thread = beside(waits)
    ready.wait()
    interpreter_lease.acquire()  # once the thread waits
    waiter.wake()
    thread.join(0.1)
    order.append("released")
    interpreter_lease.release()
    thread.join()
    assert order == ["released", "woken"]
    assert is_free()


def test_threads_get_the_lease_in_the_order_in_which_they_asked(without_end: None) -> None:
    interpreter_lease.acquire()
    order: list[int] = []

    def work(number: int) -> None:
        interpreter_lease.acquire()
        order.append(number)
        interpreter_lease.release()

    threads = []
    for number in range(5):
        threads.append(beside(lambda number=number: work(number)))
        until(lambda number=number: len(interpreter_lease._line) == number + 1)
    interpreter_lease.release()
    for thread in threads:
        thread.join()
    assert order == list(range(5))


@pytest.mark.parametrize("wakes", [1, 2, 3])
def test_wakes_and_waits_in_any_order(wakes: int) -> None:
    """A waker that comes before, during or after the look of the waiting thread is not missed, nor seen twice."""

    def work(waiter: Waiter) -> None:
        interpreter_lease.acquire()
        waiter.wait()
        waiter.wait()  # stays woken
        interpreter_lease.release()

    for _ in range(200):
        waiter = Waiter()
        threads = [beside(lambda waiter=waiter: work(waiter)), *(beside(waiter.wake) for _ in range(wakes))]
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()
    assert is_free()


def test_a_lost_lease_is_asked_for_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread would go on beside the one that took it over."""
    interpreter_lease.renew()
    assert interpreter_lease.ticket() is None, "a thread without a lease needs none"
    interpreter_lease.acquire()
    taken, goes_on, order = threading.Event(), threading.Event(), []

    def other() -> None:
        interpreter_lease.acquire()
        monkeypatch.setattr(interpreter_lease, "TERM_S", 60.0)
        interpreter_lease.renew()  # now without end
        taken.set()
        goes_on.wait()
        order.append("other")
        interpreter_lease.release()

    thread = beside(other)
    taken.wait()
    threading.Timer(0.05, goes_on.set).start()
    interpreter_lease.renew()
    order.append("this")
    thread.join()
    assert order == ["other", "this"]
    assert interpreter_lease.release() and is_free()


def test_calls_extend_a_lease_and_share_it(monkeypatch: pytest.MonkeyPatch, without_end: None) -> None:
    interpreter_lease.acquire()
    lease = interpreter_lease._latest
    before = lease.expires
    interpreter_lease.renew()
    assert lease.expires > before
    had = threading.Event()

    def other() -> None:
        interpreter_lease.acquire()
        had.set()
        interpreter_lease.release()

    monkeypatch.setattr(interpreter_lease, "SHARE_S", 60.0)
    thread = beside(other)
    until(lambda: len(interpreter_lease._line) == 1)
    interpreter_lease.renew()
    assert not had.is_set(), "its share is not used up"
    monkeypatch.setattr(interpreter_lease, "SHARE_S", 0.0)
    interpreter_lease.renew()
    assert had.is_set() and interpreter_lease.release()
    thread.join()


def test_a_lease_that_nobody_takes_is_passed_on() -> None:
    """An error may end a thread between its request and the grant."""
    interpreter_lease.acquire()
    interpreter_lease.Ticket().submit()
    interpreter_lease.release()
    interpreter_lease.acquire()  # after a term
    assert interpreter_lease.release() and is_free()


def test_the_keeper_ends_when_no_thread_waits() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    for _ in range(2):
        interpreter_lease.acquire()
        thread = beside(lambda: interpreter_lease.acquire() or interpreter_lease.release())
        until(lambda: "roundpipe-lease" in names())
        interpreter_lease.release()
        thread.join()
        until(lambda: "roundpipe-lease" not in names())


def test_a_forked_process_has_no_lease_of_its_parents_threads() -> None:
    """The keeper is not forked, so nothing would ever pass the lease on."""
    interpreter_lease.acquire()
    child = os.fork()
    if not child:
        os._exit(not (is_free() and interpreter_lease.ticket() is None))
    assert os.waitpid(child, 0)[1] == 0
    assert interpreter_lease.release() and is_free()


class WokenBeforeItParks(list[Any]):
    """A waiter's tickets. The waker comes after the waiting thread's first look, and before its ticket is there."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__()
        self.waiter = waiter

    def append(self, ticket: Any) -> None:
        self.waiter.wake()
        super().append(ticket)


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_wake_just_before_the_ticket_is_there(seconds: float | None) -> None:
    waiter = Waiter()
    waiter._parked = WokenBeforeItParks(waiter)

    def work() -> None:
        interpreter_lease.acquire()
        assert waiter.wait_for(seconds) if seconds else waiter.wait() is None
        done.append(interpreter_lease.release())

    done: list[bool] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert done == [True], "the thread kept its lease, and waits for nobody"
    assert is_free()


def test_each_call_renews_the_lease_before_it_takes_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread that has lost its lease would run its next calls beside the holder."""
    held: list[bool] = []
    own = interpreter_lease.renew

    def renew() -> None:
        held.append(getattr(core_semaphore._mine, "held", None) is not None)
        own()

    monkeypatch.setattr(interpreter_lease, "renew", renew)
    train(0.0, monkeypatch, term=60.0)
    forwards_and_backwards = 2 * 4 * 4  # four layers, four microbatches
    assert len(held) >= 3 * forwards_and_backwards
    assert not any(held)
