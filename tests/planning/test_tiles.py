"""The estimate of what tiles of tokens would change, against tiles that are really computed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planning.test_call_memory import GPU, ROWS, WIDTH, Alive, Block
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_shape import ModelShape
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.model.token_tiles import run_in_tiles, tile_shapes
from lightning_roundpipe.planning.estimate import estimate_costs
from lightning_roundpipe.planning.tiles import tiled

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


def test_of_language_models_it_is_mlps_norms_and_experts() -> None:
    shape = ModelShape(Wish("tiny_gpt_oss_20b", precision="bf16-true"), read_machine("rtx4090x8"))
    kinds = {type(module).__name__ for module, _ in shape.in_tiles()._tiled}
    assert len(kinds) == 2 and all(kind.endswith(("MLP", "Experts", "Norm")) for kind in kinds)
    with pytest.raises(ValueError, match="token_tiles="):
        shape.in_tiles((("nothing", 8),))


def test_memory_is_that_of_tiles_which_are_computed() -> None:
    with torch.device("meta"):
        model = Model()
    tokens = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
    layers, batch = {"alone": model.mixer.alone}, {"input_ids": tokens}
    (whole,) = estimate_costs(model, layers, batch, GPU)
    with tiled([(model.mixer.alone, ROWS // COUNT)], tile_shapes):
        (parts,) = estimate_costs(model, layers, batch, GPU)
    block, x = Block(), torch.randn(1, ROWS, WIDTH, requires_grad=True)
    run_in_tiles(nn.Sequential(block), {"0": ROWS // COUNT})
    alive = Alive({t.untyped_storage()._cdata for t in (*block.parameters(), x)})
    for weight in block.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with alive:
        out = block(x)
        gradient, edge = torch.empty_like(out), get_gradient_edge(out)
        del out  # as the engine does
        torch.autograd.backward(edge, gradient)
    measured = x.nbytes + alive.peak
    assert measured <= parts.activation_bytes <= 1.06 * measured
    assert parts.activation_bytes < 0.6 * whole.activation_bytes
    assert parts.graph_bytes == 2 * x.nbytes + 4  # its input, its output, and what stands for the weights


def test_time_is_one_more_forward_of_what_runs_in_tiles() -> None:
    with torch.device("meta"):
        model = Model()
    layers, batch = {"alone": model.mixer.alone}, {"input_ids": torch.zeros(1, 2**16, dtype=torch.long, device="meta")}
    machine = replace(GPU, kernel_s=0.0)
    (whole,) = estimate_costs(model, layers, batch, machine)
    with tiled([(model.mixer.alone, 2**14)], tile_shapes):
        (parts,) = estimate_costs(model, layers, batch, machine)
    assert parts.forward_s == pytest.approx(whole.forward_s, rel=0.01)
    assert parts.backward_s == pytest.approx(whole.backward_s + whole.forward_s, rel=0.03)
    with tiled([(model.mixer.alone, 2**16)], tile_shapes):
        assert estimate_costs(model, layers, batch, machine).calls == (whole,)
