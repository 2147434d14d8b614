"""The engine's threads run Python one at a time; long layers, waits and leases that have expired delay nobody."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from harness import loader, ours, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.devices import emulated_work, interpreter_lease, intraop_threads
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.core_semaphore import Semaphore
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.devices.thread_event import ThreadEvent
from lightning_roundpipe.runtime.threads.sync import Waiter


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
    assert not interpreter_lease._lock.locked(), "what had expired was not released a second time, nor kept"


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
    assert not interpreter_lease._lock.locked()


def test_many_threads_whose_leases_expire_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take over, release late and take over again. The lock is free in the end."""
    monkeypatch.setattr(interpreter_lease, "TERM_S", 0.0005)

    def work() -> None:
        for i in range(100):
            interpreter_lease.acquire()
            if i % 7 == 0:
                time.sleep(0.001)
            interpreter_lease.release()

    for thread in [beside(work) for _ in range(8)]:
        thread.join()
    assert not interpreter_lease._lock.locked()


def test_a_thread_that_waits_holds_no_lease(make_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_lease, "TERM_S", 60.0)
    (device,) = make_all(1)
    waiter = Waiter()
    waits: list[tuple[str, Callable[[], object], Callable[[], object]]] = []
    sleeping = threading.Event()
    waits.append(("a waiter", waiter.wait, waiter.wake))
    permits = Semaphore(0)
    waits.append(("a core", permits.acquire, permits.release))
    event = ThreadEvent("a stream", AbortSwitch("a device"), timed=False)
    waits.append(("an event", event.wait, lambda: event.settle(None)))
    for name, wait, wake in waits:
        order: queue.SimpleQueue[str] = queue.SimpleQueue()
        interpreter_lease.acquire()

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
