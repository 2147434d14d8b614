"""Weights in few bits: what they take, and what their products are counted as, beside bitsandbytes' own."""

import pytest
import torch
from torch import nn

from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.meter import Counter
from lightning_roundpipe.estimates.packing import pack

bnb = pytest.importorskip("bitsandbytes")


def counted(layer):
    """A forward of `layer` with data, and its backward if it can."""
    states = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with Counter(read_machine("rtx4090x8")) as counter:
        out = layer(states)
        if layer.training:
            out.sum().backward()
    return counter.work


def four_bits(**options):
    layer = bnb.nn.Linear4bit(64, 48, compute_dtype=torch.bfloat16, **options).to(torch.bfloat16)
    return layer.to("cpu").requires_grad_(False)


def test_products_of_four_bit_weights_are_counted_as_those_of_the_copies():
    """bitsandbytes' products are operations of its own, of which torch's registry counts nothing."""
    layer, plain = (
        four_bits(quant_type="nf4", compress_statistics=True),
        nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False),
    )
    for mode in (True, False):
        one, other = counted(layer.train(mode)), counted(plain.train(mode))
        assert one.flops == other.flops == (2 if mode else 1) * 2 * 8 * 64 * 48
        # Forward reads the weight in four bits, and writes and reads the copy that a plain layer reads.
        assert one.nbytes - other.nbytes >= (2 if mode else 1) * (64 * 48 * 0.5 + 64 * 48 * 2)
        assert one.seconds > other.seconds


@pytest.mark.parametrize(("form", "double", "shape"), [("nf4", True, (100, 37)), ("fp4", False, (1000, 1000))])
def test_four_bits_take_what_bitsandbytes_stores(form, double, shape):
    weight = bnb.nn.Params4bit(torch.randn(shape), requires_grad=False, quant_type=form, compress_statistics=double)
    state = weight.to("cpu").quant_state
    stored = [weight, state.absmax, state.code]
    if double:
        stored += [state.state2.absmax, state.state2.code, state.offset]
    assert pack(shape, form, double, 2).parts == tuple(tensor.nbytes for tensor in stored)


def test_eight_bits_take_what_bitsandbytes_stores():
    shape = (100, 37)
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False).to("cpu")
    stored = [tensor for name, tensor in layer.state_dict().items() if name in ("weight", "SCB")]
    assert pack(shape, "int8", True, 2).parts == tuple(tensor.nbytes for tensor in stored)
