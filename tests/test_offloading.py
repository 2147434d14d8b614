"""Boundary tensors of microbatches that wait for another worker are on the host, not on the worker that they left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Result, assert_identical, ours, per_call, run
from stress import all_reports
from torch import Tensor, nn
from without import take_out

from lightning_roundpipe.devices import emulated
from lightning_roundpipe.devices.emulated_link import Delays
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.memory import LEAVING, device_bytes, waiting_bytes
from lightning_roundpipe.runtime.core import offloading
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.offloading import Departures
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.threads.task_thread import TaskThread

WIDTH = 2048
MICROBATCHES = 10
PLAN = per_call(5, MICROBATCHES)


Between = Callable[[list[Tensor], list[Tensor], int], None]
"""Looks at the outputs so far, of which all but the last have left, and adds to the loss."""


class Scale(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=trained)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.weight * h)


class Scales(pl.LightningModule):
    """Between layers, user code does what ``between`` says; without it, it keeps no output."""

    def __init__(self, between: Between | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(trained=False), *(Scale() for _ in range(4))])
        self.between = between

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.between is None:
            h = batch
            for block in self.blocks:
                h = block(h)
            return h.square().mean()
        seen, extra = [self.blocks[0](batch)], [torch.zeros(())]
        for block in list(self.blocks)[1:]:
            self.between(seen, extra, batch_idx)
            seen.append(block(seen[-1]))
        return (seen[-1] + sum(extra)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def train(between: Any = None, *, devices: int = 3, steps: int = 3, **options: Any) -> Result:
    batches = [torch.randn(MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(steps)]
    strategy = ours(num_microbatches=MICROBATCHES, plan=PLAN, layers=["Scale"], **options)
    return run(strategy, Scales(between), batches, devices=devices)


def test_microbatches_that_wait_hold_nothing_on_workers_whoever_is_late() -> None:
    """At no moment does a worker hold more than planned: its memory ends there, and any delay may come."""
    with all_reports() as made:
        free = train()
    report = made[-1]()
    costs, plan = Costs.from_dict(report["costs"]), Plan.parse(PLAN)
    need = device_bytes(plan, costs, 3)
    boundary = 4 * WIDTH
    assert set(waiting_bytes(plan, costs, 3)) == {LEAVING * boundary}
    stay = Costs(tuple(replace(call, leaving_bytes=0) for call in costs))
    assert max(waiting_bytes(plan, stay, 3)) == (MICROBATCHES - 1) * boundary
    assert set(waiting_bytes(plan, costs, 1)) == {0, (MICROBATCHES - 1) * boundary}, "one worker holds them"
    for seed in range(3):
        limits: Any = {"memory": need, "delay_seed": seed, "poison": True}
        with all_reports() as made:
            tight = train(emulation=limits, memory_budget=1.0)
        assert_identical(free, tight)
        assert made[-1]()["planned_device_bytes"] == need
    assert_identical(free, train(devices=1))


class DownloadsLate(Delays):
    """Copies of activations to the host take much longer than all others."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(seed, name)
        self.late = name.endswith("/activations_down")

    def next(self) -> float:
        return 0.02 if self.late else super().next() / 10


@pytest.mark.parametrize("missing", [None, "forward", "backward"])
def test_no_call_begins_while_more_tensors_are_leaving_than_planned(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"forward": 0, "backward": 0}

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(LayerExecutor, name)

        def call(self: LayerExecutor, *args: Any) -> Any:
            leaving = [*self._worker.departures._pending]
            most[name] = max(most[name], sum(not departure.is_over() for departure in leaving))
            return real(self, *args)

        return call

    for name in most:
        monkeypatch.setattr(LayerExecutor, name, watched(name))
    if missing is not None:
        where = f"runtime.core.microbatch:MicrobatchTask._run_{missing}"
        take_out(monkeypatch, where, "worker.departures.wait(self._cancel_scope)")
    monkeypatch.setattr(emulated, "Delays", DownloadsLate)
    train(emulation={"delay_seed": 0, "poison": True})
    assert all((most[name] > LEAVING) is (name == missing) for name in most), most


def overwrite(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """After the first batch, which would have shown it. The recomputation must not see what is written."""
    if batch_idx and len(seen) in (2, 3):
        with torch.no_grad():
            seen[-2].mul_(2.0)
        extra.append(seen[-2].detach().clone())


def overwrite_a_view(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """A tensor from before shares the memory, and is written to in its stead."""
    seen[-1].view_of_it = seen[-1].detach()  # type: ignore[attr-defined]
    if batch_idx and len(seen) in (2, 3):
        seen[-2].view_of_it.mul_(0.5)  # type: ignore[attr-defined]
        extra.append(seen[-2].detach().clone())


def skip(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    if len(seen) > 2:
        extra.append(seen[-2] + seen[-3])


def save_for_backward(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """Autograd saves the tensor itself, before it leaves and afterwards."""
    extra.append(seen[-1] * seen[-1])
    if len(seen) > 1:
        extra.append(seen[-2] * seen[-2])


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        return 2 * h * grad


def own_function(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    if len(seen) > 1:
        extra.append(Squared.apply(seen[-2]))  # type: ignore[no-untyped-call]


def hook(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    if len(seen) > 2:
        seen[-2].register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize("between", [overwrite, overwrite_a_view, skip, save_for_backward, own_function, hook])
def test_user_code_sees_a_tensor_as_if_it_had_stayed(between: Between) -> None:
    """One worker, from which nothing leaves, computes the same bits."""
    assert_identical(train(between, devices=1), train(between, emulation={"poison": True}))


def test_a_call_waits_for_the_oldest_departure_if_there_are_too_many() -> None:
    departures, scope = Departures(), CancelScope()
    first, *others = [departures.begin() for _ in range(LEAVING + 1)]
    task: TaskThread = TaskThread("a test's microbatch")
    waits = task.submit(lambda: departures.wait(scope))
    assert not waits.waiter.wait_for(0.05)
    others[0].leave()
    assert not others[1].is_over() and not waits.waiter.wait_for(0.05), "it waits for the oldest"
    first.leave()
    waits.result()
    departures.wait(scope)
    task.stop()
    task.join(None)


def test_only_what_user_code_touches_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    restored: list[int] = []
    add, restore = offloading.OffloadedTensors.add, ActivationStore.restore

    def note(self: Any, tensor: Tensor, *given: Any) -> None:
        left.append(id(tensor))
        add(self, tensor, *given)

    def bring(self: Any, tensor: Tensor) -> None:
        restored.extend([id(tensor)] * (self.offloaded.get(tensor) is not None))
        restore(self, tensor)

    monkeypatch.setattr(offloading.OffloadedTensors, "add", note)
    monkeypatch.setattr(ActivationStore, "restore", bring)
    train(steps=2)  # the first has no plan
    assert len(left) == 4 * MICROBATCHES and not restored
    train(skip, steps=2)
    assert len(set(restored)) == 3 * MICROBATCHES
