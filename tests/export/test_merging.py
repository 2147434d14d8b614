"""Exported models compute what plain PEFT's merged models compute, whatever the adapters are."""

import pytest
import torch
from export_runs import logits
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_roundpipe.export import export

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
TIED = SMALL | {"tie_word_embeddings": True}
MOE = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def make_base(folder, kind="llama", dtype="float32", **settings):
    """A random model as `save_pretrained` writes it, in several files."""
    torch.manual_seed(0)
    if not settings:
        settings = SMALL
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def make_adapters(base, folder, config):
    """Adapters that change the model, saved by PEFT; the logits that they give in fp32."""
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_embedding_layers=False)
    return logits(model)


def load(folder, dtype="auto"):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


LINEAR = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = {
    "plain": ("llama", SMALL, LINEAR),
    "dora": ("llama", SMALL, LINEAR | {"use_dora": True}),
    "patterns": ("llama", SMALL, LINEAR | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
    "all biases, GPT-2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "bos_token_id": None, "eos_token_id": None},
        LINEAR | {"bias": "all", "target_modules": ["c_attn"]},
    ),
    "modules to save": ("llama", SMALL, LINEAR | {"modules_to_save": ["lm_head", "norm"]}),
    "tied, output layer adapted": ("llama", TIED, LINEAR | {"target_modules": ["q_proj", "lm_head"]}),
    "tied, embedding adapted": ("llama", TIED, LINEAR | {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, tokens trained": ("llama", TIED, LINEAR | {"trainable_token_indices": {"embed_tokens": [3, 7]}}),
    "experts in one parameter": ("qwen3_moe", MOE, EXPERTS),
    "fused in the files": ("phi3", SMALL | {"pad_token_id": 0}, LINEAR),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_equals_peft(case, tmp_path):
    kind, settings, lora = CASES[case]
    base = make_base(tmp_path / "base", kind, **settings)
    wanted = make_adapters(base, tmp_path / "adapters", LoraConfig(task_type="CAUSAL_LM", **lora))
    assert not torch.allclose(logits(load(base)), wanted, atol=1e-2)
    made = export(tmp_path / "adapters", base=str(base), to=tmp_path / "merged", max_shard_size=40_000)
    assert len(list(made.folder.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(load(tmp_path / "merged")), wanted, atol=2e-5, rtol=2e-5)


def test_merged_in_fp32_and_rounded_once(tmp_path):
    """To the bit what PEFT makes in fp32, cast afterwards; weights without adapters are those of the files."""
    base = make_base(tmp_path / "base", dtype="bfloat16")
    make_adapters(base, tmp_path / "adapters", LoraConfig(task_type="CAUSAL_LM", **LINEAR))
    export(tmp_path / "adapters", base=str(base), to=tmp_path / "merged")
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype="float32"), tmp_path / "adapters"
    )
    wanted = plain.merge_and_unload().bfloat16().state_dict()
    torch.testing.assert_close(load(tmp_path / "merged").state_dict(), wanted, rtol=0, atol=0)
