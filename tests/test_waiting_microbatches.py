"""Microbatches that wait for another worker: what they hold fits the plan, and user code finds it as it was."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Result, assert_identical, ours, per_call, run
from stress import all_reports
from torch import Tensor, nn

from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.memory import device_bytes, waiting_bytes

WIDTH = 2048
MICROBATCHES = 10
PLAN = per_call(5, MICROBATCHES)


Between = Callable[[list[Tensor], list[Tensor], int], None]
"""Looks at the outputs so far, and adds to the loss."""


class Scale(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=trained)

    def forward(self, h: Tensor, added: Tensor | None = None) -> Tensor:
        return torch.tanh(self.weight * (h if added is None else h + added))


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


@pytest.mark.slow
def test_microbatches_that_wait_hold_what_is_planned_whoever_is_late() -> None:
    """At no moment does a worker hold more than planned: its memory ends there, and any delay may come."""
    with all_reports() as made:
        free = train()
    report = made[-1]()
    costs, plan = Costs.from_dict(report["costs"]), Plan.parse(PLAN)
    need = device_bytes(plan, costs, 3)
    assert max(waiting_bytes(plan, costs, 3)) == (MICROBATCHES - 1) * 4 * WIDTH
    for seed in range(3):
        limits: Any = {"memory": need, "delay_seed": seed, "poison": True}
        with all_reports() as made:
            tight = train(emulation=limits, memory_budget=1.0)
        assert_identical(free, tight)
        assert made[-1]()["planned_device_bytes"] == need
    assert_identical(free, train(devices=1))


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
    """Autograd saves the tensor itself, before it goes to the next layer and afterwards."""
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


def in_other_hands(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """`torch.func`, operators by name, TorchScript and DLPack."""
    if len(seen) > 2:
        left = seen[-2]
        extra.append(torch.func.vmap(lambda row: (row * row).mean())(left)[:, None])
        extra.append(torch.ops.aten.mean.dim(left, [1], True) + _scripted_mean(left))
        extra.append(torch.from_dlpack(left.detach()).mean(1, keepdim=True))


@torch.jit.script
def _scripted_mean(h: Tensor) -> Tensor:
    return h.sin().mean(1, keepdim=True)


@pytest.mark.parametrize(
    "between",
    [
        overwrite, overwrite_a_view, skip, save_for_backward, own_function, hook, in_other_hands,
    ],
)  # fmt: skip
def test_user_code_sees_tensors_as_on_one_worker(between: Between) -> None:
    """One worker computes the same bits."""
    assert_identical(train(between, devices=1), train(between, emulation={"poison": True}))


class Kept(pl.LightningModule):
    """All microbatches of later batches use what the first one has computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Scale(trained=False)
        self.blocks = nn.ModuleList(Scale() for _ in range(4))
        self.null: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.null is None:
            with torch.no_grad():
                self.null = self.encoder(torch.ones(1, WIDTH))
        h = batch
        for block in self.blocks:
            h = block(h, self.null) + 0.1 * self.null
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        h.add_(self.weight)
        return h * 2


class WithoutGradients(pl.LightningModule):
    """A frozen layer writes to its argument, which other layers have taken before and which has an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(Scale(trained=False) for _ in range(4))
        self.writes, self.last = InPlace(), Scale()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            h = self.frozen[0](batch)
            alias = h.detach()
            first = self.frozen[1](h) + alias
            second = self.writes(h)
            third = self.frozen[2](h)
            fourth = self.frozen[3](first + second + third)
        return self.last(fourth + h).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.last.parameters(), lr=0.1)


class Aliased(pl.LightningModule):
    """A tensor that shares an output's memory is written to between two layers that take the output."""

    plan = per_call(6, 6)  # all calls are recomputed: from a kept graph, the write would be refused

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scale() for _ in range(5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.blocks[0](batch)
        alias = h.detach()
        first = self.blocks[1](h)
        if batch_idx:
            alias.mul_(2.0)
        second = self.blocks[2](h)
        third = self.blocks[3](first + second)
        return self.blocks[4](third + self.blocks[2](h)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Turned(nn.Module):
    """Returns a view with the conjugate bit, which is not in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.2, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return torch.complex(h * self.weight, h + self.weight).conj()


class Conjugates(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.turned = Turned()
        self.blocks = nn.ModuleList(Scale() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        z = self.turned(batch)
        alias = z.detach()
        h = self.blocks[0](z)
        h = self.blocks[1](h + z)
        h = self.blocks[2](h + z)
        return (h.abs() + (h + alias).imag).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kept, Aliased, WithoutGradients, Conjugates])
def test_numbers_are_those_of_one_device(kind: type[pl.LightningModule]) -> None:
    batches = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def trained(devices: int, **options: Any) -> Result:
        module = kind()
        layers = [name for name in ("Scale", "InPlace", "Turned") if name in str(module)]
        plan = getattr(module, "plan", None)
        used = ours(num_microbatches=6, layers=layers, plan=plan, **options)
        return run(used, module, batches, devices=devices)

    alone = trained(1)
    for seed in range(2):
        assert_identical(alone, trained(2, emulation={"delay_seed": seed, "poison": True}))


def test_another_thread_reads_the_same_values_at_any_time() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def sums(h: Tensor) -> set[float]:
        return {float(h.detach().sum()) for _ in range(20) if time.sleep(0.001) is None}

    def between(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
        if len(seen) == 2:
            seen[0].read = pool.submit(sums, seen[-1])  # type: ignore[attr-defined]
        elif len(seen) == 4:
            assert len(seen[0].read.result()) == 1  # type: ignore[attr-defined]

    with pool:
        train(between, emulation={"delay_seed": 0, "poison": True})
