"""What runs of ``roundpipe-train`` leave is exported: their model, whatever its weights came from."""

import json
import shutil

import pytest
import torch
from export_runs import SIZES, logits, train
from peft import PeftModel
from tiny_tokenizer import CHAT, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_roundpipe.export import export
from lightning_roundpipe.export.trained import find_trained
from lightning_roundpipe.model.loading import from_config

LORA = "lora=all_linear"


def exported(run, to, **options):
    export(run, to, **options)
    return AutoModelForCausalLM.from_pretrained(to, dtype="auto")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The base model of most runs here, in a folder and in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "base"
    torch.manual_seed(3)
    model = from_config("llama", dtype="bfloat16", **SIZES).model
    model.generation_config.max_length = 77
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A run that has trained adapters, and its logits."""
    run = tmp_path_factory.mktemp("runs") / "adapted"
    return run, logits(train(run, "model=folder", f"model.folder={base}", "data.vocab_size=128", LORA).model)


def test_adapters(adapted, base, tmp_path):
    run, wanted = adapted
    merged = exported(run, tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base, dtype="float32")), wanted, atol=1e-4)
    assert merged.generation_config.max_length == 77
    in_16_bits = exported(run, tmp_path / "auto")
    assert {parameter.dtype for parameter in in_16_bits.parameters()} == {torch.bfloat16}


def test_the_tokenizer_of_the_data_comes_along(base, tmp_path):
    """Instead of the base model's."""
    texts, folder, model = tmp_path / "texts", tmp_path / "tokenizer", tmp_path / "model"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"the bee {number} " * 60)
    tiny_tokenizer().save_pretrained(folder)
    from_config("llama", **(SIZES | {"vocab_size": 300})).model.save_pretrained(model)
    tiny_tokenizer(None).save_pretrained(model)
    data = ["data=texts", f"data.path={texts}"]
    options = ["model=folder", f"model.folder={model}", *data, "data.sequence_length=32"]
    train(tmp_path / "run", *options, f"data.tokenizer={folder}")
    export(tmp_path / "run", tmp_path / "to")
    found = AutoTokenizer.from_pretrained(tmp_path / "to")
    assert found("the bee")["input_ids"] == tiny_tokenizer()("the bee")["input_ids"]
    assert found.chat_template == CHAT
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"was trained with data.tokenizer=.*, which is not there: put it back"):
        export(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_all_weights(base, tmp_path):
    """Written in the dtype of the base model's files, once each."""
    module = train(tmp_path / "run", "model=folder", f"model.folder={base}", "data.vocab_size=128")
    merged = exported(tmp_path / "run", tmp_path / "full", max_shard_size=100_000)
    torch.testing.assert_close(merged.state_dict(), module.model.to(torch.bfloat16).state_dict(), rtol=0, atol=0)
    index = json.loads((tmp_path / "full" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_adapters_on_random_weights(tmp_path):
    """The seed draws the base model's weights again, whatever has been drawn in between."""
    module = train(tmp_path / "run", LORA, "model.tie_word_embeddings=true", "seed=5")
    torch.rand(7)
    merged = exported(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(module.model), atol=1e-5, rtol=1e-5)


def test_a_relative_folder_is_that_of_the_run(adapted, base, tmp_path, monkeypatch):
    run, wanted = adapted
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace(str(base), base.name))
    (moved / ".hydra").mkdir()
    (moved / ".hydra" / "hydra.yaml").write_text(f"hydra:\n  runtime:\n    cwd: {base.parent}\n")
    monkeypatch.chdir(tmp_path)
    found = exported(moved, tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(logits(found), wanted, atol=1e-5, rtol=1e-5)


def test_weights_that_were_quantised_while_they_were_trained(base, tmp_path):
    """What is merged into are the 16-bit files that the run began with, which is said."""
    pytest.importorskip("bitsandbytes")
    settings = [f"model.folder={base}", "data.vocab_size=128", LORA, "model.quantization=nf4"]
    train(tmp_path / "run", "model=folder", *settings)
    made = export(tmp_path / "run", tmp_path / "merged", dtype="float32")
    assert made.notes[0] == "trained on weights in nf4; the base model is the weights that those were made of"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    wanted = logits(PeftModel.from_pretrained(plain, tmp_path / "run" / "adapters"))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(found), wanted, atol=1e-5, rtol=1e-5)


def test_the_best_checkpoint(base, tmp_path):
    """The learning rate ruins the model, so the best checkpoint is not the last."""
    settings = ["optimizer.lr=0.5", "trainer.max_steps=4", "callbacks.checkpoint.save_top_k=-1"]
    settings += ["callbacks.checkpoint.monitor=val_loss", "trainer.val_check_interval=1", "callbacks.run_folder=null"]
    train(tmp_path / "run", "model=folder", f"model.folder={base}", "data.vocab_size=128", LORA, *settings)
    found = find_trained(tmp_path / "run")
    losses = {}
    for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"):
        states = torch.load(path, weights_only=False)["callbacks"].values()
        losses[path.name] = next(float(s["current_score"]) for s in states if "current_score" in s)
    assert len(losses) > 1
    assert found.file.name == min(losses, key=lambda name: losses[name])
    assert "the best by val_loss" in found.notes[-1]
    last = max(losses)
    assert find_trained(tmp_path / "run", ckpt=last).file.name == last
