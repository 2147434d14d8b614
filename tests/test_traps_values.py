"""Traps in what goes into a layer and comes out of it: written in place, changed, hidden in objects, or not there."""

import dataclasses
import itertools
from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput
from traps import WIDTH, Block, Traps

trap = Traps()


class Registry(dict[str, Any]):
    pass


class Box:
    def __init__(self, value=None):
        self.value = value


@dataclasses.dataclass
class Data:
    value: Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    value: Tensor


class Named(NamedTuple):
    value: Tensor


# ------------------------------------------------------------------------------------------------------------- in place


@trap("user code writes to an input after the call")
def _(net, h):
    h = h * 1.0
    first = net.blocks[0](h)
    h.mul_(0.5)
    second = net.blocks[1](h)
    h[:, :3] = 0
    return net.blocks[2](h) + first + second


@trap("user code writes to an output that a layer has taken")
def _(net, h):
    y = net.blocks[0](h)
    z = net.blocks[1](y)
    y.add_(1)
    return net.blocks[2](z + y)


@trap("outputs in the hands of torch.func, operators by name, TorchScript and DLPack")
def _(net, h):
    y = net.blocks[0](h)
    z = net.blocks[1](y)
    found = torch.func.vmap(lambda row: (row * row).mean())(y)[:, None] + torch.ops.aten.mean.dim(y, [1], True)
    return net.blocks[2](z) + found + scripted_mean(y) + torch.from_dlpack(y.detach()).mean(1, keepdim=True)


@torch.jit.script
def scripted_mean(h: Tensor) -> Tensor:
    return h.sin().mean(1, keepdim=True)


def writes_to_its_input(self, x):
    x[:, :4].mul_(0.7)
    return self.other(torch.tanh(x))


@trap("a layer writes to its input", forward=writes_to_its_input)
def _(net, h):
    for block in net.blocks:
        branch = block(h.view(-1, WIDTH))
        h = branch + h
    return h


@trap("a layer returns its input, which user code writes to", forward=lambda self, x: x, calls=4)
def _(net, h):
    g = h * 1.0
    y = net.blocks[0](g)
    y.add_(1)
    assert y is g
    return net.blocks[1](net.head.weight.sum() + g * 1)


SHARED = "returned tensors that share memory .* wrote to one of them in place.*clone what the layer returns"


def and_a_view_of_it(self, x):
    y = Block.forward(self, x)
    return y, y[:, :4]


@trap("user code writes to an output that shares memory with another", SHARED, forward=and_a_view_of_it)
def _(net, h):
    whole, part = net.blocks[0](h)
    part.mul_(3)
    return whole * 1


# ------------------------------------------------------------------------------------------------------------ arguments


def with_a_second(self, x, second):
    return Block.forward(self, x) + read(second)


def read(value):
    if callable(value):
        return value()
    if isinstance(value, (dict, UserDict)):
        return value["value"]
    return value[0] if isinstance(value, list) else value.value


@trap("containers and objects that hold tensors", forward=with_a_second, calls=16)
def _(net, h):
    kinds = [Registry, UserDict, dict, Named, Data, Box, SimpleNamespace]
    for kind in kinds:
        h = 0.3 * torch.tanh(net.blocks[0](h, kind(value=h * 2)) + net.blocks[1](h, [h.tanh()]))
    return h


def a_distribution(self, x):
    mean = Block.forward(self, x.mean if isinstance(x, Normal) else x)
    return Normal(mean, torch.nn.functional.softplus(mean))


@trap("a layer takes and returns a distribution of torch", forward=a_distribution)
def _(net, h):
    first = net.blocks[0](h)
    last = net.blocks[2](net.blocks[1](first))
    return last.mean + last.variance + 0.1 * torch.distributions.kl_divergence(last, first)


@trap("a tensor hidden in a closure", "uses a tensor that it was not given as an argument", forward=with_a_second)
def _(net, h):
    twice = net.blocks[0](h, Box(h)) * 2
    return net.blocks[1](h, lambda: twice)


def appends(self, x, kept):
    y = Block.forward(self, x)
    if isinstance(kept, list):
        kept.append(y.tanh())
        kept[0] = x
    elif isinstance(kept, dict):
        kept["value"] = y * 2
    else:
        kept.value = y * 2
    return y


@trap("lists and dicts that a layer fills", forward=appends, calls=8)
def _(net, h):
    kept = [None]
    total = h
    for block, registry in zip(net.blocks, [Registry(), {"value": 1}, Box(h)], strict=True):
        first = block(h, kept)
        assert kept[0] is h
        h = first + block(h, registry)
        total = total + read(registry)
    return total + sum(kept)


@trap(
    "a key-value cache",
    forward=lambda self, x, past: Block.forward(self, past.update(x[None, None], x[None, None], 0)[0][0, 0]),
    calls=3,
)
def _(net, h):
    return net.blocks[0](h, DynamicCache())


@trap("keywords, numbers, one tensor twice, views", forward=lambda self, a, n, *, b: Block.forward(self, a) * n + b)
def _(net, h):
    wide = torch.cat([h, h * 2], 1)
    h = net.blocks[0](h, 0.5, b=h)
    h = net.blocks[1](wide[:, :WIDTH], n=2, b=wide[:, WIDTH:])
    return net.blocks[2](a=h, n=1, b=h[:, :1].expand(-1, WIDTH))


# -------------------------------------------------------------------------------------------------------------- returns


def returns_of_every_kind(self, x):
    y = Block.forward(self, x)
    return {
        "input": x,
        "view": x[:, :4],
        "pair": [(y, y), None],
        "overlapping": (y.view(-1), "text", 3),
        "weight": self.inner.weight,
        "whole numbers": torch.arange(3),
        "objects": [Box(x * 2), Data(y * 2), UserDict(value=y.sin()), Registry(value=y.cos())],
        "output": BaseModelOutput(last_hidden_state=y.tanh(), hidden_states=(x, x * 2)),
    }


@trap("values of every kind are returned", forward=returns_of_every_kind)
def _(net, h):
    for block in net.blocks:
        out = block(h)
        assert out["input"] is h and out["pair"][1] is None and out["overlapping"][1:] == ("text", 3)
        assert [type(value) for value in out["objects"]] == [Box, Data, UserDict, Registry]
        h = out["input"] + out["view"].mean(1, keepdim=True) + out["pair"][0][0] * out["pair"][0][1]
        h = h + out["overlapping"][0].view_as(h) @ out["weight"] + out["whole numbers"].sum()
        h = torch.tanh(h + sum(map(read, out["objects"])) + out["output"][0] + out["output"].hidden_states[1])
    return h


ODD = {"shape": lambda y: y[:1], "dtype": Tensor.double, "number": lambda y: (y, y * 2)}
for kind, odd in ODD.items():

    def alternates(self, x, odd=odd, calls=itertools.count()):  # noqa: B008
        y = Block.forward(self, x)
        return odd(y) if next(calls) % 2 else y

    trap(
        f"a recomputation returns another {kind}",
        r"layer 'model\.blocks\.0' returned .* when it was recomputed",
        forward=alternates,
    )(lambda net, h: net.blocks[0](h))


@pytest.mark.parametrize("kind", ["function", "generator", "Slots"])
def test_what_cannot_be_looked_into(kind):
    def forward(self, x):
        y = Block.forward(self, x)
        return {"function": lambda: y, "generator": (y for _ in range(1)), "Slots": Slots(y)}[kind]

    traps = Traps()
    traps(kind, f"returns a {kind}, in which tensors would pass", forward=forward)(lambda net, h: net.blocks[0](h))
    traps.check_refused(kind)


@pytest.mark.parametrize("name", trap.equal)
def test_equals_plain(name):
    trap.check_equal(name)


@pytest.mark.parametrize("name", trap.refused)
def test_refused(name):
    trap.check_refused(name)
