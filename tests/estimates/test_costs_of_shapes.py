"""Costs that are estimated from shapes: floating point operations, bytes and memory, against counting by hand."""

from dataclasses import replace

import pytest
import torch
from planning.making import estimated_costs, shape
from torch import nn

from lightning_roundpipe.estimates.costs_of_shapes import estimate_costs
from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.meter import Meter

SLOW_MEMORY = replace(read_machine("rtx4090x8"), memory_bandwidth=1.0, memory_efficiency=1.0, kernel_s=0.0)
"""A second a byte."""
SLOW_ARITHMETIC = replace(
    read_machine("rtx4090x8"), flops={"fp32": 1.0, "bf16": 1.0, "fp16": 0.5, "fp8": 2.0}, matmul_efficiency=1.0,
    attention_efficiency=None, kernel_s=0.0,
)  # fmt: skip
"""A second an operation, two in fp16, half of one in fp8."""


def meta(*sizes, **options):
    return torch.empty(*sizes, device="meta", **options)


def test_products_are_held_up_by_arithmetic_and_the_rest_by_memory():
    with Meter(SLOW_ARITHMETIC) as meter:
        with meter.scope() as work:
            meta(3, 5) @ meta(5, 7)
        assert work.seconds == pytest.approx(2 * 3 * 5 * 7)
        with meter.scope() as work:
            meta(3, 5, dtype=torch.float16) @ meta(5, 7, dtype=torch.float16)
        assert work.seconds == pytest.approx(2 * 2 * 3 * 5 * 7)
    with Meter(SLOW_MEMORY) as meter:
        with meter.scope() as work:
            meta(3, 5) @ meta(5, 7)
        assert work.seconds == pytest.approx(4 * (15 + 35 + 21))
        with meter.scope() as work:
            meta(8, 4) + meta(4).expand(8, 4)  # what was expanded is read once
            meta(8, 4).view(4, 8).t()
        assert work.seconds == pytest.approx(4 * (32 + 4 + 32))
        with meter.scope() as work:
            nn.functional.embedding(meta(6, dtype=torch.long), meta(1000, 4))
        assert work.seconds == pytest.approx(8 * 6 + 2 * 4 * 6 * 4)


def test_experts_cost_what_their_rows_meet_and_all_their_bytes():
    dtype = torch.bfloat16
    rows, experts = meta(10, 4, dtype=dtype), meta(3, 4, 6, dtype=dtype)
    ends = meta(3, dtype=torch.int32)
    with Meter(SLOW_MEMORY) as meter, meter.scope() as work:
        out = torch.ops.aten._grouped_mm(rows, experts, offs=ends)
        assert out.shape == (10, 6)
        assert work.flops == 2 * 10 * 4 * 6
        assert work.nbytes == dtype.itemsize * (10 * 4 + 3 * 4 * 6 + 10 * 6) + 3 * 4
        assert torch.ops.aten._grouped_mm(rows.t(), out, offs=ends).shape == experts.shape


class Model(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.config = None
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 1000, bias=False)
        if frozen:
            self.blocks.requires_grad_(False)

    def forward(self, x, use_cache):
        for block in self.blocks:
            x = block(x)
        return type("Output", (), {"loss": self.head(x).float().log_softmax(-1).mean()})

    def get_output_embeddings(self):
        return self.head


def test_linear_layers_in_fp8_cost_fewer_operations_and_casts():
    """All three products of a linear layer, each with casts of both factors; not the output layer's."""
    with torch.device("meta"):
        model = Model(frozen=False).bfloat16()
    layers = {**{f"blocks.{i}": block for i, block in enumerate(model.blocks)}, "head": model.head}
    batch = {"x": meta(64, 16, dtype=torch.bfloat16)}

    def costs(hardware, fp8):
        return estimate_costs(model, layers, batch, hardware, fp8=fp8)

    for (found, before), share in zip(
        zip(costs(SLOW_ARITHMETIC, True), costs(SLOW_ARITHMETIC, False), strict=True), (0.5, 0.5, 0.5, 1), strict=True
    ):
        assert found.forward_s == pytest.approx(share * before.forward_s, rel=1e-2)
        assert found.backward_s == pytest.approx(share * before.backward_s, rel=1e-2)
        assert found.weight_bytes == before.weight_bytes
    x, weight = 64 * 16, 16 * 16
    block, *_, head = costs(SLOW_MEMORY, True)
    assert block.forward_s == 5 * (x + weight) + (x + weight) + 2 * x
    assert block.backward_s == 5 * 2 * x + 2 * x + 2 * weight  # of the weights; the input has no gradient
    assert head == costs(SLOW_MEMORY, False).calls[-1]


@pytest.mark.parametrize("frozen", [False, True])
def test_calls_of_a_model(frozen):
    with torch.device("meta"):
        model = Model(frozen)
    layers = {**{f"blocks.{i}": block for i, block in enumerate(model.blocks)}, "head": model.head}
    costs = estimate_costs(model, layers, {"x": meta(64, 16)}, SLOW_ARITHMETIC)
    assert costs.layers == tuple(layers)
    first, second, _, head = costs.calls
    product = 2 * 64 * 16 * 16
    assert first.forward_s == pytest.approx(product, rel=1e-3)
    assert (first.weight_bytes, first.gradient_bytes) == (4 * 256, 0 if frozen else 4 * 256)
    assert (first.boundary_bytes, second.boundary_bytes) == (4 * 64 * 16,) * 2
    # While a call's microbatch waits for the next one, user code holds the output that is its input, and none from
    # before.
    assert [call.waiting_bytes for call in costs][:2] == [0, 4 * 64 * 16]
    assert max(call.waiting_bytes for call in costs) <= 2 * 4 * 64 * 16
    assert [call.needs_backward for call in costs] == [not frozen] * 3 + [True]
    # The first has no gradient for its input, the second for its input and its weights.
    assert first.backward_s == pytest.approx(0 if frozen else product, rel=1e-3)
    assert second.backward_s == pytest.approx(0 if frozen else 2 * product, rel=1e-3)
    assert head.backward_s == pytest.approx((1 if frozen else 2) * 2 * 64 * 16 * 1000, rel=1e-3)
    # Logits, their logarithms and the gradient of those live at once; the mean's gradient is expanded, not written.
    assert head.activation_bytes >= 3 * 4 * 64 * 1000
    assert "forward" not in vars(model.head)


def test_the_papers_models_have_their_sizes():
    """As their publishers say, in billions; a layer's bytes by hand."""
    found = {name: shape(name).parameters for name in ("qwen3_1_7b", "llama3_1_8b", "gpt_oss_20b", "qwen3_32b")}
    sizes = {name: round((found[name].trained + found[name].frozen) / 1e9, 1) for name in found}
    assert sizes == {"qwen3_1_7b": 1.7, "llama3_1_8b": 8.0, "gpt_oss_20b": 20.9, "qwen3_32b": 32.8}
    lora = shape("qwen3_235b_a22b").parameters
    assert round(lora.frozen / 1e9) == 235
    # Adapters of rank 8 on the four projections of attention, whose widths are 8192, 512, 512 and 8192.
    assert lora.trained == 94 * 8 * (2 * (4096 + 8192) + 2 * (4096 + 512))
    layer = estimated_costs("llama3_1_8b").calls[1]
    numbers = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2)
    assert (layer.weight_bytes, layer.gradient_bytes) == (2 * numbers, 4 * numbers)
    assert estimated_costs("llama3_1_8b").calls[2].boundary_bytes == 4 * 2048 * 4096 * 2
