"""What cannot be exported is refused by name, and nothing is left behind."""

import json
import shutil

import pytest
import torch
from export_runs import SIZES, train
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_roundpipe.export import export, weight_sources
from lightning_roundpipe.model.loading import from_config


def make_base(folder, kind="llama", **settings):
    torch.manual_seed(0)
    from_config(kind, **(SIZES | settings)).model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def make_adapters(base, folder, config=None):
    config = config or LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(folder, "model=folder", f"model.folder={base}", "data.vocab_size=128", "lora=all_linear")
    return folder


@pytest.fixture
def adapters(base, tmp_path):
    return make_adapters(base, tmp_path / "adapters")


def refused(message, run, to, **options):
    before = sorted(to.parent.iterdir())
    with pytest.raises(ValueError, match=message):
        export(run, to, **options)
    assert sorted(to.parent.iterdir()) == before


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------------- the run


def test_no_run(base, tmp_path):
    refused(r"^run=.*nowhere is not a folder. Name one that roundpipe-train", tmp_path / "nowhere", tmp_path / "to")
    refused(r"^run=.* holds no config.yaml and no adapter_config.json", tmp_path, tmp_path / "to")
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    refused(r"is a checkpoint, which does not say what model it is of. Name that", tmp_path / "a.ckpt", tmp_path / "to")
    for content in ([1, 2], {"state_dict": 3}):
        torch.save(content, tmp_path / "a.ckpt")
        refused("it has no state_dict", tmp_path / "a.ckpt", tmp_path / "to", base=str(base))


def test_a_run_without_its_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for name in ("checkpoints", "adapters"):
        shutil.rmtree(tmp_path / "run" / name)
    text = (run / "config.yaml").read_text().replace(str(run), str(tmp_path / "run"))
    (tmp_path / "run" / "config.yaml").write_text(text)
    to = tmp_path / "to"
    refused(r"^run=.* holds no checkpoint: .* has no .ckpt file. Name one with ckpt=", tmp_path / "run", to)
    refused(r"^ckpt=step-9.ckpt is not there: name a file of .*checkpoints", run, to, ckpt="step-9.ckpt")
    [path] = (run / "checkpoints").glob("*.ckpt")
    (tmp_path / "cut.ckpt").write_bytes(path.read_bytes()[:-1000])
    message = r"^ckpt=.*cut.ckpt \([\d,]+ bytes\) cannot be read: .* take another checkpoint"
    refused(message, run, to, ckpt=tmp_path / "cut.ckpt")


# ---------------------------------------------------------------------------------------------------------- the weights


def test_all_weights_of_another_model(run, base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    checkpoint, to = tmp_path / "all.ckpt", tmp_path / "to"
    torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, checkpoint)
    other = make_base(tmp_path / "other", num_hidden_layers=3)
    refused(r"^ckpt=.* lacks 9 weights of the model, such as model.layers.2", checkpoint, to, base=str(other))
    bare = make_base(tmp_path / "bare")
    for file in bare.glob("*.safetensors*"):
        file.unlink()
    refused(r"^base=.* holds no weights in safetensors files. Name a model", run, to, base=str(bare))
    wider = make_base(tmp_path / "wider", intermediate_size=96)
    message = r"^ckpt=.* is another model: .*_proj.weight has the shape \(\d+, \d+\), and .* with base="
    refused(message, checkpoint, to, base=str(wider))


def test_adapters_in_a_checkpoint_of_a_script(run, base, tmp_path):
    """Their scale is not in it."""
    [path] = (run / "checkpoints").glob("*.ckpt")
    shutil.copy(path, tmp_path / "a.ckpt")
    message = r"^ckpt=.* holds adapters of PEFT, and how they are scaled is not in it"
    refused(message, tmp_path / "a.ckpt", tmp_path / "to", base=str(base))


def test_adapters_that_have_diverged(adapters, tmp_path):
    tensors = load_file(adapters / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, adapters / "adapter_model.safetensors")
    refused("has values that are not finite. Training has diverged", adapters, tmp_path / "to")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (IA3Config(task_type="CAUSAL_LM"), "has adapters of the kind .*IA3, and only LoRA is exported"),
        (
            LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]),
            "has adapters with layer_replication=, which are not exported",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_are_not_merged(config, message, base, tmp_path):
    refused(message, make_adapters(base, tmp_path / "adapters", config), tmp_path / "to")


def test_a_base_model_that_is_quantised(base, adapters, tmp_path):
    packed = tmp_path / "packed"
    shutil.copytree(base, packed)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (packed / "config.json").write_text(json.dumps(config))
    refused(r"^base=.* is quantised: name the model in 16 bits", adapters, tmp_path / "to", base=str(packed))


# ----------------------------------------------------------------------------------------------------------- the target


def test_settings(adapters, tmp_path):
    refused(r"^dtype='int4' must be one of auto", adapters, tmp_path / "to", dtype="int4")


def test_a_folder_that_is_there(base, adapters, tmp_path):
    to = tmp_path / "to"
    to.mkdir()
    export(adapters, to)  # it is empty
    before = contents(to)
    (tmp_path / "file").write_text("")
    for used in (to, base, adapters, tmp_path / "file"):
        refused(r"^to=.* is there and not empty: name a new folder", adapters, used)
    assert contents(to) == before


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SafetensorError("I/O error: No space left on device (os error 28)"), OSError),  # it is no OSError
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_interrupted_export(error, shown, adapters, tmp_path, monkeypatch):
    """Nothing is left."""
    to, written = tmp_path / "to", []
    beside = sorted(tmp_path.iterdir())

    def fail(tensors, path, metadata):
        if written:
            raise error
        written.append(path)
        path.write_bytes(b"")

    monkeypatch.setattr(weight_sources, "save_file", fail)
    with pytest.raises(
        shown, match="^to=.*to cannot be written: .*No space left.*Name a folder" if str(error) else None
    ):
        export(adapters, to, max_shard_size=100_000)
    assert written and sorted(tmp_path.iterdir()) == beside
