"""The shipped models: the large ones have their published shapes, their tiny twins run the same code and train."""

import functools
import json

import pytest
import torch
from export_runs import train
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

LARGE = {  # parameters as published (tied ones once), layers, hidden size, query heads, key heads, vocabulary, tied
    "qwen3_1_7b": (1_720_574_976, 28, 2048, 16, 8, 151_936, True),
    "llama3_1_8b": (8_030_261_248, 32, 4096, 32, 8, 128_256, False),
    "llama3_1_70b": (70_553_706_496, 80, 8192, 64, 8, 128_256, False),
    "gpt_oss_20b": (20_914_757_184, 24, 2880, 64, 8, 201_088, False),
    "qwen3_32b": (32_762_123_264, 64, 5120, 64, 8, 151_936, False),
    "qwen3_235b_a22b": (235_093_634_560, 94, 4096, 64, 4, 151_936, False),
    "smollm2_135m": (134_515_008, 30, 576, 9, 3, 49_152, True),
}
PUBLISHED = {  # parameters of further choices, of the safetensors files on the hub (tied ones once)
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_30b_a3b": 30_532_122_624,
    "mistral_small_24b": 23_572_403_200,
    "gemma3_12b": 11_771e6,  # embeddings and the rest without vision, in millions (arXiv 2503.19786, table 1)
    "gemma3_27b": 27_016e6,
    "llama3_3_70b": 70_553_706_496,
}


@functools.cache
def model(name):
    """The model of ``conf/model``, without data."""
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        chosen = compose("train", ["hydra.runtime.output_dir=/run", f"model={name}", "data=random_tokens"]).model
    settings = OmegaConf.to_container(chosen)
    settings = {key: value for key, value in settings.items() if key not in ("_target_", "weights", "dtype")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))


def parameters(of):
    return sum(p.numel() for p in of.parameters())


@pytest.mark.parametrize("name", LARGE)
def test_large_models_have_their_published_shape(name):
    size, layers, hidden, heads, keys, vocabulary, tied = LARGE[name]
    found, config = model(name), model(name).config
    assert parameters(found) == size
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (layers, hidden, vocabulary)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, keys)
    assert config.tie_word_embeddings is tied
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("name", PUBLISHED)
def test_further_models_have_their_published_size(name):
    size = PUBLISHED[name]
    assert parameters(model(name)) == (size if isinstance(size, int) else pytest.approx(size, rel=1e-3))


@pytest.mark.parametrize("name", LARGE)
def test_twins_run_the_same_code(name):
    """The same modules with the same parameters in them, under the same names; groups of heads, windows and experts."""
    large, tiny = model(name), model(f"tiny_{name}")
    assert 100_000 < parameters(tiny) < 500_000
    for one, other in ((large, tiny), (tiny, large)):
        names = {n: (type(m), {k for k, p in m._parameters.items() if p is not None}) for n, m in one.named_modules()}
        known = {n: (type(m), {k for k, p in m._parameters.items() if p is not None}) for n, m in other.named_modules()}
        shallow = {n: what for n, what in names.items() if n in known}
        assert len(shallow) > 15 and all(known[n] == what for n, what in shallow.items())
        assert {what[0] for what in names.values()} == {what[0] for what in known.values()}
    a, b = large.config, tiny.config
    assert b.tie_word_embeddings is a.tie_word_embeddings
    assert b.num_attention_heads > b.num_key_value_heads
    assert b.rope_parameters["rope_type"] == a.rope_parameters["rope_type"]
    assert getattr(b, "layer_types", [])[:4] == getattr(a, "layer_types", [])[:4]
    assert (getattr(b, "sliding_window", None) is None) == (getattr(a, "sliding_window", None) is None)
    for count in ("num_local_experts", "num_experts", "num_experts_per_tok"):
        assert (getattr(b, count, 0) > 1) == (getattr(a, count, 0) > 1)


ADAPTERS = [("llama3_1_8b", "attention"), ("qwen3_1_7b", "all_linear"), ("gpt_oss_20b", "moe_experts")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "lora"), ADAPTERS)
def test_twins_train_with_adapters(name, lora, tmp_path):
    short = ["data.sequence_length=32", "data.batch_size=4", "data.sequences=4"]
    devices = ["trainer=cpu", "trainer.devices=2", "strategy=roundpipe", "strategy.microbatch_size=2"]
    train(tmp_path / "run", *short, *devices, "optimizer.lr=0.1", f"model=tiny_{name}", f"lora={lora}")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["val_loss_after"] != summary["val_loss_before"]
