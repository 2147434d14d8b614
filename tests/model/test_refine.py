"""Layers that are too large are cut into what is in them."""

import torch
from torch import nn

from lightning_roundpipe.model.refine import Size, cut_to_fit


def size_of(module):
    numbers = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return Size(sum(n for n, _ in numbers), sum(n for n, trained in numbers if trained))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5, 5))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 4, bias=False), Experts()


class Block(nn.Module):
    def __init__(self, inner=None, own=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(own))
        self.act = nn.ReLU()
        self.paths = nn.ModuleList([nn.Linear(5, 5, bias=False), inner or nn.Linear(5, 10, bias=False)])

    def forward(self, x):
        return x


def cut(room, *, whole=(), **layers):
    return cut_to_fit(layers, size_of, room, whole)


def test_no_further_than_needed():
    small, large = nn.Linear(5, 5, bias=False), Block()
    refined = cut(2 * 77, a=small, b=large)
    assert (list(refined.layers), refined.cuts, refined.stuck) == (["a", "b"], {}, None)
    refined = cut(2 * 77 - 1, a=small, b=large, c=small)
    assert list(refined.layers) == ["a", "b.paths.0", "b.paths.1", "c"] and refined.stuck is None
    assert refined.cuts == {"b": ["b.paths.0", "b.paths.1"]}


def test_part_by_part():
    """The larger half of a block is cut on, the other one stays."""
    block = Block(nn.Sequential(nn.Linear(5, 10, bias=False), nn.ReLU(), nn.Linear(10, 5, bias=False)))
    refined = cut(2 * 50, **{"m.0": block, "m.1": Block()})
    assert list(refined.layers) == ["m.0.paths.0", "m.0.paths.1.0", "m.0.paths.1.2", "m.1.paths.0", "m.1.paths.1"]
    assert refined.summary() == ["m.* into paths.0, paths.1", "m.*.paths.* into 0, 2"]


def test_experts_in_one_tensor_cannot_be_cut():
    stuck = cut(150, block=Block(Mixture())).stuck
    assert stuck is not None and stuck.name == "block.paths.1.experts"
    assert "'weight' (4 x 5 x 5, all experts in one tensor)" in stuck.why and "adapters" in stuck.remedy
    frozen = cut(90, block=Block(Mixture()).requires_grad_(False)).stuck
    assert frozen is not None and "narrower format" in frozen.remedy
