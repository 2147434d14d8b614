"""Buffers of a layer that its backward writes to: a worker's copy would be written to, so that is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from harness import ours, run
from torch import Tensor
from traps import Block, Net

from lightning_roundpipe.config import RoundPipeError


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def see(self, grad: Tensor) -> None:
        self.seen.add_(grad.detach().norm())  # type: ignore[operator]


class ByTensorHook(Counting):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.see)
        return y


class Replaces(ByTensorHook):
    def see(self, grad: Tensor) -> None:
        self.seen = grad.detach().norm()


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.buffer.copy_(grad.norm())
        return grad, None


class ByFunction(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return Noting.apply(super().forward(x), self.seen)  # type: ignore[no-any-return, no-untyped-call]


GRID = [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("microbatches", "devices"), GRID)
@pytest.mark.parametrize("block", [ByTensorHook, Replaces, ByFunction])
def test_it_is_refused(block: type[Block], microbatches: int, devices: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = zoo.PlainClassifier(Net(block))
    with pytest.raises(
        RoundPipeError, match=r"buffer 'seen' of .* in layer 'model\.blocks\.\d' was written to in backw"
    ):
        run(ours(num_microbatches=microbatches), module, zoo.make_batches("mlp", samples=8), devices=devices)
