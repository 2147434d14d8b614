"""A layer's copy on a worker: new where it must be, the user's own objects everywhere else; and its attributes."""

import copy
import functools
import gc
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, ours, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe.model.replica import Replica, unique_parameters

CPU = torch.device("cpu")


def scaled(module, x, factor=1.0):
    return module(x) * factor


class Odd(nn.Module):
    """Holds its own parts in all the ways that modules do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.config = {"shared": object(), "list": [1, 2]}
        self.tokenizer = object()
        self.method = self.helper
        self.step = functools.partial(scaled, self.inner, factor=3.0)
        self.keyword = functools.partial(scaled, module=self.inner)
        self.parts = [self.inner, "text", (self.other,)]
        self.kinds = {self.inner}
        self.table = {"a": self.inner, "b": [self.other]}
        self.weights = [self.inner.weight]

    def helper(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.method(x) + self.step(x)


@pytest.fixture
def layer():
    return Odd()


def reached_from_outside(copy, value):
    """Whether something of the original can be reached from ``value``."""
    originals = {id(m) for m in copy.originals} | {id(p) for m in copy.originals for p in m._parameters.values()}
    if isinstance(value, dict):
        return any(reached_from_outside(copy, v) for v in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(reached_from_outside(copy, v) for v in value)
    if isinstance(value, functools.partial):
        return reached_from_outside(copy, [value.func, *value.args, *value.keywords.values()])
    return id(getattr(value, "__self__", value)) in originals


# ------------------------------------------------------------------------------------------------------------- the copy


def test_what_refers_to_the_layer_refers_to_the_copy(layer):
    """Otherwise the worker would compute with the masters, on the host, and their gradients would be lost."""
    copy = Replica(layer, CPU)
    inside = copy.module
    assert type(inside) is Odd and inside is not layer and inside.inner is not layer.inner
    assert inside.method.__self__ is inside and inside.method.__func__ is Odd.helper
    assert inside.step.args == (inside.inner,) and inside.step.keywords == {"factor": 3.0}
    assert inside.keyword.keywords == {"module": inside.inner}
    assert inside.parts == [inside.inner, "text", (inside.other,)]
    assert inside.kinds == {inside.inner} and inside.table == {"a": inside.inner, "b": [inside.other]}
    assert inside.weights[0] is copy.parameters[0]
    for name, value in inside.__dict__.items():
        assert name == "_buffers" or not reached_from_outside(copy, value), name


@pytest.mark.parametrize("rounded", [(), (0, 1, 2, 3)])
def test_unbinding_gives_memory_back_at_once(layer, rounded):
    """This copy holds a method of its own, so it would hold its memory until Python looks for such circles."""
    gc.disable()
    try:
        copied = Replica(layer, CPU, rounded=rounded)
        kept = torch.bfloat16 if rounded else torch.float32
        views = [torch.ones_like(p, dtype=kept) for p in layer.parameters()]
        memory = [StorageWeakRef(view.untyped_storage()) for view in views]
        whole = [torch.ones_like(p) for p in layer.parameters()]
        copied.bind(views, [True] * len(views), whole.__getitem__)
        copied.module(torch.ones(1, 2)).sum().backward()
        del views
        memory += [StorageWeakRef(p.grad.untyped_storage()) for p in copied.parameters if p.grad is not None]
        assert len(memory) > len(whole)
        assert not any(reference.expired() for reference in memory)
        copied.unbind()
        del copied
        assert all(reference.expired() for reference in memory)
    finally:
        gc.enable()


def test_a_tied_parameter_is_one_in_the_copy():
    """Two would each get half of the gradient."""
    layer = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    layer[1].weight = layer[0].weight
    assert len(unique_parameters(layer)) == 1
    copy = Replica(layer, CPU)
    assert copy.module[0].weight is copy.module[1].weight is copy.parameters[0]


# ------------------------------------------------------------------------------------------------------ as in training


class Branches(NamedTuple):
    first: nn.Module
    second: nn.Module


class Holding(nn.Module):
    """A block that reaches its own parts in a way that a copy has to follow."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.other = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.paths = {
            "bound method": (self.twice,),
            "partial": (functools.partial(scaled, self.inner, factor=0.5),),
            "named tuple": Branches(self.inner, self.other),
            "lambda": (lambda x: self.twice(x),),
            "inner hook": (self.inner,),
        }[kind]
        if kind == "inner hook":
            self.inner.register_forward_hook(lambda _, args, output: output * torch.tanh(self.other.weight).sum(0))

    def __deepcopy__(self, memo):
        copy = Holding(self.kind)  # a lambda's deep copy would refer to this module still
        copy.load_state_dict(self.state_dict())
        return copy

    def twice(self, x):
        return torch.tanh(self.inner(x)) + self.other(x)

    def forward(self, x):
        for path in self.paths:
            x = x + torch.tanh(path(x))
        return x


class HoldingNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.block = Holding(kind)
        self.head = nn.Linear(zoo.WIDTH, 5)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


def assert_as_plain(model, callback=pl.Callback, window=1):
    batches = zoo.make_batches("mlp")
    module = zoo.PlainClassifier(model)
    options = {"callbacks": [callback()], "accumulate_grad_batches": window}
    layers = [
        kind
        for kind in ("Holding", "ResidualBlock", "Linear")
        if any(type(m).__name__ == kind for m in model.modules())
    ]
    plain = run("auto", module, batches, **options)
    assert_same(plain, run(ours(layers=layers), module, batches, devices=2, **options))


@pytest.mark.parametrize("kind", ["bound method", "partial", "named tuple", "lambda", "inner hook"])
def test_however_a_layer_holds_its_parts(kind):
    assert_as_plain(HoldingNet(kind), window=2)


class NewModule(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        block = pl_module.model.blocks[1]
        block.up = copy.deepcopy(block.up)
        with torch.no_grad():
            block.up.weight.mul_(2)


def test_a_layer_that_was_changed_in_training():
    """The workers would go on computing with what is no longer there."""
    assert_as_plain(zoo.MLP(), NewModule)
