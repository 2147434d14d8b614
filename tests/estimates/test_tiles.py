"""The memory and the time that the estimate counts for a call, whole and in tiles, against one that really runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.estimates.costs_of_shapes import estimate_costs
from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.estimates.tiles import tiled
from lightning_roundpipe.model.token_tiles import run_in_tiles, tile_shapes

GPU = read_machine("rtx4090x8")
ROWS, WIDTH, INNER, COUNT = 64, 16, 48, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Mixer(nn.Module):
    """Two parts of which one sees other tokens."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.alone = Block()

    def forward(self, x):
        return self.alone(x + self.mixing(x.transpose(1, 2)).transpose(1, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mixer = nn.Embedding(7, WIDTH), Mixer()

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(loss=self.mixer(self.embed(input_ids)).square().mean())


class Alive(TorchDispatchMode):
    """Bytes of real storages, as an allocator counts them that is told of each operation's results."""

    def __init__(self, known):
        super().__init__()
        self._known, self.peak = known, 0
        self._refs = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                storage = leaf.untyped_storage()
                self._refs[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._refs = {key: pair for key, pair in self._refs.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._refs.values()))
        return out


def live_at_once(block):
    """Bytes, of its input and of all that a call and its backward make."""
    x = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    alive = Alive({t.untyped_storage()._cdata for t in (*block.parameters(), x)})
    for weight in block.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with alive:
        out = block(x)
        gradient, edge = torch.empty_like(out), get_gradient_edge(out)
        del out  # as the engine does
        torch.autograd.backward(edge, gradient)
    return x.nbytes + alive.peak


def test_of_language_models_it_is_mlps_norms_and_experts():
    shape = ModelShape(PlanRequest("tiny_gpt_oss_20b", precision="bf16-true"), read_machine("rtx4090x8"))
    kinds = {type(module).__name__ for module, _ in shape.in_tiles()._tiled}
    assert len(kinds) == 2 and all(kind.endswith(("MLP", "Experts", "Norm")) for kind in kinds)
    with pytest.raises(ValueError, match="token_tiles="):
        shape.in_tiles((("nothing", 8),))


def test_memory_is_what_lives_at_once_where_a_call_really_runs():
    """Backward frees what the forward has kept, node by node: a peak in the middle of it counts only what is left."""
    with torch.device("meta"):
        model = Model()
    tokens = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
    layers, batch = {"alone": model.mixer.alone}, {"input_ids": tokens}
    (whole,) = estimate_costs(model, layers, batch, GPU)
    assert whole.activation_bytes == live_at_once(Block())
    with tiled([(model.mixer.alone, ROWS // COUNT)], tile_shapes):
        (parts,) = estimate_costs(model, layers, batch, GPU)
    block = Block()
    run_in_tiles(nn.Sequential(block), {"0": ROWS // COUNT})
    measured = live_at_once(block)
    assert measured <= parts.activation_bytes <= 1.06 * measured
    assert parts.activation_bytes < 0.6 * whole.activation_bytes
    assert parts.graph_bytes == 2 * 4 * ROWS * WIDTH + 4  # its input, its output, and what stands for the weights


def test_time_is_one_more_forward_of_what_runs_in_tiles():
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
