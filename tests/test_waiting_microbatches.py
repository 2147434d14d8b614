"""Microbatches that wait for another worker: what they hold fits the plan, and user code finds it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Result, assert_identical, ours, per_call, run
from torch import Tensor, nn

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


def overwrite(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """After the first batch, which would have shown it. The recomputation must not see what is written."""
    if batch_idx and len(seen) in (2, 3):
        with torch.no_grad():
            seen[-2].mul_(2.0)
        extra.append(seen[-2].detach().clone())


def skip(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    if len(seen) > 2:
        extra.append(seen[-2] + seen[-3])


def save_for_backward(seen: list[Tensor], extra: list[Tensor], batch_idx: int) -> None:
    """Autograd saves the tensor itself, before it goes to the next layer and afterwards."""
    extra.append(seen[-1] * seen[-1])
    if len(seen) > 1:
        extra.append(seen[-2] * seen[-2])


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
        overwrite, skip, save_for_backward, hook, in_other_hands,
    ],
)  # fmt: skip
def test_user_code_sees_tensors_as_on_one_worker(between: Between) -> None:
    """One worker computes the same bits."""
    assert_identical(train(between, devices=1), train(between, emulation={"poison": True}))
