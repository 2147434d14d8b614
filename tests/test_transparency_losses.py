"""The gradient is that of the whole batch's loss, whatever mean that is and whichever layers it reaches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from torch import Tensor, nn
from zoo_runs import module


class Shaped(zoo.PlainClassifier):
    """The MLP with another loss."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__(model)
        self.kind = kind

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        logits, y = self.model(batch["x"]), batch["y"]
        if self.kind == "nll":
            loss = F.nll_loss(F.log_softmax(logits, -1), y, ignore_index=0)
        elif self.kind == "module":
            loss = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)(logits, y)
        elif self.kind == "class weights":
            loss = F.cross_entropy(logits, y, weight=torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0]))
        elif self.kind == "mse":
            loss = F.mse_loss(logits, F.one_hot(y, 5).float())
        elif self.kind == "two":
            loss = F.cross_entropy(logits, y, ignore_index=0) + 0.3 * F.cross_entropy(-logits, y, ignore_index=0)
        else:
            assert self.kind == "penalty"
            loss = F.cross_entropy(logits, y) + 0.01 * self.model.head.weight.square().sum()
        return loss, logits


@pytest.mark.parametrize("kind", ["nll", "module", "class weights", "mse", "two", "penalty"])
def test_kinds_of_loss(kind: str) -> None:
    shaped = Shaped(zoo.make_module("mlp").model, kind)
    batches = zoo.make_batches("mlp", samples=7)
    assert_same(run("auto", shaped, batches), run(ours(num_microbatches=3), shaped, batches, devices=2))


def test_a_microbatch_without_any_target() -> None:
    """Its own mean is 0/0; the batch's is not, and neither are plain training's gradients."""
    batches = zoo.make_batches("llama")
    for batch in batches[1:]:
        batch["labels"][2:4] = -100
    expected = run("auto", module("llama", False), batches)
    assert all(torch.isfinite(loss) for loss in expected.losses)
    assert_same(expected, run(ours(num_microbatches=3), module("llama", False), batches, devices=2))


def test_loss_that_needs_one_layer_only() -> None:
    """Layers whose outputs do not reach the loss have no gradient, as in plain training, not zeros."""

    class Shallow(zoo.PlainClassifier):
        def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
            return _shallow_loss(self, batch)

    shallow = Shallow(zoo.make_module("mlp").model)
    batches = zoo.make_batches("mlp")
    expected = run("auto", shallow, batches)
    assert expected.grads[0]["model.blocks.3.up.weight"] is None
    assert_same(expected, run(ours(num_microbatches=3), shallow, batches, devices=2))


def _shallow_loss(self: zoo.ZooModule, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
    net = self.model
    h = net.blocks[1](net.blocks[0](net.stem(batch["x"])))
    with torch.no_grad():
        deep = net.blocks[3](net.blocks[2](h))
    logits = net.head(h)
    return F.cross_entropy(logits, batch["y"]), logits + 0 * deep.sum()


@pytest.mark.parametrize("frozen", ["stem", "blocks.0", "blocks.3", "head"])
def test_frozen_parts(frozen: str) -> None:
    """Frozen at the start, in the middle and at the end of the trace."""
    part = zoo.make_module("mlp")
    part.model.get_submodule(frozen).requires_grad_(False)
    batches = zoo.make_batches("mlp")
    expected = run("auto", part, batches)
    assert_same(expected, run(ours(num_microbatches=3), part, batches, devices=2))
