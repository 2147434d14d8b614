"""`torch.utils.checkpoint` around layers and the code between them equals plain Lightning, of both kinds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpointed import KINDS, PLACES, HeadAndLoss, Nested, Net, TwoBlocks, batches, build
from harness import assert_same, gradients, ours, run
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError

SIZES = [(1, 1), (1, 3), (2, 1), (2, 3)]
"""Microbatches and devices."""


@pytest.mark.parametrize(("microbatches", "devices"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_plain(place: type[Net], kind: str, microbatches: int, devices: int) -> None:
    module = build(place, kind)
    plain = run("auto", module, batches())
    assert_same(plain, run(ours(num_microbatches=microbatches), module, batches(), devices=devices))


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_draws_what_the_forward_has_drawn(place: type[Net], kind: str, microbatches: int, devices: int) -> None:
    """In layers and between them: without checkpoints, the numbers are the same."""
    results = [
        run(ours(num_microbatches=microbatches), build(place, each, dropout=0.4), batches(), devices=devices)
        for each in ("", kind)
    ]
    assert_same(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind: str) -> None:
    module = build(Nested, kind)
    plain = run("auto", module, batches(), precision="bf16-mixed")
    result = run(ours(num_microbatches=2), module, batches(), devices=2, precision="bf16-mixed")
    assert_same(plain, result, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "plan",
    [
        "forward 0-1 2; fused 3-4; backward 2 0-1; round 2",
        "forward 0 1 2 3; fused 4; backward 3 2 1 0; round 2; recompute ahead",
    ],
)
def test_under_other_plans(plan: str) -> None:
    """Layers are called again where no slot has their weights."""
    module = build(TwoBlocks, "not reentrant", dropout=0.4)
    expected = run(ours(num_microbatches=4), build(TwoBlocks, dropout=0.4), batches(), devices=2)
    assert_same(expected, run(ours(num_microbatches=4, plan=plan), module, batches(), devices=2))


@pytest.mark.parametrize("kind", KINDS)
def test_with_frozen_weights(kind: str) -> None:
    module = build(Nested, kind)
    for block in (module.head, module.blocks[1]):
        block.requires_grad_(False)
    plain = run("auto", module, batches())
    assert_same(plain, run(ours(num_microbatches=2), module, batches(), devices=2))


def test_without_the_generators_state() -> None:
    """The last call of a layer is repeated then."""

    class Unkept(HeadAndLoss):
        def again(self, function: Any, *args: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    module = build(Unkept, "not reentrant")
    plain = run("auto", module, batches())
    assert_same(plain, run(ours(num_microbatches=2), module, batches(), devices=2))


class ByHand(pl.LightningModule):
    """The same under manual optimization."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.automatic_optimization = False
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.net.step(batch["x"], batch["y"])
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen.append(gradients(self))
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [HeadAndLoss, Nested])
def test_under_manual_optimization(place: type[Net], kind: str, devices: int) -> None:
    module = ByHand(build(place, kind))
    plain = run("auto", module, batches(), watch=False)
    result = run(ours(), module, batches(), devices=devices, watch=False)
    assert_same(plain, result)


def test_a_layer_that_only_a_backward_calls_is_refused() -> None:
    class Late(HeadAndLoss):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.stem(x)
            h.register_hook(lambda grad: self.blocks[0](grad).detach())
            return self.loss(h, y)

    with pytest.raises(RoundPipeError, match=r"layer 'blocks\.0' was called in a backward"):
        run(ours(num_microbatches=2), build(Late, "reentrant"), batches(), devices=2)
