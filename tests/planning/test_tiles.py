"""The estimate of what tiles of tokens would change, against tiles that are really computed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planning.test_census import GPU, ROWS, WIDTH, Alive, Block
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_shape import ModelShape, Wish
from lightning_roundpipe.planning.estimate import estimate_costs
from lightning_roundpipe.planning.tiles import probe_batch, tiled, token_wise

COUNT = 4


class Mixer(nn.Module):
    """Two parts of which one sees other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.alone = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(x + self.mixing(x.transpose(1, 2)).transpose(1, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Embedding(7, WIDTH), Mixer()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(loss=self.mixer(self.embed(input_ids)).square().mean())


class InTiles(torch.autograd.Function):
    """What the estimate describes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        with torch.no_grad():
            for part, into in zip(x.chunk(COUNT, 1), out.chunk(COUNT, 1), strict=True):
                into.copy_(block(part))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        given = torch.empty_like(x)
        for part, into, out in zip(x.chunk(COUNT, 1), given.chunk(COUNT, 1), gradient.chunk(COUNT, 1), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                torch.autograd.backward(ctx.block(leaf), out)
            into.copy_(leaf.grad)
            del leaf
        return given, None, None


def test_what_acts_on_each_token_alone_is_found() -> None:
    with torch.device("meta"):
        model = Model()
    found = token_wise(model, {"mixer": model.mixer}, probe_batch(), GPU)
    assert found == [model.mixer.alone]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt_oss_20b", "tiny_qwen3_235b_a22b"])
def test_of_language_models_it_is_mlps_experts_and_norms(name: str) -> None:
    shape = ModelShape(Wish(name, precision="bf16-true"), read_machine("rtx4090x8"))
    kinds = {type(module).__name__ for module in shape.in_tiles()._tiled}
    assert any("MLP" in kind or "Moe" in kind for kind in kinds)
    assert any("Norm" in kind for kind in kinds)
    assert not any("Attention" in kind or "Decoder" in kind or "Rotary" in kind for kind in kinds)


def test_memory_is_that_of_tiles_which_are_computed() -> None:
    with torch.device("meta"):
        model = Model()
    tokens = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
    layers, batch = {"alone": model.mixer.alone}, {"input_ids": tokens}
    (whole,) = estimate_costs(model, layers, batch, GPU)
    with tiled([model.mixer.alone], ROWS // COUNT):
        (parts,) = estimate_costs(model, layers, batch, GPU)
    block, x = Block(), torch.randn(1, ROWS, WIDTH, requires_grad=True)
    graph = torch.zeros((), requires_grad=True)
    alive = Alive({t.untyped_storage()._cdata for t in (*block.parameters(), x, graph)})
    for weight in block.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with alive:
        out = InTiles.apply(x, graph, block)
        gradient, edge = torch.empty_like(out), get_gradient_edge(out)
        del out  # as the engine does
        torch.autograd.backward(edge, gradient)
    measured = x.nbytes + alive.peak
    assert measured <= parts.activation_bytes <= 1.05 * measured
    assert parts.activation_bytes < 0.6 * whole.activation_bytes
    assert parts.graph_bytes == 2 * x.nbytes + 4  # its input, its output, and what stands for the weights


def test_time_is_one_more_forward_of_what_runs_in_tiles() -> None:
    with torch.device("meta"):
        model = Model()
    layers, batch = {"alone": model.mixer.alone}, {"input_ids": torch.zeros(1, 2**16, dtype=torch.long, device="meta")}
    machine = replace(GPU, kernel_s=0.0)
    (whole,) = estimate_costs(model, layers, batch, machine)
    with tiled([model.mixer.alone], 2**14):
        (parts,) = estimate_costs(model, layers, batch, machine)
    assert parts.forward_s == pytest.approx(whole.forward_s, rel=0.01)
    assert parts.backward_s == pytest.approx(whole.backward_s + whole.forward_s, rel=0.03)
    with tiled([model.mixer.alone], 2**16):
        assert estimate_costs(model, layers, batch, machine).calls == (whole,)
