"""Layers that return values on the host beside those on a device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from harness import assert_same, ours, run
from torch import Tensor, nn


class Counting(nn.Module):
    """Returns whole numbers on the host beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.inner(x)), torch.arange(3)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for layer in self.layers:
            h, numbers = layer(h)
            h = h + numbers.sum()
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_equal_plain(devices: list[Any]) -> None:
    batches = list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)))
    expected = run("auto", Net(), batches)
    plan = "forward 0-1; fused 2-3; backward 0-1; round 2"
    result = run(ours(num_microbatches=2, layers=["Counting"], plan=plan), Net(), batches, devices=2)
    assert devices
    assert_same(expected, result)
