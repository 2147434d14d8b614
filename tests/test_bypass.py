"""Gradients of parameters that code between the layers uses in ways that torch functions do not show.

Each way is trained plainly and with the strategy, with one microbatch and several, on one device and two. ``between``
stands in front of the layers, where its gradient comes in backward, and behind them, where it comes from the loss.
"""

from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, halves, ours, run, seeded
from small_net import WIDTH, Net, all_of, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ReformerConfig, ReformerModelWithLMHead

from lightning_roundpipe.config import RoundPipeError

GRID = [(1, 1), (4, 2)]
"""Numbers of microbatches and devices."""


def batches():
    return zoo.make_batches("mlp", samples=8)


def train(module, microbatches, devices, **options):
    fit = {key: options.pop(key) for key in ("precision",) if key in options}
    strategy = ours(num_microbatches=microbatches, layers=["Block", "Linear"], **options)
    return run(strategy, module, batches(), devices=devices, **fit)


def check_equal(module, *, some=False):
    """``some``: not all parameters are trained."""
    plain = run("auto", module, batches())
    assert some or all(grad is not None for grads in plain.grads for grad in grads.values())
    for microbatches, devices in GRID:  # four of them recompute some layers, and keep the graphs of others
        plan = {"plan": halves(5)} if microbatches == 4 else {}
        assert_same(plain, train(module, microbatches, devices, **plan))


# ------------------------------------------------------------------------------------- what torch functions do not show


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scale=1.0):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight * scale

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T * ctx.scale, x.T @ grad * ctx.scale, None


class Split(torch.autograd.Function):
    """In the newer style, with the context apart."""

    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class OfTheModule(torch.autograd.Function):
    """Reads the module's weight itself, as hand-written backward passes do."""

    @staticmethod
    def forward(ctx, x, module, *weights):
        ctx.module = module
        ctx.save_for_backward(x)
        return x * module.gain @ module.mix

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weights = [ctx.module.gain, ctx.module.mix]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = x * weights[0] @ weights[1]
        found = torch.autograd.grad(out, [x, *weights], grad)
        return found[0], None, *found[1:]


@torch.jit.script
def scripted(x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    return torch.tanh(x * gain) @ weight


def in_a_thread(self, h):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: h * self.gain @ self.mix).result()


def without_torch_functions(self, h):
    with torch._C.DisableTorchFunction():
        return h * self.gain @ self.mix


HIDDEN = {
    "a view": lambda self, h: (h * self.gain.real) @ self.mix.T,
    "a view by the descriptor, of an alias": lambda self, h: (h * self.gain) @ Tensor.T.__get__(self.mix.T.T),
    "a function's argument, one more": lambda self, h: Split.apply(Product.apply(h, self.mix, 0.5), self.gain),
    "a function that recomputes": lambda self, h: OfTheModule.apply(h, self, self.gain, self.mix),
    "a scripted function": lambda self, h: scripted(h, self.mix, self.gain),
    "a reentrant checkpoint": lambda self, h: checkpoint(lambda x: all_of(self, x), h, use_reentrant=True),
    "another thread": in_a_thread,
    "torch functions switched off": without_torch_functions,
    "a keyword with a list": lambda self, h: (
        h @ torch.cat(tensors=[self.mix[:2], self.mix[2:]]) * torch.stack(tensors=[self.gain, self.gain]).mean(0)
    ),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_a_parameter_given_to(way):
    check_equal(make(between=HIDDEN[way]))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.gain


def test_modules_of_torchscript():
    """They run between the layers."""

    def configure_model(self):
        with seeded(4):
            self.extra = nn.ModuleList([torch.jit.script(Small())])

    def between(self, h):
        return all_of(self, self.extra[0](h))

    check_equal(make(configure_model=configure_model, between=between))


# ------------------------------------------------------------------------------------------ layers' own backward passes


@torch.jit.script
def scripted_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.t() + bias


def test_reformer():
    """Hugging Face's, whose layers are called without grad and go back by themselves."""
    sizes = {"hidden_size": 32, "feed_forward_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    lengths = {"max_position_embeddings": 64, "local_attn_chunk_length": 4, "axial_pos_embds": False}
    lengths |= {"lsh_attn_chunk_length": 4, "num_buckets": 4}
    dropout = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    # Without a seed for the hashes, torch.seed() draws it, and plain training gives other numbers each time.
    kinds = {"attn_layers": ["local", "lsh"], "hash_seed": 0, "is_decoder": True, "vocab_size": 96}
    with seeded(0):
        module = zoo.modules.CausalLM(ReformerModelWithLMHead(ReformerConfig(**sizes, **lengths, **dropout, **kinds)))
        tokens = [torch.randint(0, 96, (4, 16)) for _ in range(3)]
    given = [{"input_ids": ids, "labels": ids} for ids in tokens]
    plain = run("auto", module, given)
    for microbatches, devices in ((1, 1), (2, 2)):
        assert_same(plain, run(ours(num_microbatches=microbatches), module, given, devices=devices))


# --------------------------------------------------------------------------- parameters of other modules inside layers


class Box:
    """An object that is no module."""

    def __init__(self, **held):
        self.__dict__.update(held)


def hook_inside(self, block, add):
    self.blocks[block].inner.register_forward_hook(lambda module, inputs, out: add(out))


def in_a_box(self, block, add):
    inner = self.blocks[block].inner
    inner.box = Box(add=add)
    inner.register_forward_hook(lambda module, inputs, out: module.box.add(out))


PLACES = {"a hook": hook_inside, "an object": in_a_box}


@pytest.mark.parametrize("trained", ["gain mix", "gain mix head blocks.1.inner", "stem blocks gain mix head"])
@pytest.mark.parametrize("place", PLACES)
def test_steering_vectors(place, trained):
    """Added, by a function, by a view, and by weights of another layer; in layers that are frozen, too."""

    def steer(self, h):
        h = h + self.gain + Product.apply(h, self.mix) + h @ self.mix.T
        return h + F.linear(h, self.head.weight).mean(-1, keepdim=True)

    def setup(self, stage):
        for block in (0, 2):
            PLACES[place](self, block, lambda h: steer(self, h))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(trained.split())))

    check_equal(make(setup=setup), some=True)


def test_a_tensor_from_another_layer_is_refused():
    def setup(self, stage):
        self.box = Box(value=None)
        hook_inside(self, 1, lambda h: h + self.box.value)
        self.blocks.requires_grad_(False)

    def body(self, h):
        self.box.value = h * 2
        return Net.body(self, h.detach())

    with pytest.raises(RoundPipeError, match=r"layer 'blocks.1' uses a tensor that it was not given as an argument"):
        train(make(setup=setup, body=body), 4, 2)


def test_prefix_tuning():
    """Its vectors lie in a key-value cache, which each layer fills in the forward, and again when it is recomputed."""
    module, windows = zoo.make_module("llama"), {"batches": zoo.make_batches("llama", 6), "accumulate_grad_batches": 2}
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    module.model = peft.get_peft_model(module.model, config)
    result = run(ours(plan=halves(7)), module, devices=2, **windows)
    assert_same(run("auto", module, **windows), result)


# ------------------------------------------------------------------------------------------- the check behind all these


REFUSED = {
    "another format": ({"precision": "bf16-true"}, {}),
    "staleness": ({"staleness": 1}, {}),
    "later than the first batch": (
        {}, {"between": lambda self, h: untouched(self, h) if self.global_step else all_of(self, h)},
    ),
    "a hook": ({}, {"on_fit_start": lambda self: self.mix.register_hook(lambda grad: grad * 2)}),
}  # fmt: skip


def untouched(self, h):
    return scripted_linear(h, self.blocks[0].inner.weight, self.blocks[0].inner.bias)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_delivered_is_refused(reason):
    options, methods = REFUSED[reason]
    module = make(**({"between": lambda self, h: torch.tanh(scripted_product(h, self.mix))} | methods))
    with pytest.raises(RoundPipeError, match=r"uses parameter '.*' itself.*parameter.clone"):
        train(module, 4, 2, **options)


@torch.jit.script
def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(weight.dtype) @ weight).to(x.dtype)
