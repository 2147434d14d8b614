"""Microbatches that leave layers out, and layers whose statistics depend on the order of calls."""

import time

import harness
import pytest
import zoo
from harness import assert_same, by_hand, ours, run, seeded
from torch import nn

from lightning_roundpipe.engine import planner
from lightning_roundpipe.planning.schedule import Plan


class NormedTwice(nn.Module):
    """One norm for two places: its running statistics depend on the order of all calls of all microbatches."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.norm = nn.BatchNorm1d(zoo.WIDTH)
        self.block = SlowBlock(zoo.WIDTH)
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x):
        h = self.norm(self.stem(x.flatten(0, 1)))
        h = self.norm(self.block(h))
        return self.head(h).view(*x.shape[:2], -1).mean(1)


class SlowBlock(zoo.ResidualBlock):
    def forward(self, h):
        time.sleep(0.003)
        return super().forward(h)


def test_statistics_of_a_layer_that_is_used_twice(said, monkeypatch):
    """Calls in different stages would come in another order: then there is no plan, or the plan given is refused."""
    monkeypatch.setattr(planner, "partition_within", lambda problem, *_: Plan.per_call(len(problem.costs), 3))
    with seeded(7):
        module = zoo.PlainClassifier(NormedTwice())
    batches = zoo.make_batches("batch_norm")
    expected = by_hand(module, batches, 3)
    layers = ["Linear", "BatchNorm1d", "SlowBlock"]
    for plan in (None, harness.single(5)):
        assert_same(expected, run(ours(num_microbatches=3, layers=layers, plan=plan), module, batches, devices=2))
    assert sum("microbatches run one after another" in text for text in said) == 1
    with pytest.raises(ValueError, match=r"buffer 'running_mean' of BatchNorm1d in layer 'model.norm' is changed by"):
        run(ours(num_microbatches=3, layers=layers, plan=harness.per_call(5, 3)), module, batches, devices=2)
