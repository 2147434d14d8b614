"""Weights in few bits: what they take, and what their products are counted as, beside bitsandbytes' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.model import quantize_experts, quantize_weight
from lightning_roundpipe.planning import CallCost, Costs, Plan
from lightning_roundpipe.planning.estimate import estimate_costs
from lightning_roundpipe.planning.meter import Counter, Work
from lightning_roundpipe.planning.packing import PackedFormat, pack
from lightning_roundpipe.planning.pipeline import run_steps
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
def test_experts_are_packed_and_dequantised_together(double: bool) -> None:
    weight = torch.randn(5, 96, 64)
    data, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    stored = [data, state.absmax, state.code]
    stored += [state.state2.absmax, state.state2.code, state.offset] if double else []
    one, five = (pack(shape, "nf4", double, 2) for shape in ((96, 64), (5, 96, 64)))
    assert five.parts == tuple(tensor.nbytes for tensor in stored)
    assert (five.scratch_bytes, five.buffer_bytes) == (5 * one.scratch_bytes, 5 * one.buffer_bytes)


class Issued(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Counts operations, those that compute and those that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.views, self.kernels = self.views + func.is_view, self.kernels + (not func.is_view)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("double", [False, True])
def test_experts_are_dequantised_by_as_many_operations(double: bool) -> None:
    weight = quantize_weight.pack_4bit(torch.randn(5, 96, 64), "nf4", double)
    data = weight.data
    with Issued() as issued:
        copies = quantize_experts._unpack(data, weight.quant_state, 0, 5, torch.bfloat16)
    assert copies.shape == (5, 96, 64)
    counted = pack((5, 96, 64), "nf4", double, 2)
    assert (counted.kernels, counted.views) == (issued.kernels, issued.views)


# -- costs of a model whose weights are packed ------------------------------------------------------------------------

MACHINE = replace(read_machine("rtx4090x8"), issue_s=1.0)
NO_OVERHEAD = replace(MACHINE, kernel_s=0.0)


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


def test_a_stage_keeps_copies_of_four_bits_alone() -> None:
    plain, four, eight = layer_cost(None), layer_cost(False), layer_cost(False, form="int8")
    assert four.unpacked_bytes == 2 * 2 * 64 * 96
    assert plain.unpacked_bytes == eight.unpacked_bytes == eight.unpack_s == eight.backward_unpack_s == 0
    assert four.unpack_s == four.backward_unpack_s > 0


def test_packed_weights_travel_and_lie_on_a_worker_packed() -> None:
    plain, packed = layer_cost(None), layer_cost(True)
    assert plain.weight_bytes == 2 * 2 * 64 * 96
    # Bytes, scales, a table, scales of scales, their table and their mean: each begins at a multiple of 256.
    assert packed.weight_bytes == 2 * (64 * 96 // 2 + 5 * 256 + 3 * 256)
    assert packed.gradient_bytes == plain.gradient_bytes == 0
    assert packed.boundary_bytes == plain.boundary_bytes


@pytest.mark.parametrize("experts", [0, 4])
def test_one_copy_is_there_at_a_time(experts: int) -> None:
    """Beside what its product takes; no copy waits for backward."""
    plain, packed = (layer_cost(double, experts, rows=1) for double in (None, False))
    copy = 2 * 64 * 96 * max(1, experts)
    assert plain.activation_bytes < copy <= packed.activation_bytes < copy + plain.activation_bytes
    assert packed.kept_bytes == plain.kept_bytes


def test_dequantising_is_issued_in_forward_and_in_backward() -> None:
    """Three kernels and what leads to them, for each of two weights; autograd issues the other operations by itself."""
    plain, packed = layer_cost(None), layer_cost(True)
    assert packed.issue_s - plain.issue_s == packed.backward_issue_s == 2 * (3 + 3)
    assert plain.backward_issue_s == 0
    slow = replace(NO_OVERHEAD, kernel_s=1.0)
    assert layer_cost(True, machine=slow).forward_s - layer_cost(None, machine=slow).forward_s == pytest.approx(2 * 3)


@pytest.mark.parametrize("experts", [1, 4, 128])
def test_experts_are_dequantised_together(experts: int) -> None:
    """However many they are, the interpreter issues as much, and waits for nothing."""
    plain, packed = layer_cost(None, experts), layer_cost(True, experts)
    assert not packed.is_synchronous
    assert packed.issue_s - plain.issue_s == packed.backward_issue_s == 2 * (3 + 5)
    numbers = experts * 2 * 64 * 96
    assert traffic(packed.forward_s - plain.forward_s) > (0.5 + 2) * numbers
    assert packed.weight_bytes < 0.3 * plain.weight_bytes + 2 * 2560


def test_the_interpreter_holds_up_backward_where_it_has_to_issue_it() -> None:
    """A turn of 3 seconds waits for 5 of the interpreter; two workers take turns at it."""
    call = CallCost("0", 1.0, 2.0, 0, 0, 0, 0, True)
    slow = Costs((replace(call, backward_issue_s=5.0), replace(call, layer="1")))
    free = Costs((call, replace(call, layer="1")))
    fused = Plan.parse("forward none; fused 0-1; backward none; round 4")
    assert run_steps(fused, slow, 1, 4).makespan_s == run_steps(fused, free, 1, 4).makespan_s == 4 * 6
    apart = Plan.per_call(2, 4)
    assert run_steps(apart, free, 1, 4).makespan_s == 4 * (1 + 3 + 3)
    assert run_steps(apart, slow, 1, 4).makespan_s == 4 * (1 + 3 + 1 + 5)
    assert run_steps(apart, slow, 2, 4).makespan_s >= 4 * 5
