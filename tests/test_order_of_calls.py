"""Microbatches that leave layers out, and layers whose statistics depend on the order of calls."""

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
    for devices, plan in ((4, None), (2, harness.halves(n, 2))):
        assert_identical(
            reference, run(ours(num_microbatches=4, plan=plan), module, batches, devices=devices), rng=True
        )


def _forwards(result: harness.Result) -> int:
    assert result.report is not None
    return sum(event["kind"] == "forward" for event in result.report["events"])


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
