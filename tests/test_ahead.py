"""Recomputation ahead: a stage is recomputed as a whole, before a backward of it waits for its gradient.

test_stress, whose plans draw it too, shows that numbers stay what they are.
"""

from dataclasses import replace

import pytest
import torch
from harness import Learner, assert_same, ours, run, seeded
from test_overlap import BATCHES, Gate, Gated, Layer
from torch import nn

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import WorkerNeeds, device_bytes
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan

PLAN = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 2")
AHEAD = replace(PLAN, recompute_ahead=True)


@pytest.mark.parametrize(
    ("plan", "order"),
    [
        (PLAN, ["recompute 1", "backward 1", "recompute 0", "backward 0"]),
        (AHEAD, ["recompute 0", "recompute 1", "backward 1", "backward 0"]),
    ],
)
def test_a_whole_stage_is_recomputed_first_where_the_plan_says_so(plan, order):
    strategy = ours(num_microbatches=2, layers=["Layer"], plan=str(plan), watchdog_timeout=60)
    events = run(strategy, Gated(Gate(-1)), BATCHES, devices=2, watch=False).report["events"]
    ran = [e for e in events if e["microbatch"] == 0 and e["call"] in (0, 1) and e["kind"] in ("recompute", "backward")]
    ran = sorted(ran, key=lambda event: event["start_s"])
    assert [f"{event['kind']} {event['call']}" for event in ran] == order


RAN = set()


class Refusing(Layer):
    """Cannot be run twice."""

    def forward(self, x, which):
        key = tuple(which.tolist())
        if key[0] == 2 and key in RAN:
            raise ZeroDivisionError("planted")
        RAN.add(key)
        return super().forward(x, which)


def test_what_fails_ahead_is_raised_where_it_is_needed():
    module = Gated(Gate(-1))
    RAN.clear()
    module.layers[2] = Refusing()
    strategy = ours(num_microbatches=2, layers=["Layer", "Refusing"], plan=str(AHEAD), watchdog_timeout=60)
    with pytest.raises(ZeroDivisionError, match="planted") as error:
        run(strategy, module, BATCHES, devices=2, watch=False)
    assert any("recomputation" in note and "layers.2" in note for note in error.value.__notes__)


def test_the_plan_says_so_where_there_is_room():
    costs = Costs(tuple(CallCost(str(i), 1.0, 2.0, 100, 50, 1, 1000, needs_backward=True) for i in range(4)))
    arena = 2 * 100 + 2 * 50
    alone, stage = arena + 1000, arena + 2000
    assert device_bytes(PLAN, costs, 2) == alone
    assert device_bytes(AHEAD, costs, 2) == stage
    assert all(Problem.usual(costs, 2, 2, memory).ahead(PLAN) == AHEAD for memory in (None, stage))
    assert Problem.usual(costs, 2, 2, stage - 1).ahead(PLAN) == PLAN
    assert sum(item.nbytes for item in WorkerNeeds(AHEAD, costs, 2).items(stage)) == stage
    assert Problem.usual(costs, 2, 2).ahead(Plan.single(4)) == Plan.single(4)


class Between(Learner, optimizer=torch.optim.AdamW, lr=0.02):
    """What user code does to the second layer's output differs from batch to batch."""

    def __init__(self):
        super().__init__()
        with seeded(5):
            self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(5))

    def training_step(self, batch, batch_idx):
        x = self.blocks[1](self.blocks[0](batch))
        if batch_idx == 2:
            x = x.view_as(x)
        elif batch_idx == 3:
            with torch.no_grad():
                x.add_(2)
        elif batch_idx == 8:
            x.data.add_(2)
        elif batch_idx == 4:
            x = self.blocks[1](x)
        elif batch_idx == 5:
            x = x.detach()
        if batch_idx != 6:
            x = self.blocks[2](x)
        x = self.blocks[4](self.blocks[3](x) + (x if batch_idx == 7 else 0))
        return x.square().mean()


@pytest.mark.parametrize("devices", [1, 3])
def test_only_what_goes_on_as_it_is_is_made_again(devices):
    generator, module = torch.Generator().manual_seed(1), Between()
    data = [torch.randn(4, 6, generator=generator) for _ in range(9)]
    text = "forward 0-1 2-3; fused 4; backward 0-3; round 1; recompute ahead"
    strategy = ours(layers=["Sequential"], plan=text, emulation={"poison": True, "delay_seed": 3})
    assert_same(run("auto", module, data), run(strategy, module, data, devices=devices))
