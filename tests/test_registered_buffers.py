"""Buffers that layers register, replace or delete in their forward come home, and are found there by all microbatches.

Parameters and modules that a forward registers are refused: nothing else has them.
"""

import pytest
import torch
import zoo
from harness import Learner, assert_same, halves, ours, run
from torch import nn
from traps import Block, Net

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.hints import Hints


class Registering(Block):
    def forward(self, x):
        y = self.change(self, x)
        return super().forward(y)

    change = staticmethod(lambda self, x: x)


def lazily(self, x):
    """As rotary caches do."""
    if self.inner._buffers.get("seen") is None:
        self.inner.register_buffer("seen", torch.linspace(1, 2, x.shape[-1]), persistent=False)
    return x * self.inner.seen


def deleting(self, x):
    if hasattr(self, "table"):
        del self.table
    return x


def train(change, strategy, wrap=zoo.PlainClassifier):
    torch.manual_seed(5)
    net = Net(Registering)
    block = net.blocks[1]
    block.change = change
    block.register_buffer("table", torch.ones(2))
    devices = 1 if strategy == "auto" else 2
    # A buffer that is new by the next batch has the strategy set up again, and the optimizer's thread with it.
    result = run(strategy, wrap(net), zoo.make_batches("mlp", 4), devices=devices, blocking=True)
    return result, {name for name, _ in result.module.named_buffers()}


@pytest.mark.parametrize("plan", [None, halves(5)])
@pytest.mark.parametrize("change", [lazily, deleting])
def test_it_comes_home(change, plan):
    plain, expected = train(change, "auto")
    mine, names = train(change, ours(num_microbatches=3, plan=plan))
    assert names == expected and mine.state.keys() == plain.state.keys()
    assert_same(mine, plain)


class Late(zoo.PlainClassifier):
    """The layer reads a flag that no comparison of attributes sees."""

    def on_train_batch_start(self, batch, batch_idx):
        FLAG[0] = batch_idx == 2


FLAG = [False]


def a_parameter(self, x):
    if not hasattr(self, "added"):
        self.added = nn.Parameter(torch.ones(3))
    return x


def a_module(self, x):
    if not hasattr(self, "added"):
        self.added = nn.Linear(2, 2)
    return x


def another_parameter(self, x):
    self.inner.weight = nn.Parameter(self.inner.weight.detach() * 1.1)
    return x


def a_parameter_later(self, x):
    return a_parameter(self, x) if FLAG[0] else x


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (a_parameter, "parameter 'added' of its Registering"),
        (a_module, "module 'added' of its Registering"),
        (another_parameter, "parameter 'weight' of its Linear"),
        (a_parameter_later, "parameter 'added' of its Registering"),
    ],
)
def test_parameters_and_modules_are_refused(change, what):
    with pytest.raises(RoundPipeError, match=f"layer 'model.blocks.1' registers, replaces or removes the {what}"):
        train(change, ours(num_microbatches=3), Late)


class Averages(nn.Module):
    """Computes with a running mean of what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        out = self.linear(x - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return out.tanh()


class UsesAverages(Learner):
    """Reads or writes, between layers, a buffer that a layer changes."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(2)
        self.averages, self.linears = Averages(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.use = use
        self.double()

    def training_step(self, batch, batch_idx):
        h = self.averages(batch)
        for linear in self.linears:
            h = linear(h)
        h = self.use(h, self.averages.mean)
        return h.square().mean()


@torch.no_grad()
def writes(h, mean):
    mean.add_(h.mean(0))
    return h


USES = {"reads": lambda h, mean: h * mean, "writes": writes}


@pytest.fixture
def said(monkeypatch):
    """Why microbatches run one after another."""
    texts = []
    monkeypatch.setattr(Hints, "say", lambda self, key, text: texts.append(text) if key == "order" else None)
    return texts


@pytest.mark.parametrize("use", USES)
def test_buffers_that_code_between_layers_uses(use, said):
    """A microbatch found what later ones had left there."""
    batches = list(torch.randn(12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected, trained = (
        run(strategy, UsesAverages(USES[use]), batches, devices=devices, accumulate_grad_batches=4)
        for strategy, devices in (("auto", 1), (ours(), 2))
    )
    assert len(said) == 1 and "code between layers reads or writes it" in said[0]
    for name, value in expected.state.items():
        torch.testing.assert_close(trained.state[name], value)
