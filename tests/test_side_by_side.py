"""Rounds of one microbatch run side by side: every worker computes, and no bit depends on it."""

from __future__ import annotations

from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
from harness import ours
from torch import Tensor, nn

WIDTH, MICROBATCHES = 64, 4


class Model(pl.LightningModule):
    """Layers that take equally long, with dropout, and with running statistics, which depend on their order."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layers = nn.ModuleList(self._layer(normed) for _ in range(3))

    def _layer(self, normed: bool) -> nn.Module:
        parts = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*parts, *([nn.BatchNorm1d(WIDTH)] if normed else []))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def trained(devices: int, *, normed: bool = True, steps: int = 4, **options: Any) -> tuple[Any, Any]:
    """The result of a run, and the report of its last step."""
    strategy = ours(num_microbatches=MICROBATCHES, layers=["Sequential"], **options)
    batches = list(torch.randn(steps, 128 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1)))
    result = harness.run(strategy, Model(normed), batches, devices=devices, watch=False)
    return result, strategy.report()


@pytest.mark.parametrize("staleness", [0, 1])
def test_running_means_see_microbatches_in_order(staleness: int) -> None:
    options = {"normed": not staleness, "staleness": staleness}
    one, _ = trained(1, **options)
    plan = "forward none; fused 0-2; backward none; round 1"
    for devices in (2, 3):
        several, report = trained(devices, plan=plan, emulation={"delay_seed": devices, "poison": True}, **options)
        harness.assert_identical(one, several)
        assert {slot["worker"] for slot in report["slots"]} == set(range(devices))


def test_a_model_that_fits_each_worker_is_trained_on_all_of_them() -> None:
    one, _ = trained(1, normed=False, memory_budget="1GiB", plan="static")
    two, report = trained(2, normed=False, memory_budget="1GiB", plan="static")
    harness.assert_identical(one, two)
    assert report["plan"] == "forward none; fused 0-2; backward none; round 1"
    assert [slot["worker"] % 2 for slot in report["slots"]] in ([0, 1, 0, 1], [1, 0, 1, 0])
