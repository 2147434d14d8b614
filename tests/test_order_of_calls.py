"""Microbatches that leave layers out, layers that remember their calls, and calls that nobody has foreseen."""

from __future__ import annotations

import time

import harness
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_identical, assert_same, by_hand, ours, run
from torch import Tensor, nn

import lightning_roundpipe.strategy
from lightning_roundpipe.engine import planner
from lightning_roundpipe.planning.schedule import Plan


class RandomDrop(zoo.MLP):
    """Layer drop as models have it: the code between the layers draws, and so do some of the layers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) < 0.6:
                h = F.dropout(block(h), 0.1)
        return self.head(h)


def test_random_layer_drop_does_not_depend_on_workers_or_plan() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = zoo.PlainClassifier(RandomDrop())
    batches = zoo.make_batches("mlp", 5)
    reference = run(ours(num_microbatches=4), module, batches, devices=1)
    assert reference.report is not None
    assert not reference.report["profiled"]
    assert _forwards(reference) < 4 * 6, "no block was left out in the last step"
    n = harness.call_count(reference.report["plan"])
    assert n == 6
    for devices, plan in ((2, None), (4, None), (2, harness.per_call(n)), (2, harness.halves(n, 2))):
        assert_identical(
            reference, run(ours(num_microbatches=4, plan=plan), module, batches, devices=devices), rng=True
        )


class ChosenDrop(zoo.MLP):
    """Draws once, behind whichever block comes last."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        h = self.stem(x)
        for block, wanted in zip(self.blocks, keep[0], strict=True):
            if wanted:
                h = block(h)
        return self.head(F.dropout(h, 0.3))


def test_code_that_draws_after_other_layers_than_in_the_first_batch() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = zoo.Voting(ChosenDrop())
    batches = _batches([[0, 1, 2, 3], [0, 1, 2, 3], [1, 3]], [[0], [1, 2], []])
    one, other = (
        run(ours(num_microbatches=3, loss_weight=lambda _: 2.0), module, batches, devices=devices) for devices in (1, 3)
    )
    assert_identical(one, other)
    assert not torch.equal(one.losses[0], run("auto", module, batches).losses[0]), "nothing was drawn"


def _forwards(result: harness.Result) -> int:
    assert result.report is not None
    return sum(event["kind"] == "forward" for event in result.report["events"])


def _batches(*kept: list[list[int]]) -> list[zoo.Batch]:
    """Two samples for each of three microbatches, with the blocks that they keep."""
    batches = zoo.make_batches("mlp", len(kept))
    for batch, parts in zip(batches, kept, strict=True):
        rows = [[block in part for block in range(4)] for part in parts for _ in range(2)]
        batch["keep"] = torch.tensor(rows)
    return batches


def test_a_layer_that_no_batch_has_shown() -> None:
    module = zoo.make_module("layer_drop")
    batches = _batches([[0, 2]] * 3, [[0, 2], [0, 1, 2], [0, 2]])
    result = run(ours(num_microbatches=3, loss_weight=module.targets), module, batches, devices=2)
    assert_same(by_hand(module, batches, 3), result)


class NormedTwice(nn.Module):
    """One norm for two places: its running statistics depend on the order of all calls of all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.norm = nn.BatchNorm1d(zoo.WIDTH)
        self.block = SlowBlock(zoo.WIDTH)
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x.flatten(0, 1)))
        h = self.norm(self.block(h))
        return self.head(h).view(*x.shape[:2], -1).mean(1)


class SlowBlock(zoo.ResidualBlock):
    def forward(self, h: Tensor) -> Tensor:
        time.sleep(0.003)
        return super().forward(h)


class NormedHead(zoo.MLP):
    """Blocks are left out in front of a layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock(zoo.WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(zoo.WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        h = self.stem(x)
        for block, wanted in zip(self.blocks, keep[0], strict=True):
            if wanted:
                h = block(h)
        return self.head(self.norm(h))


def test_statistics_come_in_order_where_rounds_run_side_by_side() -> None:
    """The last microbatch leaves out the layers that hold up the one before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = zoo.Voting(NormedHead())
    everything = [[0, 1, 2, 3]] * 3
    batches = _batches(everything, [[0, 1, 2, 3], [0], []], everything)
    layers = ["Linear", "BatchNorm1d", "SlowBlock"]
    options = {"num_microbatches": 3, "layers": layers, "plan": harness.single(7, 1), "loss_weight": lambda _: 2.0}
    one, other = (run(ours(**options), module, batches, devices=devices) for devices in (1, 3))
    assert_identical(one, other)


def test_statistics_of_a_layer_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in different stages would come in another order: then there is no plan, or the plan given is refused."""
    texts: list[str] = []
    monkeypatch.setattr(lightning_roundpipe.strategy, "rank_zero_info", texts.append)
    monkeypatch.setattr(planner, "partition_within", lambda costs, *_, **__: Plan.per_call(len(costs.calls), 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = zoo.PlainClassifier(NormedTwice())
    batches = zoo.make_batches("batch_norm")
    expected = by_hand(module, batches, 3)
    layers = ["Linear", "BatchNorm1d", "SlowBlock"]
    for plan in (None, harness.single(5)):
        assert_same(expected, run(ours(num_microbatches=3, layers=layers, plan=plan), module, batches, devices=2))
    assert sum("microbatches run one after another" in text for text in texts) == 1
    with pytest.raises(ValueError, match=r"buffer 'running_mean' of BatchNorm1d in layer 'model.norm' is changed by"):
        run(ours(num_microbatches=3, layers=layers, plan=harness.per_call(5, 3)), module, batches, devices=2)
