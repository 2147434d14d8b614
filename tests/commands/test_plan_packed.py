"""``roundpipe-plan model.quantization=``: what packed weights change of an answer, and what is refused."""

import json
import re
import shlex

import pytest
import torch
from torch import nn

from lightning_roundpipe.estimates.models import (
    Quantization,
    make_model,
    packed_weights,
    read_config,
    read_quantization,
    with_adapters,
)
from lightning_roundpipe.estimates.packing import pack
from lightning_roundpipe.planning.memory import process_bytes

TINY = ("model=tiny_llama", "hardware=rtx4090x8", "sequence_length=64", "search_seconds=0", "lora=all_linear")
LINEAR = 6 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
"""Weights of the linear layers of tiny_llama, its output layer aside."""


def answer(command, *arguments):
    code, out, err = command(*arguments, "format=json")
    assert err == "" and code in (0, 1)
    return json.loads(out)


def host(found):
    return {item["name"]: item["bytes"] for item in found["host_memory"]["items"]}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("model.quantization=nf4",), "nf4 with scales in 8 bits"),
        (("model.quantization=fp4", "model.double_quantization=false"), "fp4 with scales in 32 bits"),
        (("model.quantization=int8",), "int8"),
    ],
)
def test_the_host_holds_frozen_weights_packed(command, settings, name):
    plain, packed = answer(command, *TINY), answer(command, *TINY, *settings)
    before, after = host(plain), host(packed)
    form = name.split()[0]
    shapes = [(64, 64)] * 2 + [(32, 64)] * 2 + [(128, 64)] * 2 + [(64, 128)]
    bytes_of_all = 6 * sum(pack(shape, form, "8 bits" in name, 2).nbytes for shape in shapes)
    assert after.pop(f"frozen weights, {name}") == bytes_of_all
    frozen = "frozen weights in compute precision"
    assert before.pop(frozen) - after.pop(frozen) == 2 * LINEAR
    boundary = [key for key in before if key.startswith("boundary")]
    assert {key: after[key] for key in after if key not in boundary} == {
        key: before[key] for key in before if key not in boundary
    }
    assert (plain["packed_parameters"], packed["packed_parameters"]) == (0, LINEAR)
    assert (plain["packed_as"], packed["packed_as"]) == (None, name)
    assert plain["parameters"] == packed["parameters"]
    items = {item["name"]: item for item in packed["host_memory"]["items"]}
    assert items[f"frozen weights, {name}"]["page_locked"]


@pytest.mark.slow
def test_packed_weights_travel_in_less_time_and_take_more_to_compute(command):
    """A quarter of the bytes, and the copies on top of each product."""
    plan = "plan=forward 0-2 3-5; fused 6-8; backward 4-5 2-3 0-1; round 16"
    options = tuple(text for text in TINY if not text.startswith("search"))
    wide = (*options, "model.hidden_size=512", plan)
    plain, packed = (answer(command, *wide, *more) for more in ((), ("model.quantization=nf4",)))
    pairs = list(zip(plain["stages"], packed["stages"], strict=True))
    assert all(one["ms"] < other["ms"] for one, other in pairs)
    assert all(other["weight_bytes"] < 0.5 * one["weight_bytes"] for one, other in pairs[1:2] + pairs[3:5])
    assert answer(command, *wide, "model.quantization=null") == plain


@pytest.mark.slow
def test_the_answer_says_how_they_are_counted(command):
    text = " ".join(command(*TINY, "model.quantization=nf4")[1].split())
    assert re.search(r"frozen weights are in nf4 with scales in 8 bits \(model.quantization=\), [\d.]+ bits each", text)
    assert "In each stage, products of all microbatches read one copy (unpack once). The others are counted" in text
    options = tuple(option for option in TINY if not option.startswith("search"))
    plan = "plan=forward 0-2 3-5; fused 6-8; backward 4-5 2-3 0-1; round 16"
    cut = " ".join(command(*options, "model.quantization=nf4", plan)[1].split())
    assert "Every product reads a copy that is made for it. The others are counted in 16 bits" in cut
    assert "GPUs multiply int8" in " ".join(command(*TINY, "model.quantization=int8")[1].split())
    experts = ("model=tiny_qwen3_235b_a22b", *TINY[1:4], "lora=attention", "model.quantization=nf4")
    assert "Experts are computed together" in " ".join(command(*experts)[1].split())


def test_embeddings_the_output_layer_norms_routers_and_adapters_stay_as_they_are():
    name = "tiny_qwen3_235b_a22b"
    base = make_model(read_config(name)[0], name, "bf16-mixed")
    packed = packed_weights(base, Quantization("nf4"))
    model = with_adapters(base, name, "attention", (), "nf4")
    names = {n.removeprefix("base_model.model.model.layers.") for n, p in model.named_parameters() if p in packed}
    attention = {f"{i}.self_attn.{kind}_proj.base_layer.weight" for i in range(4) for kind in "qkvo"}
    experts = {f"{i}.mlp.experts.{kind}_proj" for i in range(4) for kind in ("gate_up", "down")}
    assert names == attention | experts
    assert {tuple(w.shape[:-2]) for w in packed} == {(), (8,)}


def test_routers_that_are_linear_layers_stay_as_they_are():
    class Experts(nn.Module):
        is_transposed = has_gate = False

        def __init__(self):
            super().__init__()
            self.down = nn.Parameter(torch.empty(4, 8, 8, device="meta"), requires_grad=False)

    root, block = nn.Module(), nn.Module()
    root.mlp = block
    block.gate, block.shared = (nn.Linear(8, n, device="meta").requires_grad_(False) for n in (4, 8))
    block.experts = Experts()
    assert set(packed_weights(root, Quantization("nf4"))) == {block.shared.weight, block.experts.down}


def test_a_checkpoint_that_bitsandbytes_packed_is_planned_for_as_it_is(command, tmp_path):
    config = read_config("tiny_llama")[0].to_dict()
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["quantization_config"] = {**packed, "bnb_4bit_use_double_quant": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(command, f"model={tmp_path}", *TINY[1:])
    assert found["packed_as"] == "nf4 with scales in 32 bits"
    assert host(found) == host(answer(command, *TINY, "model.quantization=nf4", "model.double_quantization=false"))
    assert read_quantization("", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}) == (
        Quantization("int8", double=False)
    )
    assert read_quantization("", {"quantization_config": {"quant_method": "gptq"}}) is None


@pytest.mark.slow
def test_four_bits_are_what_helps_where_frozen_weights_are_too_large(command):
    """With adapters alone, and together with them; each with the figures of the same command."""
    options = ("model=tiny_llama", "gpu=rtx4090", "sequence_length=64", "search_seconds=0", "microbatches=4")
    options = (*options, "microbatch_size=1", "model.intermediate_size=4096")
    adapted = (*options, "lora=attention")
    process = process_bytes(1)
    needed = answer(command, *adapted)["host_memory"]["needed_bytes"] - process
    limit = f"host_memory={process + needed // 2}"
    found = answer(command, *adapted, limit)
    assert not found["fits"]
    remedies = {one["settings"]: one for one in found["would_fit"]}
    assert next(iter(remedies)) == "model.quantization=nf4"
    again = answer(command, *adapted, limit, "model.quantization=nf4")
    assert again["fits"] and again["tokens_per_s"] == remedies["model.quantization=nf4"]["tokens_per_s"]
    together = answer(command, *options, limit)["would_fit"]
    assert together[0]["changes"] == {"lora": "attention", "model.quantization": "nf4"}
    again = answer(command, *options, limit, *shlex.split(together[0]["settings"]))
    assert again["tokens_per_s"] == together[0]["tokens_per_s"]
    # Weights that are packed already, or that are trained, are not packed as a remedy.
    packed = answer(command, *adapted, f"host_memory={process + needed // 100}", "model.quantization=nf4")
    assert not packed["fits"] and not any("model.quantization" in one["changes"] for one in packed["would_fit"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lora=none", "model.quantization=nf4"), "Choose some, as lora=all_linear, or train model=tiny_llama in full"),
        (("model.quantization=nf5",), "model.quantization=nf5 must be one of null, nf4, fp4, int8. Did you mean nf4?"),
        (("model.double_quantization=2",), "model.double_quantization=2 of model=tiny_llama must be true or false."),
        (
            ("model=tiny_qwen3_235b_a22b", "lora=attention", "model.quantization=int8"),
            "layers.0.mlp.experts.gate_up_proj holds experts, which are quantised in four bits only",
        ),
        (
            ("model=tiny_qwen3_235b_a22b", "lora=moe_experts", "model.quantization=nf4"),
            "experts in few bits take no adapters of their own, and down_proj has some (lora.target_parameters). Adapt",
        ),
        (
            ("model=tiny_qwen3_235b_a22b", "lora=attention", "model.quantization=nf4", "model.hidden_size=33"),
            "which must be multiples of 8, and their product one of 64. Load this model with model.quantization=null.",
        ),
    ],
)
def test_mistakes_are_one_line(refused, arguments, message):
    names = [text.partition("=")[0] for text in arguments]
    refused(message, *(text for text in TINY if text.partition("=")[0] not in names), *arguments)


def test_experts_of_another_kind_are_refused():
    class OwnExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Parameter(torch.empty(4, 8, 8, device="meta"), requires_grad=False)

    block = nn.Module()
    block.experts = OwnExperts()
    with pytest.raises(ValueError, match=r"experts \(OwnExperts\) keeps its experts in a way that cannot"):
        packed_weights(block, Quantization("nf4"))
