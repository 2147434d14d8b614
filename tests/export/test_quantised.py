"""A base model in four or eight bits is unpacked tensor by tensor, as bitsandbytes unpacks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_runs import logits
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_roundpipe import extras
from lightning_roundpipe.export import export
from lightning_roundpipe.model import quantize
from lightning_roundpipe.model.loading import from_config

functional: Any = pytest.importorskip("bitsandbytes.functional")

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
KINDS = {"nf4": {"quant_type": "nf4"}, "nf4, twice": {"quant_type": "nf4"}, "int8": {}}


def make_quantised(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, PreTrainedModel]:
    """A folder as transformers saves a quantised model, and the model with the same weights unpacked, in fp32."""
    torch.manual_seed(0)
    model = from_config("llama", **SIZES, **HEADS).model.to(dtype)
    model.save_pretrained(folder)
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            stored[name] = tensor
        elif kind == "int8":
            scales = tensor.float().abs().amax(1)
            stored[name] = (tensor.float() * (127 / scales[:, None])).round().to(torch.int8)
            stored[name.replace("weight", "SCB")] = scales
            stored[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            values[name] = functional.int8_vectorwise_dequant(stored[name], scales)
        else:
            packed, state = functional.quantize_4bit(tensor, compress_statistics="twice" in kind, **KINDS[kind])
            stored[name] = packed
            stored |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
            values[name] = functional.dequantize_4bit(packed, state)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **bits}
    (folder / "config.json").write_text(json.dumps(config))
    plain = folder.with_name("plain")
    model.save_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="float32")
    for name, value in values.items():
        model.get_parameter(name).data = value.float()
    return folder, model


def adapters_on(model: PreTrainedModel, folder: Path, targets: str | list[str] = "all-linear") -> torch.Tensor:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return logits(adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_and_merged(kind: str, tmp_path: Path) -> None:
    base, unpacked = make_quantised(tmp_path / "base", kind)
    wanted = adapters_on(unpacked, tmp_path / "adapters")
    made = export(tmp_path / "adapters", base=str(base), to=tmp_path / "merged", dtype="float32")
    assert "the base model: 14 weights unpacked from 4 or 8 bits" in made.notes
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not hasattr(merged.config, "quantization_config")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-5)


def test_experts_in_four_bits(tmp_path: Path) -> None:
    """All experts of a layer are one packed weight in such files, and a tensor each in what is written."""

    torch.manual_seed(0)
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    from_config("qwen3_moe", **SIZES, **HEADS, **settings).model.save_pretrained(tmp_path / "original")
    packed = quantize.from_pretrained(tmp_path / "original", "nf4", dtype="float32")
    packed.save_pretrained(tmp_path / "base")
    wanted = adapters_on(packed, tmp_path / "adapters", ["q_proj", "v_proj"])
    export(tmp_path / "adapters", base=str(tmp_path / "base"), to=tmp_path / "merged", dtype="float32")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-5)


def test_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, unpacked = make_quantised(tmp_path / "base", "nf4")
    adapters_on(unpacked, tmp_path / "adapters")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(ImportError, match=r"quantised as fp4, .*pip install 'lightning-roundpipe\[quant\]'"):
        export(tmp_path / "adapters", base=str(base), to=tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and not (tmp_path / "merged.unfinished").exists()


def _shorter(part: str, size: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored[WEIGHT + part] = stored[WEIGHT + part][:size].clone()

    return change


def _without(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        for part in parts:
            del stored[WEIGHT.removesuffix("weight") + part]

    return change


def _garbled(stored: dict[str, torch.Tensor]) -> None:
    stored[f"{WEIGHT}.quant_state.bitsandbytes__nf4"].fill_(7)


WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STATE = "weight.quant_state.bitsandbytes__nf4"
ALL = tuple(f"weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = {
    "few scales": ("nf4, twice", _shorter(".absmax", 3), "has 3 scales instead of 64"),
    "few scales of scales": ("nf4, twice", _shorter(".nested_absmax", 0), "has 0 scales of scales instead of 1"),
    "few bytes": ("nf4, twice", _shorter("", 100), "has 100 bytes instead of 2048"),
    "no scales of scales": ("nf4, twice", _without("weight.nested_absmax"), "lacks its scales of scales"),
    "nothing": ("nf4, twice", _without(STATE, *ALL), ""),
    "a garbled state": ("nf4, twice", _garbled, ""),
    "eight bits, few scales": (
        "int8", lambda t: t.update({WEIGHT.replace("weight", "SCB"): torch.ones(3)}), "has 3 scales instead of 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    """Kernels read beyond the end of too few scales, and what was there was written, or the process died."""
    kind, change, words = BROKEN[case]
    base, unpacked = make_quantised(tmp_path / "base", kind)
    adapters_on(unpacked, tmp_path / "adapters", ["q_proj"])
    stored = load_file(base / "model.safetensors")
    change(stored)
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^base=.* cannot be read: .*{words}.*copy or download"):
        export(tmp_path / "adapters", base=str(base), to=tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_rows_that_are_no_whole_number_of_blocks(tmp_path: Path) -> None:
    """bitsandbytes' kernel for CPUs gave them the scales of other weights: errors of 24 % instead of 9 %."""
    sizes = SIZES | {"intermediate_size": 96}
    packed = from_config("llama", quantization="nf4", **sizes, **HEADS).model
    packed.save_pretrained(tmp_path / "base")
    weight = packed.get_submodule("model.layers.0.mlp.down_proj").weight
    state = weight.quant_state
    codes = torch.stack([weight.data.view(-1) >> 4, weight.data.view(-1) & 15], 1).view(-1).long()
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    wanted = (state.code[codes] * scales.repeat_interleave(state.blocksize)[: len(codes)]).view(state.shape)
    model = from_config("llama", **sizes, **HEADS).model
    adapters_on(model, tmp_path / "adapters", ["q_proj"])
    export(tmp_path / "adapters", base=str(tmp_path / "base"), to=tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged.get_parameter("model.layers.0.mlp.down_proj.weight"), wanted)
