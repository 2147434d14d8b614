"""The gradient is that of the whole batch's loss, whatever mean that is and whichever layers it reaches."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from torch import Tensor, nn
from zoo_runs import module

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.config import RoundPipeError


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


TARGETS = torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0])


class Summed(zoo.PlainClassifier):
    """The MLP with a loss that is a sum, or made of one, by its formula."""

    def __init__(self, model: nn.Module, formula: Formula) -> None:
        super().__init__(model)
        self.formula = formula

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["x"])
        return self.formula(logits, batch["y"]), logits


Formula = Callable[[Tensor, Tensor], Tensor]


def summed_ce(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, y, ignore_index=0, reduction="sum", **options)


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 5).float()


SUMS: dict[str, Formula] = {
    "cross_entropy": summed_ce,
    "smoothed": lambda x, y: summed_ce(x, y, label_smoothing=0.1, weight=TARGETS),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, None, None, 0, None, "sum"),
    "module": lambda x, y: nn.CrossEntropyLoss(reduction="sum")(x, y),
    "mse_loss": lambda x, y: F.mse_loss(x, one_hot(y), reduction="sum"),
    "l1_loss": lambda x, y: F.l1_loss(x, one_hot(y), reduction="sum"),
    "huber_loss": lambda x, y: F.huber_loss(x, one_hot(y), reduction="sum"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, one_hot(y), reduction="sum"),
    "kl_div": lambda x, y: F.kl_div(F.log_softmax(x, -1), one_hot(y), reduction="sum"),
    "two": lambda x, y: summed_ce(x, y) + F.mse_loss(x, one_hot(y), reduction="sum").float(),
    "difference": lambda x, y: -(F.l1_loss(x, one_hot(y), reduction="sum") - summed_ce(x, y)),
}
DIVIDED: dict[str, tuple[Formula, Any]] = {
    "by a constant": (lambda x, y: summed_ce(x, y) / 64, "sum"),
    "by its targets": (lambda x, y: summed_ce(x, y) / (y != 0).sum(), lambda batch: (batch["y"] != 0).sum()),
    "by its samples": (lambda x, y: 0.5 * summed_ce(x, y) / len(x), lambda batch: len(batch["y"])),
    "sum of squares": (lambda x, y: (x - one_hot(y)).square().sum(), "sum"),
    "multiplied": (lambda x, y: 3 * F.mse_loss(x, one_hot(y), reduction="sum"), "sum"),
}


@pytest.mark.parametrize(
    ("kind", "microbatches"), [("cross_entropy", 1), ("cross_entropy", 2), *((kind, 4) for kind in SUMS)]
)
def test_sums_are_recognised_and_added(kind: str, microbatches: int) -> None:
    """Losses, what is logged of them, and gradients: of seven samples with other numbers of targets in each part."""
    summed, batches = Summed(zoo.make_module("mlp").model, SUMS[kind]), zoo.make_batches("mlp", samples=7)
    expected = run("auto", summed, batches)
    assert_same(expected, run(ours(num_microbatches=microbatches), summed, batches, devices=2))


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [("by a constant", 1), ("by a constant", 2), ("by its targets", 2), *((kind, 4) for kind in DIVIDED)],
)
def test_what_is_done_to_a_sum_is_said_by_loss_weight(kind: str, microbatches: int) -> None:
    formula, weight = DIVIDED[kind]
    summed, batches = Summed(zoo.make_module("mlp").model, formula), zoo.make_batches("mlp", samples=7)
    expected = run("auto", summed, batches)
    strategy = ours(num_microbatches=microbatches, loss_weight=weight)
    assert_same(expected, run(strategy, summed, batches, devices=2))


def test_a_sum_over_its_targets_is_weighed_by_them() -> None:
    summed, batches = (
        Summed(zoo.make_module("mlp").model, DIVIDED["by its targets"][0]),
        zoo.make_batches("mlp", samples=7),
    )
    expected = run("auto", summed, batches)
    assert_same(expected, run(ours(num_microbatches=3, microbatch_scope="step"), summed, batches, devices=2))


@pytest.mark.parametrize("kind", ["by a constant", "by its samples"])
def test_the_remedies_that_the_error_of_a_sum_names(kind: str) -> None:
    """`loss_weight` is in the test above; the others are right whatever is done to the sum."""
    summed, batches = Summed(zoo.make_module("mlp").model, DIVIDED[kind][0]), zoo.make_batches("mlp", samples=7)
    with pytest.raises(RoundPipeError, match=r"cross_entropy with reduction='sum'.*loss_weight='sum'") as refused:
        run(ours(num_microbatches=3, microbatch_scope="step"), summed, batches, devices=2)
    remedies = re.findall(r"(microbatch_scope|num_microbatches)=('model'|1)", str(refused.value))
    assert len(remedies) == 2
    expected = run("auto", summed, batches)
    for name, value in remedies:
        options = {"num_microbatches": 3} | {name: ast.literal_eval(value)}
        assert_same(expected, run(ours(**options), summed, batches, devices=2))


def test_sums_in_some_microbatches_only() -> None:
    def formula(logits: Tensor, y: Tensor) -> Tensor:
        return summed_ce(logits, y) if len(y) == 3 else F.cross_entropy(logits, y)

    summed, batches = Summed(zoo.make_module("mlp").model, formula), zoo.make_batches("mlp", samples=7)
    with pytest.raises(RoundPipeError, match="reduction='sum', and not by adding up alone"):
        run(ours(num_microbatches=3, microbatch_scope="step"), summed, batches, devices=2)


def test_a_sum_over_rows_is_found_to_be_no_mean() -> None:
    """Nothing in its graph tells it from a mean with weights of the user's own; its value does."""
    batches = zoo.make_batches("mlp", samples=7)
    rows = Summed(zoo.make_module("mlp").model, DIVIDED["sum of squares"][0])
    with pytest.raises(RoundPipeError, match=r"the loss is .* instead of .*loss_weight"):
        run(ours(num_microbatches=3, microbatch_scope="step"), rows, batches, devices=2)
    assert_same(run("auto", rows, batches), run(ours(num_microbatches=3), rows, batches, devices=2))
    features = Summed(zoo.make_module("mlp").model, lambda x, y: (x - one_hot(y)).square().mean(0).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        run(ours(num_microbatches=3, loss_weight="sum"), rows, batches, devices=2)
        run(ours(num_microbatches=3), features, batches, devices=2)


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
