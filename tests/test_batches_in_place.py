"""Batches that training_step changes in place: masked tokens, noise, labels that are not to count."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from torch import Tensor, nn
from traps import Block, Net


class Writing(pl.LightningModule):
    """A step that changes its batch before, between and after calls of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def before(self, batch: dict[str, Tensor]) -> None:
        pass

    def after(self, batch: dict[str, Tensor]) -> None:
        pass

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.before(batch)
        logits = self.model(batch["x"])
        self.after(batch)
        loss = F.cross_entropy(logits, batch["y"], ignore_index=-100)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Masked(Writing):
    def before(self, batch: dict[str, Tensor]) -> None:
        batch["x"][batch["x"] > 1] = 0

    def after(self, batch: dict[str, Tensor]) -> None:
        batch["y"][batch["y"] == 4] = -100


class Filled(Writing):
    def before(self, batch: dict[str, Tensor]) -> None:
        batch["x"].masked_fill_(batch["x"] < 0, 0.5).clamp_(max=1.5)


class Relabelled(Writing):
    """Labels are the model's own, of inputs that are changed back."""

    def before(self, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            batch["x"].add_(1)
            batch["y"].copy_(self.model(batch["x"]).argmax(-1))
            batch["x"].sub_(1)


class Columns(Writing):
    """Inputs and targets are columns of one tensor, of which only the targets are written to."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        table = batch["table"]
        x, y = table[:, :8], table[:, 8]
        y[y > 3] = 0
        return F.cross_entropy(self.model(x), y.long())


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, zoo.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return self.inner(x)


class InLayer(Writing):
    """The first layer writes to what it is given, which is the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.stem = WritesInput()


KINDS = [Masked, Filled, Relabelled, Columns, InLayer]


def build(kind: type[Writing]) -> Writing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return kind(Net(Block))


def batches(count: int = 4, samples: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        table = torch.randn(samples, 9, generator=generator)
        table[:, 8] = torch.randint(5, (samples,), generator=generator)
        x, y = torch.randn(samples, 8, generator=generator), torch.randint(5, (samples,), generator=generator)
        found.append({"x": x, "y": y, "table": table})
    return found


def check(kind: type[Writing], microbatches: int, devices: int, plan: str | None = None) -> None:
    mine, its = batches(), batches()
    plain = run("auto", build(kind), mine)
    other = run(ours(num_microbatches=microbatches, plan=plan), build(kind), its, devices=devices)
    assert_same(plain, other)
    for a, b in zip(mine, its, strict=True):
        assert all(torch.allclose(a[key], b[key]) for key in a), "batches are left otherwise"


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_parts_that_are_kept(kind: type[Writing]) -> None:
    """Within one stage a part's graph holds what was given to the first layer while the next one is changed."""
    check(kind, 4, 2, None if kind is Relabelled else "forward none; fused 0-4; backward none; round 4")


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain(kind: type[Writing], microbatches: int, devices: int) -> None:
    check(kind, microbatches, devices)
