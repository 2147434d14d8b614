"""The printed plan: its layers, and that stages without any have no row."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks.plan_table import PlanTable, span


class FrozenFirst(pl.LightningModule):
    """Nothing is differentiated through the first two layers, so their backward stage has nothing to load."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.layers[:2].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[2:].parameters(), lr=0.1)


def test_names_are_shown_as_a_span() -> None:
    assert span(["a", "b", "c"]) == "a … c (3)"
    assert span(["a", "b"]) == "a … b"
    assert span(["a"]) == "a"


def test_a_backward_stage_that_does_nothing_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "forward 0-1 2; fused 3-4; backward 2 0-1; round 2"
    strategy = RoundPipeStrategy(num_microbatches=2, layers=["Linear"], plan=plan)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=2, callbacks=[PlanTable()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(FrozenFirst(), DataLoader(torch.randn(8, 4), batch_size=4))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("│ ").split() for line in lines if "backward" in line and "│" in line]
    assert [(row[0], row[4]) for row in rows] == [("3", "layers.2")], lines
    assert any("Plan: 4 stages" in line for line in lines)
