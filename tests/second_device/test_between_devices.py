"""The smallest modules of which something crosses from device to device, or from the host, between layers."""

import harness
import pytest
import torch
import zoo
from harness import assert_same, ours, run
from torch import nn

WIDTH = 16


class Layers(nn.Module):
    """Three layers, and a function that says what stands between them."""

    def __init__(self, between):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, WIDTH), Scaled(), nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.between = between

    def forward(self, x):
        return self.three(self.between(self, x))


class Scaled(nn.Module):
    """A layer with several inputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, scale=None, skip=None):
        out = self.inner(h) if scale is None else self.inner(h) * scale
        return out if skip is None else out + skip


BETWEEN = {
    "a residual": lambda m, x: m.two(h := m.one(x)) + h,
    "two inputs of one layer": lambda m, x: m.two(h := m.one(x), skip=h * 2),
    "a parameter of the host in user code": lambda m, x: m.two(m.one(x) * m.scale),
    "a parameter of the host": lambda m, x: m.two(m.one(x), m.scale),
    "a computed tensor of the host behind a function": lambda m, x: m.two(m.one(x).relu(), m.scale.exp()),
    "a tensor of the host twice": lambda m, x: m.two(m.two(m.one(x), s := m.scale.exp()), s),
    "tensors of two devices": lambda m, x: m.two(m.two(h := m.one(x)).relu(), skip=h.tanh()),
    "a tensor of the device, and one that follows it": lambda m, x: m.two(m.one(x), skip=m.scale.expand(len(x), -1)),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_between(what, devices):
    torch.manual_seed(0)
    module = zoo.PlainClassifier(Layers(BETWEEN[what]))
    batches = zoo.make_batches("mlp", 3)
    expected = run("auto", module, batches)
    result = run(ours(num_microbatches=2, layers=["Linear", "Scaled"]), module, batches, devices=2)
    assert_same(expected, result)
    assert harness.roundpipe_threads() == []


class Seeds(zoo.PlainClassifier):
    """Seeds torch's generators in every step, as for noise that is always the same."""

    def loss_and_logits(self, batch):
        torch.manual_seed(7)
        with torch.random.fork_rng():
            weights = torch.rand(5)
        logits = self.model(batch["x"])
        return nn.functional.cross_entropy(logits * weights.to(logits.device), batch["y"]), logits


def test_seeds_of_user_code_do_not_reach_other_devices(devices):
    """There a layer may be drawing its mask: torch seeds, and restores, the generators of all devices."""
    module, data = Seeds(zoo.make_module("mlp").model), zoo.make_batches("mlp", 4, samples=8)
    module.model.blocks = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.5)) for layer in module.model.blocks)
    results = [
        run(ours(num_microbatches=4, layers=["Linear", "Sequential"]), module, data, devices=count) for count in (1, 2)
    ]
    assert devices
    harness.assert_identical(*results)
