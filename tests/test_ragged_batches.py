"""Batches in which some tensors have a row for each sample and others do not, as patches of images of several sizes."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, ours, run
from torch import Tensor, nn

COUNTS = (2, 3, 1, 4, 2, 3)
"""Patches of each image."""


class Seeing(nn.Module):
    """Patches of all images are one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, counts: Tensor, pixels: Tensor) -> Tensor:
        h = x + torch.stack([image.mean(0) for image in self.patches(pixels).split(counts.tolist())])
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class Module(pl.LightningModule):
    def __init__(self, whole_call: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.whole_call = Seeing(), whole_call

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {name: batch[name] for name in ("x", "counts", "pixels")}
        call: Any = self.model if self.whole_call else self.model.forward
        loss = F.cross_entropy(call(**inputs), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(first: str) -> list[dict[str, Tensor]]:
    """``first``: the tensor that comes first, which tells how many samples there are, or does not."""
    draw, made = torch.Generator().manual_seed(0), []
    for _ in range(3):
        batch = {
            "x": torch.randn(6, 8, generator=draw),
            "counts": torch.tensor(COUNTS),
            "pixels": torch.randn(sum(COUNTS), 6, generator=draw),
            "y": torch.randint(0, 5, (6,), generator=draw),
        }
        made.append({first: batch.pop(first), **batch})
    return made


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("whole_call", [True, False])
@pytest.mark.parametrize("first", ["x", "pixels"])
def test_trains_as_plainly(first: str, whole_call: bool, devices: int) -> None:
    """By default: what cannot be cut stays whole."""
    module = Module(whole_call)
    plain = run("auto", copy.deepcopy(module), batches(first))
    assert_same(plain, run(ours(), module, batches(first), devices=devices))


@pytest.mark.parametrize(("first", "says"), [("x", "split_with_sizes"), ("pixels", "the size of the batch cannot be")])
def test_parts_that_were_asked_for_are_refused(first: str, says: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=says):
        run(ours(num_microbatches=3), Module(True), batches(first))


class Counting(nn.Module):
    """A layer that counts on the patches of its part only."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(6, 8)

    def forward(self, x: Tensor, counts: Tensor, pixels: Tensor) -> Tensor:
        return x + torch.stack([image.mean(0) for image in self.patches(pixels).split(counts.tolist())])


class Layered(pl.LightningModule):
    """Takes patches that a batch lists for each sample, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seeing, self.head = Counting(), nn.Linear(8, 5)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        pixels = batch["pixels"] if isinstance(batch["pixels"], Tensor) else torch.cat(batch["pixels"])
        return F.cross_entropy(self.head(self.seeing(batch["x"], batch["counts"], pixels)), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_error_inside_a_layer_names_what_is_not_cut_and_its_remedy_helps() -> None:
    options: dict[str, Any] = {"num_microbatches": 3, "layers": ["Counting", "head"]}
    plain = run("auto", Layered(), batches("x"))
    with pytest.raises(RuntimeError, match="split_with_sizes") as found:
        run(ours(**options), Layered(), batches("x"), devices=2)
    notes = "\n".join(found.value.__notes__)
    assert "in layer 'seeing'" in notes
    assert f"2 of 6 samples, and on all of 'pixels' ({sum(COUNTS)} rows)" in notes
    assert "a list with an item for each sample" in notes
    listed = [batch | {"pixels": list(batch["pixels"].split(COUNTS))} for batch in batches("x")]
    assert_same(plain, run(ours(**options), Layered(), listed, devices=2))
