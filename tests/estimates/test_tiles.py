"""What the estimate runs in tiles, and the time that it counts. The memory: ``test_longest_sequence.py``."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_roundpipe.estimates.costs_of_shapes import estimate_costs
from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.estimates.tiles import tiled
from lightning_roundpipe.model.token_tiles import tile_shapes

GPU = read_machine("rtx4090x8")
WIDTH, INNER = 16, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(7, WIDTH), Block()

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(loss=self.block(self.embed(input_ids)).square().mean())


def test_of_language_models_it_is_mlps_norms_and_experts():
    shape = ModelShape(PlanRequest("tiny_gpt_oss_20b", precision="bf16-true"), read_machine("rtx4090x8"))
    kinds = {type(module).__name__ for module, _ in shape.in_tiles()._tiled}
    assert len(kinds) == 2 and all(kind.endswith(("MLP", "Experts", "Norm")) for kind in kinds)
    with pytest.raises(ValueError, match="token_tiles="):
        shape.in_tiles((("nothing", 8),))


def test_time_is_one_more_forward_of_what_runs_in_tiles():
    with torch.device("meta"):
        model = Model()
    layers, batch = {"block": model.block}, {"input_ids": torch.zeros(1, 2**16, dtype=torch.long, device="meta")}
    machine = replace(GPU, kernel_s=0.0)
    (whole,) = estimate_costs(model, layers, batch, machine)
    with tiled([(model.block, 2**14)], tile_shapes):
        (parts,) = estimate_costs(model, layers, batch, machine)
    assert parts.forward_s == pytest.approx(whole.forward_s, rel=0.01)
    assert parts.backward_s == pytest.approx(whole.backward_s + whole.forward_s, rel=0.03)
    with tiled([(model.block, 2**16)], tile_shapes):
        assert estimate_costs(model, layers, batch, machine).calls == (whole,)
