"""Operators of packages compute below a dispatch mode as they do without it."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.model.cast_weights import call_below


@torch.library.custom_op("roundpipe_test::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight).clone()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return call_below(func, args, kwargs or {})


@pytest.mark.parametrize("depth", [0, 3])
def test_autocast_reaches_what_an_operator_calls(depth):
    """Below a mode PyTorch turns autocast off, and a product computed in fp32."""
    dtype = torch.bfloat16
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype))
        for _ in range(depth):
            stack.enter_context(Watching())
        found = product(x, weight)
        with torch.autocast("cpu", enabled=False):
            precise = product(x, weight)
        plain = x @ weight.t()
    assert found.dtype is plain.dtype is dtype
    assert torch.equal(found, torch.nn.functional.linear(x.to(dtype), weight.to(dtype)))
    assert precise.dtype is torch.float32
