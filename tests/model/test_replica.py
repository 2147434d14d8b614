"""A layer's copy on a worker. What it computes with is tested where that is not the host: ``second_device``."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe.model.replica import Replica, unique_parameters

CPU = torch.device("cpu")


class Bound(nn.Module):
    """Holds a method of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.method = self.helper

    def helper(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.method(x)


@pytest.mark.parametrize("rounded", [(), (0, 1, 2, 3)])
def test_unbinding_gives_memory_back_at_once(rounded):
    """This copy holds a method of its own, so it would hold its memory until Python looks for such circles."""
    layer = Bound()
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
