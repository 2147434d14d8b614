"""Named modules in tiles of tokens: the numbers of plain training, in less memory."""

import pytest
import torch
import zoo
from harness import assert_plain, assert_same, assert_tensors_same, ours, per_call, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo_runs import expected

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.token_tiles import modules_in_tiles, run_in_tiles, tile_shapes

# -- training


@pytest.mark.parametrize(
    ("name", "lora", "tiles"),
    [
        ("llama", False, {"mlp": 4}),
        ("qwen3_moe", True, 4),
        pytest.param("gpt_oss", False, {"mlp": 4, "post_attention_layernorm": 3}, marks=pytest.mark.slow),
    ],
)
def test_tiles_train_as_plain_lightning(name, lora, tiles):
    """PEFT's adapters of experts exist within their wrapper's forward only, and each tile runs that."""
    module = zoo.make_module(name, lora)
    result = run(ours(num_microbatches=3, token_tiles=tiles), module, zoo.make_batches(name), devices=2)
    assert_same(expected(name, lora, 3), result)
    assert not any("forward" in vars(inner) for inner in module.modules())


@pytest.mark.slow
def test_every_plan_gives_the_same_bits():
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama")
    one, other = (
        run(ours(num_microbatches=3, token_tiles=5, plan=plan), module, batches, devices=devices, blocking=True)
        for plan, devices in ((per_call(6, 2), 2), (per_call(6), 1))
    )
    assert_same(expected("llama", False, 3), one)
    assert one.losses == other.losses
    assert_tensors_same(one.grads, other.grads, rtol=0, atol=0)


@pytest.mark.slow
def test_validation_and_tiles():
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama")
    assert_plain(module, batches, {"num_microbatches": 3, "token_tiles": 4}, devices=1, val_batches=batches[:1])


# -- a module


class MLP(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 64), nn.Linear(64, 8), nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(self.up(x).tanh()))


class Widest(TorchDispatchMode):
    """The most tokens that a tensor of the MLP's inner width has had."""

    tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inner = [t.shape.numel() // 64 for t in tree_leaves(out) if isinstance(t, Tensor) and t.shape[-1:] == (64,)]
        self.tokens = max(self.tokens, *inner, 0)
        return out


def backward_of(module, x, slope):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(slope)
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("shape", [(4, 30), (40, 3), (120,)])
def test_numbers_are_those_of_all_tokens_and_nothing_inside_is_whole(shape):
    module = nn.Sequential(MLP()).double()
    x, slope = (torch.randn(*shape, 8, dtype=torch.float64) for _ in range(2))
    whole = backward_of(module, x, slope)
    leave = run_in_tiles(module, {"0": 12})
    with Widest() as widest:
        tiled = backward_of(module, x, slope)
    assert 8 < widest.tokens <= 12  # weights have 8
    assert_tensors_same(whole, tiled, rtol=1e-12, atol=1e-14)
    leave()
    assert "forward" not in vars(module[0])


def test_a_tile_drops_the_same_in_backward():
    module = nn.Sequential(MLP(dropout=0.5)).double()
    run_in_tiles(module, {"0": 4})
    x = torch.randn(1, 32, 8, dtype=torch.float64, requires_grad=True)

    def loss(given):
        torch.manual_seed(0)
        return module(given)

    assert torch.autograd.gradcheck(loss, x)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [5, 33])
@pytest.mark.parametrize("tokens", [1, 16])
def test_tiles_have_all_tokens(rows, columns, tokens):
    shapes = tile_shapes((rows, columns), tokens)
    assert sum(r * c for r, c in shapes) == rows * columns
    assert all(r * c <= tokens and (r == 1 or c == columns) for r, c in shapes)


# -- names


def test_names_are_the_ends_of_paths():
    model = zoo.make_module("qwen3_moe").model
    assert set(modules_in_tiles(model, {"layers.1.mlp": 8})) == {"model.layers.1.mlp"}
    ends = {name.rpartition("layers.0.")[2] for name in modules_in_tiles(model, 8) if "layers.0." in name}
    norms = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    assert ends == {"mlp.experts", *norms}


@pytest.mark.parametrize("tiles", [{"lp": 8}, {"0": 8, "nothing": 8}, {"blocks": 8}, 8])
def test_names_that_match_nothing_are_refused(tiles):
    module = nn.Sequential(nn.Linear(2, 2))
    module.add_module("blocks", nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=r"token_tiles=.*Sequential"):
        modules_in_tiles(module, tiles)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: x.sum(), r"returns a tensor of shape \(\)"),
        (lambda x: x.mean((0, 1)), r"returns a tensor of shape \(8,\)"),
        (lambda x: x, r"takes a tensor of shape \(8,\)"),
    ],
)
def test_modules_that_cannot_are_refused(function, what):
    class Function(nn.Module):
        def forward(self, x):
            return function(x)

    module = nn.Sequential(Function())
    run_in_tiles(module, {"0": 4})
    x = torch.randn(2, 30, 8)
    with pytest.raises(RoundPipeError, match=rf"token_tiles=\{{'0': 4\}}.*{what}"):
        module(x[0, 0] if "takes" in what else x)
