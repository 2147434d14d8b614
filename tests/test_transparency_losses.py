"""Losses of batches that are cut by targets, and models of which parts are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from torch import Tensor
from zoo_runs import batches, module

Formula = Callable[[Tensor, Tensor], Tensor]


class Shaped(zoo.PlainClassifier):
    """The MLP with another loss."""

    def __init__(self, formula: Formula) -> None:
        super().__init__(zoo.make_module("mlp").model)
        self.formula = formula

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["x"])
        return self.formula(logits, batch["y"]), logits


def ce(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, y, ignore_index=0, **options)


CLASSES = torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0])


BY_TARGETS: dict[str, Formula] = {
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, None, None, 0),
    "class weights": lambda x, y: F.cross_entropy(x, y, CLASSES),
    "two": lambda x, y: ce(x, y) + 0.3 * ce(-x, y),
}


@pytest.mark.parametrize("formula", BY_TARGETS.values(), ids=BY_TARGETS)
def test_mean_cross_entropies_weigh_by_targets(formula: Formula) -> None:
    """Seven samples, with other numbers of targets in each part."""
    shaped, given = Shaped(formula), zoo.make_batches("mlp", samples=7)
    cut = ours(num_microbatches=3, loss_weight="targets")
    assert_same(run("auto", shaped, given), run(cut, shaped, given, devices=2))


def test_a_microbatch_without_any_target() -> None:
    """Its own mean is 0/0; the batch's is not, and neither are plain training's gradients."""
    given = zoo.make_batches("llama")
    for batch in given[1:]:
        batch["labels"][2:4] = -100
    expected = run("auto", module("llama", False), given)
    assert all(torch.isfinite(loss) for loss in expected.losses)
    cut = ours(num_microbatches=3, loss_weight="targets")
    assert_same(expected, run(cut, module("llama", False), given, devices=2))


@pytest.mark.parametrize("frozen", ["stem", "blocks.3"])
def test_frozen_parts(frozen: str) -> None:
    """Frozen at the start, in the middle and at the end of the trace."""
    part, given = zoo.make_module("mlp"), batches("mlp", window=3)
    part.model.get_submodule(frozen).requires_grad_(False)
    expected = run("auto", part, given, accumulate_grad_batches=3)
    assert_same(expected, run(ours(), part, given, devices=2, accumulate_grad_batches=3))
