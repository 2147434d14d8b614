"""Weights in few bits: what they take, and what their products are counted as, beside bitsandbytes' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.planning.meter import Counter, Work
from lightning_roundpipe.planning.packing import pack

bnb = pytest.importorskip("bitsandbytes")


def counted(layer: nn.Module, rows: int = 8) -> Work:
    """A forward of `layer` with data, and its backward if it can."""
    states = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    with Counter(read_machine("rtx4090x8")) as counter:
        out = layer(states)
        if layer.training:
            out.sum().backward()
    return counter.work


def linear() -> nn.Linear:
    return nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)


def four_bits(**options: Any) -> nn.Module:
    layer = bnb.nn.Linear4bit(64, 48, compute_dtype=torch.bfloat16, **options).to(torch.bfloat16)
    return layer.to("cpu").requires_grad_(False)  # type: ignore[no-any-return]


def eight_bits() -> nn.Module:
    layer = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False).to(torch.bfloat16)
    return layer.to("cpu").requires_grad_(False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_products_of_four_bit_weights_are_counted_as_those_of_the_copies(form: str, double: bool) -> None:
    """bitsandbytes' products are operations of its own, of which torch's registry counts nothing."""
    layer, plain = four_bits(quant_type=form, compress_statistics=double), linear()
    for mode in (True, False):
        one, other = counted(layer.train(mode)), counted(plain.train(mode))
        assert one.flops == other.flops == (2 if mode else 1) * 2 * 8 * 64 * 48
        # Forward reads the weight in four bits, and writes and reads the copy that a plain layer reads.
        assert one.nbytes - other.nbytes >= (2 if mode else 1) * (64 * 48 * 0.5 + 64 * 48 * 2)
        assert one.seconds > other.seconds


def test_products_of_eight_bit_weights_are_counted() -> None:
    """In training its CPU path multiplies a copy, in evaluation int8, as GPUs do in both."""
    layer, plain = eight_bits(), linear()
    for mode in (True, False):
        assert counted(layer.train(mode)).flops == counted(plain.train(mode)).flops
    rows, weight = torch.ones(8, 64, dtype=torch.int8), torch.ones(48, 64, dtype=torch.int8)
    with Counter(read_machine("rtx4090x8")) as counter:
        torch.ops.bitsandbytes.int8_linear_matmul(rows, weight)
    assert counter.work.flops == 2 * 8 * 64 * 48


def test_large_weights_take_half_a_byte_and_their_scales() -> None:
    size = 4096 * 4096
    assert pack((4096, 4096), "nf4", False, 2).nbytes / size == pytest.approx(0.5 + 4 / 64, rel=1e-4)
    assert pack((4096, 4096), "nf4", True, 2).nbytes / size == pytest.approx(0.5 + 1 / 64 + 4 / (64 * 256), rel=2e-4)
    assert pack((4096, 4096), "int8", True, 2).nbytes / size == pytest.approx(1 + 4 / 4096, rel=1e-4)


SHAPES = [(64, 48), (100, 37), (1000, 1000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_four_bits_take_what_bitsandbytes_stores(form: Any, double: bool, shape: tuple[int, int]) -> None:
    weight = bnb.nn.Params4bit(torch.randn(shape), requires_grad=False, quant_type=form, compress_statistics=double)
    state = weight.to("cpu").quant_state
    stored = [weight, state.absmax, state.code]
    if double:
        stored += [state.state2.absmax, state.state2.code, state.offset]
    assert pack(shape, form, double, 2).parts == tuple(tensor.nbytes for tensor in stored)


@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits_take_what_bitsandbytes_stores(shape: tuple[int, int]) -> None:
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False).to("cpu")
    stored = [tensor for name, tensor in layer.state_dict().items() if name in ("weight", "SCB")]
    assert pack(shape, "int8", True, 2).parts == tuple(tensor.nbytes for tensor in stored)


@pytest.mark.parametrize("double", [False, True])
def test_experts_are_matrices_beside_each_other(double: bool) -> None:
    """Their tables are there once."""
    one, five = (pack(shape, "nf4", double, 2) for shape in ((100, 37), (5, 100, 37)))
    tables = 4 * 16 + (4 * 256 if double else 0)
    assert five.nbytes - tables == 5 * (one.nbytes - tables)
    assert (one.pieces, five.pieces) == (1, 5)
    assert five.scratch_bytes == 5 * one.scratch_bytes and five.buffer_bytes == one.buffer_bytes
