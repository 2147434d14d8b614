"""Layers whose Python code takes little time run it one at a time; no others wait for them, or for each other."""

from __future__ import annotations

import threading
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import loader, ours, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.devices import emulated_work, intraop_threads, launch_lock


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


def turns_taken(seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a turn was asked for in steps of layers that take ``seconds``."""
    monkeypatch.setattr(intraop_threads, "cores", lambda: 4)
    acquire, taken = launch_lock.acquire, []
    monkeypatch.setattr(launch_lock, "acquire", lambda: [taken.append(1), acquire()])
    Layer.seconds = seconds
    strategy = ours(num_microbatches=4, layers=["Layer"], plan="forward 0-1; fused 2-3; backward 0-1; round 4")
    trainer_of(strategy, devices=4).fit(Model(), loader([torch.ones(4, 4)] * 3))
    return len(taken)


def test_short_calls_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_lock, "PATIENCE_S", 60.0)
    monkeypatch.setattr(launch_lock, "SHORT_S", 0.1)  # however busy the machine is
    assert turns_taken(0.002, monkeypatch) >= 2 * 4 * (4 + 2)  # forward, and what is recomputed
    assert Layer.most == 1


def test_long_calls_wait_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns_taken(2 * launch_lock.SHORT_S, monkeypatch) == 0


def run(*functions: Any) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_whoever_does_not_get_its_turn_goes_on_without() -> None:
    launch_lock.acquire()
    had = []

    def other() -> None:
        launch_lock.acquire()
        had.append(launch_lock.release())

    run(other)
    assert had == [False]  # and what it did not have, it does not give away
    assert launch_lock.release() and not launch_lock.release()


def test_a_pretended_operation_gives_the_turn_on(make_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_lock, "PATIENCE_S", 60.0)
    (device,) = make_all(1)
    with device.acquire_core():
        launch_lock.acquire()
        pretending, had = threading.Event(), []

        def other() -> None:
            pretending.wait()
            launch_lock.acquire()
            had.append(launch_lock.release())

        thread = threading.Thread(target=other)
        thread.start()
        pretending.set()
        emulated_work(0.2)
        assert launch_lock.release()
    thread.join()
    assert had == [True]
