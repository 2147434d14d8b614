"""Copies between layers and user code have the memory layout of what they copy: kernels round by it."""

from typing import cast

import harness
import pytest
import torch
from harness import Learner, ours, run
from torch import nn

WIDTH, LAYERS = 16, 3


class Slicing(nn.Module):
    """Returns columns of its input, too: a view with gaps."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.inner(x)), x[:, :3]


class Sliced(Learner, lr=0.001):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Slicing() for _ in range(LAYERS))
        self.strides = []

    def training_step(self, batch, batch_idx):
        x, total = batch["x"], torch.zeros(())
        for layer in self.layers:
            x, columns = layer(x)
            self.strides.append(columns.stride())
            total = total + columns.sum()
        return (x.sin().sum() + total).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_view_of_an_input_keeps_its_gaps(devices):
    """User code was given a clone without them if it came from another device, whose sum differed in the last bit."""
    batches = [{"x": torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(n))} for n in range(8)]

    def train(strategy, **options):
        torch.manual_seed(3)
        result = run(strategy, Sliced(), batches, accumulate_grad_batches=4, **options)
        return result, cast(Sliced, result.module)

    plain, expected = train("auto")
    result, module = train(ours(plan=harness.per_call(LAYERS, 4)), devices=devices)
    assert (WIDTH, 1) in expected.strides
    assert sorted(module.strides) == sorted(expected.strides)
    harness.assert_identical(plain, result)
