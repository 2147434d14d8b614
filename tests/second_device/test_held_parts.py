"""However a layer holds its own parts, a worker computes with its copy's.

With masters the numbers are the same, but each use brings them from the host, as another module's parameters.
"""

import functools
from typing import NamedTuple

import pytest
import torch
import zoo
from harness import assert_same, ours, run
from torch import nn

SEEN = set()
"""The ids of the weights that are computed with."""


class Noted(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight)


def linear(x, weight):
    SEEN.add(id(weight))
    return nn.functional.linear(x, weight)


def scaled(module, x, factor=1.0):
    return module(x) * factor


def through(x, module):
    return module(x)


class Branches(NamedTuple):
    first: nn.Module
    second: nn.Module


KINDS = {
    "bound method": lambda m: (m.twice,),
    "partial": lambda m: (functools.partial(scaled, m.inner, factor=0.5),),
    "keyword of a partial": lambda m: (functools.partial(through, module=m.inner),),
    "named tuple": lambda m: Branches(m.inner, m.other),
    "set": lambda m: {m.inner},
    "lists": lambda m: [m.inner, [m.other]],
    "dict": lambda m: {"a": m.inner, "b": [m.other]},
    "weights": lambda m: (functools.partial(linear, weight=m.other.weight),),
    "lambda": lambda m: (lambda x: m.twice(x),),
    "inner hook": lambda m: (m.inner,),
}


class Holding(nn.Module):
    """A block that reaches its own parts in a way that a copy has to follow."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner, self.other = Noted(zoo.WIDTH, zoo.WIDTH), Noted(zoo.WIDTH, zoo.WIDTH)
        self.paths = KINDS[kind](self)
        if kind == "inner hook":
            self.inner.register_forward_hook(lambda _, args, output: output + self.other(output))

    def __deepcopy__(self, memo):
        copy = Holding(self.kind)  # a lambda's deep copy would refer to this module still
        copy.load_state_dict(self.state_dict())
        return copy

    def twice(self, x):
        return torch.tanh(self.inner(x)) + self.other(x)

    def forward(self, x):
        return self.along(x, self.paths)

    def along(self, x, paths):
        for path in paths.values() if isinstance(paths, dict) else paths:
            x = self.along(x, path) if isinstance(path, list) else x + torch.tanh(path(x))
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_reaches_the_parts_of_its_copy(kind, devices):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, zoo.WIDTH), Holding(kind), nn.Linear(zoo.WIDTH, 5))
    module, batches = zoo.PlainClassifier(model), zoo.make_batches("mlp")
    plain = run("auto", module, batches, accumulate_grad_batches=2)
    SEEN.clear()
    strategy = ours(layers=["Holding", "Linear"])
    result = run(strategy, module, batches, devices=2, accumulate_grad_batches=2)
    assert_same(plain, result)
    assert devices and SEEN and SEEN.isdisjoint(map(id, result.module.parameters()))
