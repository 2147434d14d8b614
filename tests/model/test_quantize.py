"""Weights in four and eight bits: the bytes are those of bitsandbytes, and the results those of plain PyTorch."""

import copy
import functools
import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model import quantize, quantize_experts, quantize_loader
from lightning_roundpipe.model.loading import from_config, from_folder
from lightning_roundpipe.model.quantize_experts import ExpertWeights

bnb = pytest.importorskip("bitsandbytes")

_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
DENSE = {"model_type": "llama", "intermediate_size": 128, "tie_word_embeddings": True, **_SIZES}
EXPERTS = {
    # Scales of an expert are quantised in blocks of 256; these have 48, 24, 128, 64, 304 and 152 scales.
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "intermediate_size": 64, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 152},
}
assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def settings(name):
    return DENSE if name == "llama" else {"model_type": name, "num_experts_per_tok": 2, **_SIZES, **EXPERTS[name]}


@functools.cache
def plain(name):
    torch.manual_seed(1)
    made = settings(name)
    config = AutoConfig.for_model(initializer_range=0.1, **made)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models in 32 bits, as `save_pretrained` writes them."""
    made = {}
    for name in ("llama", *EXPERTS):
        made[name] = tmp_path_factory.mktemp(name)
        plain(name).save_pretrained(made[name])
    return made


def logits(model):
    """In training mode: in evaluation, bitsandbytes rounds the scales for good, on processors that compute in bf16."""
    with torch.no_grad():
        return model.train()(TOKENS).logits


def by_hand(folder, kind="nf4", double=True):
    """What transformers makes, as QLoRA is written by hand."""
    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


def unpacked(model):
    """The same model with the values of packed experts in plain parameters."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, ExpertWeights):
                delattr(module, name)
                values = bnb.functional.dequantize_4bit(child.weight.data, child.weight.quant_state)
                setattr(module, name, nn.Parameter(values, requires_grad=False))
    return model


# -- one weight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "double", "shape", "dtype"),
    [
        ("nf4", True, (300, 1001), torch.float32),
        ("nf4", False, (64, 64), torch.bfloat16),
        ("fp4", True, (5, 64, 24), torch.float16),
    ],
)
def test_the_bytes_are_those_of_bitsandbytes(kind, double, shape, dtype, monkeypatch):
    monkeypatch.setattr(quantize_loader, "_PIECE", 1 << 12)  # several pieces, and a last one that is not full
    weight = torch.randn(shape).to(dtype)
    theirs, state = bnb.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    ours = quantize_loader.pack_4bit(weight, kind, double)
    assert torch.equal(ours.data, theirs)
    assert_same(ours.quant_state.as_dict(packed=True), state.as_dict(packed=True))


def test_the_bytes_of_eight_bits_are_those_of_bitsandbytes(monkeypatch):
    monkeypatch.setattr(quantize_loader, "_PIECE", 1 << 10)
    weight = torch.randn(100, 33, dtype=torch.bfloat16)
    theirs = bnb.nn.Int8Params(weight, requires_grad=False).to("cpu")
    ours = quantize_loader.pack_8bit(weight)
    assert torch.equal(ours.data, theirs.data)
    assert torch.equal(ours.SCB, theirs.SCB)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False), ("int8", True)])
def test_a_dense_model_is_that_of_transformers(folders, kind, double):
    theirs = by_hand(folders["llama"], kind, double)
    made = [
        quantize.from_pretrained(folders["llama"], kind, double_quantization=double),
        from_folder(folders["llama"], quantization=kind, double_quantization=double).model,
        quantize.quantize(copy.deepcopy(plain("llama")), kind, double_quantization=double),
    ]
    for model in made:
        assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in theirs.modules()]
        assert_same(model.state_dict(), theirs.state_dict())
        assert torch.equal(logits(model), logits(theirs))
        mine, their = model.config.quantization_config.to_dict(), theirs.config.quantization_config.to_dict()
        assert mine == their
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, p in theirs.named_parameters() if p.requires_grad
        }


def test_what_is_not_packed():
    """Embeddings, norms, the output layer and routers."""
    model = from_config(quantization="nf4", dtype="bfloat16", **settings("qwen3_moe")).model
    kept = {
        name.replace(".0.", ".N.").replace(".1.", ".N.")
        for name, p in model.named_parameters()
        if p.dtype is torch.bfloat16
    }
    assert kept == {
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.N.mlp.gate.weight",
        "model.layers.N.input_layernorm.weight", "model.layers.N.post_attention_layernorm.weight",
        "model.layers.N.self_attn.q_norm.weight", "model.layers.N.self_attn.k_norm.weight",
    }  # fmt: skip


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compute_with_the_values_that_they_have(folders, name):
    """Outputs and gradients of the layers before, to the bit."""
    ours = quantize.from_pretrained(folders[name], "nf4").train()
    like = unpacked(ours)
    assert any(isinstance(m, ExpertWeights) for m in ours.modules())
    assert not any(isinstance(m, ExpertWeights) for m in like.modules())
    for model in (ours, like):
        model(TOKENS, labels=TOKENS).loss.backward()
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    wanted = {n: p.grad for n, p in like.named_parameters() if p.grad is not None}
    assert "model.embed_tokens.weight" in found
    assert_same(found, wanted)
    assert torch.equal(logits(ours), logits(like))


def test_backward_does_not_hold_unpacked_experts(folders):
    model = quantize.from_pretrained(folders["qwen3_moe"], "nf4")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        model(TOKENS, labels=TOKENS)
    assert saved
    assert not {(48, 64), (64, 48), (64, 24), (24, 64)} & {tuple(shape[-2:]) for shape in saved}


def test_experts_refuse_what_takes_them_for_a_tensor(folders):
    remedy = r"call model\.set_experts_implementation\('grouped_mm'\)"
    for name, other in (("qwen3_moe", "batched_mm"), ("gpt_oss", "batched_mm"), ("qwen3_moe", "eager")):
        model = quantize.from_pretrained(folders[name], "nf4")
        model.set_experts_implementation(other)
        with pytest.raises(RoundPipeError, match=remedy):
            model(TOKENS)
    weight = model.model.layers[0].mlp.experts.down_proj
    rows, ends = torch.ones(2, 64), torch.tensor([1, 1, 1, 2], dtype=torch.int32)
    torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    for misuse in (
        lambda: torch.nn.functional.grouped_mm(rows, weight, offs=ends, bias=torch.ones(4, 64)),
        lambda: torch.nn.functional.grouped_mm(weight, rows, offs=ends),
        lambda: torch.bmm(rows[None], weight),
        lambda: weight.transpose(0, 1),
        lambda: weight.transpose(1, 2).contiguous(),
        lambda: weight.sum(),
    ):
        with pytest.raises(RoundPipeError, match=remedy):
            misuse()


def numbers(weight, state):
    """The values of a packed weight, by the definition of the format."""
    scales = state.absmax
    if state.nested:
        outer = state.state2
        scales = outer.code[scales.long()] * outer.absmax.repeat_interleave(outer.blocksize)[: len(scales)]
        scales = scales + state.offset
    packed = weight.detach().view(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1).long()
    return (state.code[codes] * scales.repeat_interleave(state.blocksize)[: len(codes)]).view(state.shape)


@pytest.mark.parametrize(("block", "columns"), [(64, 24), (64, 128), (128, 96)])
def test_experts_are_unpacked_by_the_definition_of_the_format(block, columns):
    """Scales of single experts were looked up as if each were for 64 weights.

    bitsandbytes' kernel for CPUs takes the wrong scales where a row is no whole number of blocks.
    """
    experts = torch.randn(4, 64, columns, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.functional.quantize_4bit(experts, blocksize=block, compress_statistics=True, quant_type="nf4")
    wanted = numbers(packed, state)
    assert (wanted - experts).norm() < 0.12 * experts.norm()
    ends = torch.tensor([1, 2, 3, 4])
    assert torch.allclose(quantize_experts.unpack_experts(packed, state, ends, torch.float32), wanted, atol=1e-5)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "way"), [("llama", "50GB", "random"), ("qwen3_moe", "30KB", "read"), ("gpt_oss", "30KB", "made")]
)
def test_a_saved_model_is_the_same(folders, tmp_path, name, size, way):
    if way == "read":
        model = quantize.from_pretrained(folders[name], "nf4")
    elif way == "made":
        model = quantize.quantize(copy.deepcopy(plain(name)), "nf4")
    else:
        model = from_config(quantization="nf4", **settings(name)).model
    model.save_pretrained(tmp_path / "one", max_shard_size=size)
    again = from_folder(tmp_path / "one").model
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "two", max_shard_size=size)
    assert torch.equal(logits(from_folder(tmp_path / "two", quantization="nf4").model), logits(model))
    stored = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "bitsandbytes"
    assert stored["bnb_4bit_quant_type"] == "nf4"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_transformers_reads_what_we_write_and_we_what_it_writes(folders, tmp_path, kind):
    ours, theirs = quantize.from_pretrained(folders["llama"], kind), by_hand(folders["llama"], kind)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours", device_map="cpu")), logits(ours))
    assert torch.equal(logits(from_folder(tmp_path / "theirs").model), logits(theirs))


def _adapted():
    return get_peft_model(copy.deepcopy(plain("llama")), LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantize.quantize(copy.deepcopy(plain("llama")), "nf4"), "quantised already"),
        (_adapted, "without adapters.*get_peft_model"),
        (lambda: _adapted().get_base_model(), "without adapters.*get_peft_model"),
        (lambda: nn.Sequential(nn.Linear(64, 64)), "not a Sequential.*Linear4bit"),
    ],
)
def test_models_that_cannot_be_packed_are_refused(make, words):
    """A model in four bits was called one in eight, and adapters were packed."""
    with pytest.raises(ValueError, match=words):
        quantize.quantize(make(), "int8")


# -- memory ------------------------------------------------------------------------------------------------------------

_MEASURED = """
import re, sys, threading, torch
from lightning_roundpipe.model import quantize
import bitsandbytes

def now():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

def watch():
    global most
    while not ended.wait(0.001):
        most = max(most, now())

folder, other = sys.argv[1:]
quantize.from_pretrained(other, "nf4")
before = most = now()
ended = threading.Event()
thread = threading.Thread(target=watch)
thread.start()
model = quantize.from_pretrained(folder, "nf4", dtype="float32")
ended.set()
thread.join()
print(most - before, now() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_little_more_is_held_than_the_packed_model(folders, tmp_path):
    """Of 400 MiB of weights in 32 bits. Python's own memory grows by some MiB meanwhile."""
    sizes = {**_SIZES, "vocab_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = AutoConfig.for_model("llama", **{**sizes, "hidden_size": 1024, "intermediate_size": 3072})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain_size = 4 * sum(p.numel() for p in model.parameters())
    largest = 4 * max(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    arguments = (str(tmp_path), str(folders["qwen3_moe"]))
    done = subprocess.run([sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True, check=True)
    most, left, packed = map(int, done.stdout.split())
    assert packed < plain_size // 3
    assert left < packed + (16 << 20), f"{left >> 20} MiB"
    assert most < packed + largest + (64 << 20) < plain_size, f"{most >> 20} MiB"
