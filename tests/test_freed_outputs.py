"""A layer's backward keeps no output of the recomputation, whatever the layer returns, and gradients are the same."""

import weakref

import harness
import pytest
import torch
import zoo
from harness import Chain, ours, run
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCKS = 3
PLAN = harness.per_call(BLOCKS, 2)
WIDTH = zoo.WIDTH
THERE = []
"""For each backward, the block's number and whether what it has returned was still there."""


class Note:
    """What a call has returned, by weak references."""

    def __init__(self, number):
        self.number = number
        self.storages = []

    def returns(self, *outputs):
        self.storages = [weakref.ref(output.untyped_storage()) for output in outputs]


class Look(torch.autograd.Function):
    """Looks for the outputs of its layer when the backward has come to its first operation."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        THERE.append((ctx.note.number, any(storage() is not None for storage in ctx.note.storages)))
        return grad, None


class Noted(nn.Module):
    """``returns``: what it returns for ``h``, and the tensors whose memory is to be freed."""

    def __init__(self, number, kind):
        super().__init__()
        self.number, self.kind = number, kind
        self.inner = nn.Linear(WIDTH, WIDTH)
        if kind == "hooked":
            self.register_forward_hook(lambda module, args, output: None)

    def forward(self, x):
        if self.kind == "dict":
            x = x if isinstance(x, Tensor) else x["h"] + x["twice"]
        note = Note(self.number)
        h = Look.apply(x, note)
        h = h + self.inner(torch.tanh(h))  # which saves nothing of its result
        if self.kind != "dict" or self.number == BLOCKS - 1:
            note.returns(h)
            return h
        twice = 2 * h
        note.returns(h, twice)
        return {"h": h, "twice": twice, "number": self.number}


@pytest.mark.parametrize("kind", ["plain", "hooked", "dict"])
def test_outputs_are_freed_before_the_backward(kind):
    THERE.clear()
    module = Chain(Noted(number, kind) for number in range(BLOCKS))
    run(ours(num_microbatches=2, plan=PLAN, layers=["Noted"]), module, torch.randn(8, WIDTH))
    recomputed = [there for number, there in THERE if 0 < number < BLOCKS - 1]  # the first one's input has no gradient
    assert len(recomputed) == 3 * 2 * (BLOCKS - 2)
    assert not any(recomputed)
