"""Clipping in pieces has the bits of ``torch.nn.utils``."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_roundpipe.optim.clipping import Clip, clamp, coefficient, norms, scale

SHAPES = [(7, 5), (33,), (), (300, 200), (4, 6), (1,), (3,)]
MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float32]


def parameters(dtypes, factor=1.0):
    """With gradients, but for the second."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True)):
        made.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        made[-1].grad = (factor * torch.randn(shape, generator=generator)).to(dtype) if number != 1 else None
    return made


def in_pieces(grads, clip, order):
    """Norms as gradients arrive in ``order``, then what is left when the last is there."""
    arrived = {index: norms([grads[index]])[0] for index in order}
    factor = coefficient([arrived[index] for index in range(len(grads))], clip)
    for index in order:
        scale([grads[index]], factor)


def assert_same_bits(ours, plain):
    expected = [p.grad for p in plain if p.grad is not None]
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close([*map(torch.signbit, ours)], [*map(torch.signbit, expected)])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", [1, 0.37, 1e6])
@pytest.mark.parametrize("dtypes", [[torch.float32] * 7, [torch.bfloat16] * 7, MIXED], ids=["fp32", "bf16", "mixed"])
def test_norms_in_pieces_have_the_bits_of_torch(dtypes, value, threads):
    torch.set_num_threads(threads)
    plain = parameters(dtypes)
    grads = [p.grad.clone() for p in plain if p.grad is not None]
    total = clip_grad_norm_(plain, value)
    in_pieces(grads, Clip("norm", value), [3, 0, 5, 1, 4, 2])
    assert (value < total) == any(not torch.equal(a, b) for a, b in zip(grads, raw(dtypes), strict=True))
    assert_same_bits(grads, plain)


def raw(dtypes):
    return [p.grad for p in parameters(dtypes) if p.grad is not None]


@pytest.mark.parametrize("poison", [math.nan, -math.inf, 0.0])
def test_what_is_not_finite_spreads_as_in_torch(poison):
    plain = parameters([torch.float32] * 7, factor=0.0 if not poison else 1.0)
    assert plain[3].grad is not None
    plain[3].grad[5, 5] = poison
    grads = [p.grad.clone() for p in plain if p.grad is not None]
    clip_grad_norm_(plain, 0.5)
    in_pieces(grads, Clip("norm", 0.5), [5, 4, 3, 2, 1, 0])
    assert_same_bits(grads, plain)


@pytest.mark.parametrize("dtypes", [[torch.float32] * 7, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("value", [1, 0.37, 1e4])
def test_values_have_the_bits_of_torch(dtypes, value):
    plain = parameters(dtypes)
    assert plain[3].grad is not None
    plain[3].grad[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, value])
    grads = [p.grad.clone() for p in plain if p.grad is not None]
    clip_grad_value_(plain, value)
    for index in (3, 0, 5, 1, 4, 2):
        clamp([grads[index]], Clip("value", value))
    assert_same_bits(grads, plain)
