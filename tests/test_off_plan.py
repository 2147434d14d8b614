"""Batches that call layers otherwise than the first ones: their microbatches leave the plan and go on one by one."""

import pytest
import torch
import torch.nn.functional as F
from harness import Learner, assert_plain, loader, ours, run, seeded, trainer_of
from patience import PATIENCE_S
from torch import nn

HARD = {"poison": True, "delay_seed": 3}


class Model(nn.Module):
    """Blocks and three heads. It can end early, and change its input."""

    def __init__(self, drop):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(drop)) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x, head=0, depth=4, order=(0, 1, 2, 3)):
        for at in order[:depth]:
            x = self.blocks[at](x)
        return self.heads[head](x)


class Module(Learner, optimizer=torch.optim.AdamW, lr=0.02):
    def __init__(self, step, drop=0.0):
        super().__init__()
        self.step = step
        with seeded(5):
            self.model = Model(drop)

    def training_step(self, batch, batch_idx):
        loss = self.step(self, batch, batch_idx)
        self.log("loss", loss)
        return loss


def data(count=9):
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(3, (8,), generator=generator)}
        for _ in range(count)
    ]


def cross_entropy(logits, batch):
    return F.cross_entropy(logits, batch["y"])


def with_a_second_loss(module, batch, index):
    """A term that begins after some steps, as auxiliary and consistency losses do."""
    loss = cross_entropy(module.model(batch["x"]), batch)
    if module.global_step >= 3:
        loss = loss + 0.5 * cross_entropy(module.model(batch["x"].flip(1), head=1), batch)
    return loss


def with_a_teacher(module, batch, index, behind=-1):
    """A pass without gradients in every third batch, in front of one with gradients, and in others ``behind`` it."""
    known = torch.zeros(8, 3)[: len(batch["x"])]
    if index % 3 == 1:
        with torch.no_grad():
            known = module.model(batch["x"]).softmax(1)
    logits = module.model(batch["x"])
    if index % 3 == behind:
        with torch.no_grad():
            known = module.model(batch["x"] + 1).softmax(1)
    return cross_entropy(logits, batch) + 0.1 * (logits - known.to(logits)).square().mean()


STEPS = {
    "a head for each batch": lambda m, b, i: cross_entropy(m.model(b["x"], head=i % 3), b),
    "a model that grows": lambda m, b, i: cross_entropy(m.model(b["x"], depth=min(4, 1 + m.global_step // 2)), b),
    "a second loss": with_a_second_loss,
    "a teacher here and there": lambda m, b, i: with_a_teacher(m, b, i, behind=2),
    "an order for each batch": lambda m, b, i: cross_entropy(
        m.model(b["x"], order=[(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 1, 0)][i % 3]), b
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_other_calls_give_what_plain_training_gives(name):
    assert_plain(Module(STEPS[name]), data(), {"num_microbatches": 4, "emulation": HARD}, devices=3)


def test_the_next_batches_are_learned_until_a_plan_has_the_calls():
    result = run(ours(num_microbatches=4), Module(with_a_second_loss), data(), devices=2)
    assert not result.report["profiled"]
    assert all(slot["round"] >= 0 for slot in result.report["slots"]), "the plan has them"


def test_a_given_plan_is_kept():
    module, plan = Module(STEPS["a head for each batch"]), "forward 0-1; fused 2-4; backward 0-1; round 2"
    _, result = assert_plain(module, data(4), {"num_microbatches": 4, "plan": plan})
    assert result.report["plan"].startswith("forward 0-1; fused 2-4")


class Counting(nn.Sequential):
    """Sets an attribute, which the next microbatch finds."""

    count = 0

    def forward(self, x):
        self.count = self.count + 1
        return super().forward(x)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_microbatch_leaves_the_first_layers_out(devices, counts):
    """Those behind it come to these layers first, on the worker that it waits for."""

    def step(module, batch, index):
        leaves_out = index >= 8 and index % 4 == 0
        return cross_entropy(module.model(batch["x"], order=(2, 3) if leaves_out else (0, 1, 2, 3)), batch)

    module, plan = Module(step), "forward 0 1 2 3; fused 4; backward 3 2 1 0; round 4"
    if counts:
        module.model.blocks = nn.ModuleList(Counting(*block) for block in module.model.blocks)
    layers = [f"model.blocks.{i}" for i in range(4)] + ["model.heads.0"]
    strategy = {"plan": plan, "layers": layers, "watchdog_timeout": PATIENCE_S}
    _, result = assert_plain(module, data(16), strategy, devices=devices, accumulate_grad_batches=4)
    assert result.report["plan"] == plan


class Evaluated(Module):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.step(self, batch, batch_idx))


def test_the_first_batch_of_an_evaluation_leaves_the_first_layers_out():
    module = Evaluated(
        lambda m, b, i: cross_entropy(m.model(b["x"], order=(3,) if i in (4, 8, 12) else (0, 1, 2, 3)), b)
    )
    ways = ("auto", 1), (ours(evaluation_batches=4, watchdog_timeout=PATIENCE_S), 2)
    plain, found = (
        trainer_of(strategy, devices=devices).validate(module, loader(data(16)), verbose=False)
        for strategy, devices in ways
    )
    assert found == [pytest.approx(each) for each in plain]
