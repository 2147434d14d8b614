"""A worker's arena, whatever its size: the same bits, less memory, and no place is used twice."""

import pytest
import torch
from harness import Learner, arenas_of, assert_identical, assert_same, ours, run
from test_overlap import BATCHES, Gate, Gated
from torch import nn

from lightning_roundpipe.planning.schedule import Plan

PLAN = Plan.parse("forward 0 1 2; fused 3; backward 2 1 0; round 2")
SHARES = (1.0, 0.6, 0.3, 0.0)


def fit(share=1.0, devices=2, plan=str(PLAN), **options):
    strategy = ours(num_microbatches=2, layers=["Layer"], plan=plan, watchdog_timeout=60, **options)
    with arenas_of(share):
        return run(strategy, Gated(Gate(-1)), BATCHES, devices=devices, watch=False)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 3])
def test_the_size_changes_no_bit(devices, staleness):
    results = [fit(share, devices, staleness=staleness) for share in SHARES]
    for result in results[1:]:
        assert_identical(results[0], result)


def test_a_smaller_arena_saves_what_it_is_smaller_by():
    counted = []
    for share in SHARES:
        report = fit(share).report
        assert report is not None
        counted.append(max(report["peak_device_bytes"]))
        assert counted[-1] <= report["planned_device_bytes"]
    assert counted == sorted(counted, reverse=True) and len(set(counted)) == len(counted)


class Blocks(Learner):
    """Equal layers, one of whose biases is frozen at first."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))
        self.layers[0].bias.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_first_batch_fits_where_the_plan_does(by_hand):
    """Before there is a plan, the arena for a layer leaves room for what it computes with."""
    plan = "forward 0 1 2; fused 3; backward 2 1 0; round 2"
    batches = list(torch.randn(2, 100, 128, generator=torch.Generator().manual_seed(0)))

    def train(memory, plan):
        strategy = ours(num_microbatches=2, layers=["Linear"], plan=plan, emulation={"memory": memory})
        torch.manual_seed(0)
        return run(strategy, Blocks(4), batches, watch=False)

    with arenas_of(0.0):
        free = train(None, plan)
    needed = free.report["planned_device_bytes"]
    tight = train(int(needed / 0.9) + 4096, plan if by_hand else None)
    assert tight.report is not None and max(tight.report["peak_device_bytes"]) <= needed + 4096
    assert_same(free, tight)
