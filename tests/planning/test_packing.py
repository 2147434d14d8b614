"""Weights in few bits: what they take, and what their products are counted as, beside bitsandbytes' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.planning import CallCost
from lightning_roundpipe.planning.estimate import estimate_costs
from lightning_roundpipe.planning.meter import Counter, Work
from lightning_roundpipe.planning.packing import PackedFormat, pack
from lightning_roundpipe.planning.profile import Hardware

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


def test_products_of_four_bit_weights_are_counted_as_those_of_the_copies() -> None:
    """bitsandbytes' products are operations of its own, of which torch's registry counts nothing."""
    layer, plain = four_bits(quant_type="nf4", compress_statistics=True), linear()
    for mode in (True, False):
        one, other = counted(layer.train(mode)), counted(plain.train(mode))
        assert one.flops == other.flops == (2 if mode else 1) * 2 * 8 * 64 * 48
        # Forward reads the weight in four bits, and writes and reads the copy that a plain layer reads.
        assert one.nbytes - other.nbytes >= (2 if mode else 1) * (64 * 48 * 0.5 + 64 * 48 * 2)
        assert one.seconds > other.seconds


@pytest.mark.parametrize(("form", "double", "shape"), [("nf4", True, (100, 37)), ("fp4", False, (1000, 1000))])
def test_four_bits_take_what_bitsandbytes_stores(form: Any, double: bool, shape: tuple[int, int]) -> None:
    weight = bnb.nn.Params4bit(torch.randn(shape), requires_grad=False, quant_type=form, compress_statistics=double)
    state = weight.to("cpu").quant_state
    stored = [weight, state.absmax, state.code]
    if double:
        stored += [state.state2.absmax, state.state2.code, state.offset]
    assert pack(shape, form, double, 2).parts == tuple(tensor.nbytes for tensor in stored)


def test_eight_bits_take_what_bitsandbytes_stores() -> None:
    shape = (100, 37)
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False).to("cpu")
    stored = [tensor for name, tensor in layer.state_dict().items() if name in ("weight", "SCB")]
    assert pack(shape, "int8", True, 2).parts == tuple(tensor.nbytes for tensor in stored)


# -- costs of a model whose weights are packed ------------------------------------------------------------------------

NO_OVERHEAD = replace(read_machine("rtx4090x8"), issue_s=1.0, kernel_s=0.0)


class Products(nn.Module):
    """Two of them, perhaps of each expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        shapes = ((experts, 64, 96), (experts, 96, 64)) if experts else ((64, 96), (96, 64))
        self.first, self.second = (nn.Parameter(torch.empty(s, device="meta", dtype=torch.bfloat16)) for s in shapes)
        self.requires_grad_(False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not self.experts:
            return torch.relu(states @ self.first) @ self.second
        ends = torch.empty(self.experts, dtype=torch.int32, device="meta")
        inner = torch.relu(torch.nn.functional.grouped_mm(states, self.first, offs=ends))
        return torch.nn.functional.grouped_mm(inner, self.second, offs=ends)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.inner = Products(experts)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64, device="meta", dtype=torch.bfloat16)
        self.layer = Layer(experts)

    def forward(self, x: torch.Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"loss": self.layer(self.before(x)).float().sum()})


def layer_cost(
    double: bool | None,
    experts: int = 0,
    machine: Hardware = NO_OVERHEAD,
    rows: int = 256,
    form: PackedFormat = "nf4",
) -> CallCost:
    """Of the layer, whose weights are plain (None) or packed."""
    model = Model(experts)
    weights = list(model.layer.parameters())
    packed = {} if double is None else {weight: pack(weight.shape, form, double, 2) for weight in weights}
    layers = {"before": model.before, "layer": model.layer}
    batch = {"x": torch.empty(rows, 64, device="meta", dtype=torch.bfloat16)}
    return estimate_costs(model, layers, batch, machine, packed=packed).calls[1]


def traffic(seconds: float) -> float:
    return seconds * NO_OVERHEAD.memory_bandwidth * NO_OVERHEAD.memory_efficiency


@pytest.mark.parametrize("double", [False, True])
def test_each_use_of_a_packed_weight_writes_a_copy(double: bool) -> None:
    """In forward, which is also the recomputation, and in backward for the gradient of the inputs."""
    plain, packed = layer_cost(None), layer_cost(double)
    numbers = 2 * 64 * 96
    scales = numbers / 64
    own = numbers / 2 + (scales + 2 * 4 + 2 * 1024 + 2 * 4 if double else 4 * scales) + 2 * 64
    more = own + 2 * numbers + (16 * scales if double else 0)
    assert traffic(packed.forward_s - plain.forward_s) == pytest.approx(more)
    assert traffic(packed.backward_s - plain.backward_s) == pytest.approx(more)


def test_packed_weights_travel_and_lie_on_a_worker_packed() -> None:
    plain, packed = layer_cost(None), layer_cost(True)
    assert plain.weight_bytes == 2 * 2 * 64 * 96
    # Bytes, scales, a table, scales of scales, their table and their mean: each begins at a multiple of 256.
    assert packed.weight_bytes == 2 * (64 * 96 // 2 + 5 * 256 + 3 * 256)
    assert packed.gradient_bytes == plain.gradient_bytes == 0
    assert packed.boundary_bytes == plain.boundary_bytes
