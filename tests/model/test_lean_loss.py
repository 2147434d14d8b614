"""The loss without logits equals the loss of the logits, and never holds them."""

import contextlib
import copy

import harness
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.meter import Meter
from lightning_roundpipe.model.lean_loss import LeanHead, lean_logits, make_lean

CLASSES, FEATURES, ROWS, LENGTH = 96, 16, 3, 10
"""Chunks have 8 tokens: half as many as features, more than a sixth of the tokens."""
USUAL = {
    "vocab_size": CLASSES, "hidden_size": FEATURES, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "initializer_range": 0.5, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(**USUAL),
    "gpt2, tied": GPT2Config(vocab_size=CLASSES, n_embd=FEATURES, n_layer=1, n_head=2, initializer_range=0.5,
                             resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "opt": OPTConfig(vocab_size=CLASSES, hidden_size=FEATURES, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
                     word_embed_proj_dim=FEATURES, init_std=0.5, dropout=0.0),
    "phi, bias": PhiConfig(**USUAL),
    "gemma2, soft cap": Gemma2Config(**USUAL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0),
    "cohere, factor": CohereConfig(**USUAL, logit_scale=0.25),
    "granite, divisor": GraniteConfig(**USUAL, logits_scaling=3.0),
    "qwen3_moe, routers' loss": Qwen3MoeConfig(**USUAL, **EXPERTS, output_router_logits=True),
}  # fmt: skip


def model_of(name="llama", dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).to(dtype)


def batch():
    tokens = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 6:] = labels[2, 2:] = -100
    return {"input_ids": tokens, "labels": labels}


def loss_and_gradients(model, *, lean, autocast=False, **given):
    """The loss is tripled before backward."""
    model.zero_grad()
    with lean_logits(model) if lean else contextlib.nullcontext(), torch.autocast("cpu", enabled=autocast):
        loss = model(**(batch() | given)).loss
    (3 * loss).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def both(model, **settings):
    plain = loss_and_gradients(model, lean=False, **settings)
    make_lean(model)
    lean = loss_and_gradients(model, lean=True, **settings)
    assert [t.dtype for t in plain] == [t.dtype for t in lean]
    return plain, lean


@pytest.mark.parametrize(
    ("name", "given"), [*((name, {}) for name in MODELS), ("llama", {"num_items_in_batch": torch.tensor(7)})]
)
def test_equals_the_plain_loss(name, given):
    """With what a model does to its logits, and what it adds to the loss; or over a given number of targets."""
    harness.assert_tensors_same(*both(model_of(name), **given), rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-6),
        (torch.bfloat16, False, 3e-2),
        (torch.float16, False, 4e-3),
        (torch.float32, True, 3e-2),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2, soft cap"])
def test_formats(name, dtype, autocast, tolerance):
    """The loss is in fp32, as transformers' is."""
    plain, lean = both(model_of(name, dtype), autocast=autocast)
    assert lean[0].dtype is torch.float32
    torch.testing.assert_close(plain[0], lean[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(plain, lean, strict=True):
        assert float((one - other).float().norm()) <= tolerance * float(one.float().norm())


class Largest(TorchDispatchMode):
    """The most tokens that any tensor had a number for each class of."""

    tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.ndim and t.shape[-1] == CLASSES:
                self.tokens = max(self.tokens, t.numel() // CLASSES)
        return out


def largest(run):
    with Largest() as mode:
        run()
    return mode.tokens


@pytest.mark.parametrize("name", MODELS)
def test_models_never_hold_their_logits(name):
    model, losses = model_of(name), []
    assert largest(lambda: losses.append(model(**batch()).loss)) == ROWS * LENGTH
    make_lean(model)
    with lean_logits(model):
        assert largest(lambda: losses.append(model(**batch()).loss)) <= FEATURES  # the weights, transposed
        assert largest(lambda: losses[1].backward()) <= FEATURES
    assert model(**batch()).logits.shape[-1] == CLASSES  # outside, they are there


@pytest.mark.parametrize(("dtype", "bytes_of_a_logit"), [(torch.bfloat16, 10), (torch.float32, 8)])
def test_memory_of_a_chunk(dtype, bytes_of_a_logit):
    """It holds the logits, their cast and their logarithms at most, and nothing of the chunk before."""
    features, classes, rows = 512, 50_000, 256
    head = nn.Linear(features, classes, bias=False, dtype=dtype, device="meta")
    head.__class__ = LeanHead
    hidden = torch.empty(3 * rows, features, dtype=dtype, device="meta", requires_grad=True)
    target = torch.empty(3 * rows, dtype=torch.long, device="meta")
    with Meter(read_machine("rtx4090x8")) as meter:
        meter.ignore([hidden, target, head.weight])
        head(hidden, target, lambda logits: logits)
    logits, sums = rows * classes, (4 + dtype.itemsize) * classes * features
    assert bytes_of_a_logit * logits <= meter.work.memory.peak < (bytes_of_a_logit + 0.5) * logits + sums


def test_small_gradients_survive_fp16():
    """Divided by 4,000 targets, the probability of one of many classes is next to nothing in fp16."""
    model = model_of("phi, bias", torch.float16)
    make_lean(model)
    model.lm_head.weight.data.zero_()
    ids = torch.ones(2, 2001, dtype=torch.long)
    with lean_logits(model):
        loss = model(inputs_embeds=torch.zeros(2, 2001, FEATURES, dtype=torch.float16), labels=ids).loss
    (loss * 2.0**16).backward()
    bias = model.lm_head.bias.grad
    assert torch.isfinite(bias).all()
    assert bias[2:].min() > 500  # 2^16 / 96 classes


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_over_chunks_are_in_fp32(autocast):
    """In bf16 what a chunk adds to a sum of hundreds is lost: 256 + 1 is 256."""
    dtype = torch.float32 if autocast else torch.bfloat16
    head = nn.Linear(FEATURES, CLASSES, dtype=dtype)
    head.__class__ = LeanHead
    for parameter in head.parameters():
        parameter.data.zero_()
    hidden = torch.ones(2000, FEATURES, dtype=dtype)
    with torch.autocast("cpu", enabled=autocast):
        (head(hidden, torch.zeros(2000, dtype=torch.long), lambda logits: logits) / 2000).backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad[0].float(), torch.tensor(1 / CLASSES - 1), rtol=0.01)


def test_without_targets_gradients_are_zero():
    plain, lean = both(model_of(), labels=torch.full((ROWS, LENGTH), -100))
    assert plain[0].isnan() and lean[0].isnan()
    assert not any(t.any() for t in lean[1:])


@pytest.mark.parametrize("frozen", ["head", "decoder", "both"])
def test_only_what_is_trained_gets_gradients(frozen):
    model = model_of()
    make_lean(model)
    if frozen != "head":
        model.model.requires_grad_(False)
    if frozen != "decoder":
        model.lm_head.requires_grad_(False)
    with lean_logits(model):
        loss = model(**batch()).loss
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (model.lm_head.weight.grad is None) == (frozen == "head")
        assert (model.model.embed_tokens.weight.grad is None) == (frozen == "decoder")


def test_backward_only_once():
    model = model_of()
    make_lean(model)
    with lean_logits(model):
        loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_stays_what_it_is():
    """Its state has the same names, weights stay tied, and a copy of it is lean with its own weights."""
    model = model_of("gpt2, tied")
    before = list(model.state_dict())
    make_lean(model)
    make_lean(model)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear) and head.weight is model.get_input_embeddings().weight
    assert list(model.state_dict()) == before
    other = copy.deepcopy(model)
    loss_and_gradients(other, lean=True)
    assert head.weight.grad is None and other.get_output_embeddings().weight.grad is not None


def test_models_that_cannot_are_refused():
    adapted = get_peft_model(model_of(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"loss of LlamaForCausalLM .* layer is a Linear, not .*task.lean_loss=false"):
        make_lean(adapted)
    other = model_of()
    other.loss_function = lambda logits, labels, **_: logits.mean()
    with pytest.raises(ValueError, match=r"its loss function is not that of causal .*task.lean_loss=false"):
        make_lean(other)
    with pytest.raises(ValueError, match=r"call make_lean\(\) on this LlamaForCausalLM"), lean_logits(model_of()):
        pass
    model = model_of()
    make_lean(model)
    with pytest.raises(ValueError, match="was called without labels"), lean_logits(model):
        model(batch()["input_ids"])
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"), lean_logits(model):
        model(**batch())
