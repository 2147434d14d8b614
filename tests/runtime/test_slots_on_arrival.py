"""The first step, which has no plan yet: a slot for each call, on one worker after another."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same, ours, run
from torch import Tensor, nn

from lightning_roundpipe.runtime.core.worker import Worker


class OneLayer(pl.LightningModule):
    """Its slots follow each other directly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.tanh(self.layer(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Twice(OneLayer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.tanh(self.layer(batch))).square().mean()


@pytest.mark.parametrize("kind", [OneLayer, Twice])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_slot_adds_to_what_the_one_before_has_sent(
    kind: type[OneLayer], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late that is: the worker that closes a slot is not the one that opens the next."""
    real = Worker.close_slot

    def late(self: Any, slot: Any) -> None:
        time.sleep(0.02)
        real(self, slot)

    monkeypatch.setattr(Worker, "close_slot", late)
    batch = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    expected = run("auto", kind(), batch, steps=2)
    assert_same(expected, run(ours(num_microbatches=3), kind(), batch, steps=2, devices=devices))
