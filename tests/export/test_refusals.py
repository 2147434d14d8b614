"""What cannot be exported is refused by name, and nothing is left behind."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from export_runs import train
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lightning_roundpipe.export import export, from_checkpoint, from_run, job, shards
from lightning_roundpipe.model.loading import from_config

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}


def make_base(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    from_config("llama", **(SIZES | HEADS | settings)).model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def make_adapters(base: Path, folder: Path, config: Any = None) -> Path:
    config = config or LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(folder, "model=folder", f"model.folder={base}", "data.vocab_size=128", "lora=all_linear")
    return folder


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> Path:
    return make_adapters(base, tmp_path / "adapters")


def refused(message: str, trained: Any, to: Path, **options: Any) -> None:
    before = sorted(to.parent.iterdir())
    with pytest.raises(ValueError, match=message):
        export(trained, to, **options)
    assert sorted(to.parent.iterdir()) == before


# ------------------------------------------------------------------------------------------------------------ the run


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^run=.*nowhere is not a folder. Name one that roundpipe-train"):
        from_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^run=.* holds no config.yaml and no adapter_config.json. Name a folder of"):
        from_run(tmp_path)


def test_a_run_without_a_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for name in ("checkpoints", "adapters"):
        shutil.rmtree(tmp_path / "run" / name)
    text = (run / "config.yaml").read_text().replace(str(run), str(tmp_path / "run"))
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^run=.* holds no checkpoint: .* has no .ckpt file. Name one with ckpt="):
        from_run(tmp_path / "run")


def test_a_checkpoint_that_is_not_there(run: Path) -> None:
    with pytest.raises(ValueError, match=r"^ckpt=step-9.ckpt is not there: name a file of .*checkpoints"):
        from_run(run, ckpt="step-9.ckpt")


def test_a_checkpoint_that_is_cut_short(run: Path, tmp_path: Path) -> None:
    [path] = (run / "checkpoints").glob("*.ckpt")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        ValueError, match=r"^ckpt=.*cut.ckpt \([\d,]+ bytes\) cannot be read: .* take another checkpoint"
    ):
        from_run(run, ckpt=cut)


def test_a_base_that_is_not_there_any_more(run: Path, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    (moved / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(base), "/nowhere"))
    with pytest.raises(ValueError, match=r"^run=.* cannot be read: model.folder='/nowhere' .* with base=\.$"):
        from_run(moved)
    assert from_run(moved, base=str(base)).base.folder == base
    with pytest.raises(
        ValueError, match=r"^base=no/such-model is neither a folder nor a model that the Hugging Face hub"
    ):
        from_run(run, base="no/such-model")


def test_a_random_base_without_a_seed(tmp_path: Path) -> None:
    train(tmp_path / "run", "lora=all_linear")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 1\n", "\nseed: null\n"))
    refused(r"^run=.* random weights, and without a seed .* with base=", from_run(tmp_path / "run"), tmp_path / "to")


# ---------------------------------------------------------------------------------------------------------- the weights


def test_adapters_of_another_base(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    adapters = make_adapters(base, tmp_path / "adapters", config)
    for number, (settings, message) in enumerate(
        (
            ({"hidden_size": 32}, "size mismatch for .*q_proj.lora_A"),
            ({"num_hidden_layers": 1}, "which has no model.layers.1.self_attn"),
            ({"num_hidden_layers": 3}, "it lacks 2 of 6 trained tensors, model.layers.2.self_attn"),
        )
    ):
        other = make_base(tmp_path / f"other{number}", **settings)
        trained = from_run(adapters, base=str(other))
        refused(rf"^run=.*adapters does not fit the base model.*{message}.* with base=\.$", trained, tmp_path / "to")


def test_a_base_of_another_architecture(run: Path, tmp_path: Path) -> None:
    """Qwen3 has the shapes of Llama, and the adapters were merged into it."""
    torch.manual_seed(0)
    from_config("qwen3", **SIZES, **HEADS, head_dim=16).model.save_pretrained(tmp_path / "qwen3")
    with pytest.raises(ValueError, match=r"^base=.* of the type qwen3, and run=.*has trained one of llama"):
        from_run(run, base=str(tmp_path / "qwen3"))


def test_a_checkpoint_of_something_else(run: Path, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="it is no checkpoint of Lightning: it has no state_dict"):
        from_run(run, tmp_path / "list.ckpt")


def test_all_weights_of_another_model(run: Path, base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "all.ckpt")
    other = make_base(tmp_path / "other", num_hidden_layers=3)
    trained = from_checkpoint(tmp_path / "all.ckpt", str(other))
    refused(r"^ckpt=.* lacks 9 weights of the model, such as model.layers.2.*with base=", trained, tmp_path / "to")
    wider = make_base(tmp_path / "wider", intermediate_size=96)
    trained = from_checkpoint(tmp_path / "all.ckpt", str(wider))
    refused(r"^ckpt=.* is another model: .*down_proj.weight has the shape \(64, 128\)", trained, tmp_path / "to")
    [path] = (run / "checkpoints").glob("*.ckpt")
    refused(r"^ckpt=.* holds adapters of PEFT, and", from_checkpoint(path, str(base)), tmp_path / "to")


def test_adapters_that_have_diverged(base: Path, adapters: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapters / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, adapters / "adapter_model.safetensors")
    refused("has values that are not finite. Training has diverged", from_run(adapters), tmp_path / "to")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (IA3Config(task_type="CAUSAL_LM"), "has adapters of the kind .*IA3, and only LoRA is exported"),
        (
            LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights="pissa"),
            "init_lora_weights='pissa', which changes the base model",
        ),
        (
            LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]),
            "has adapters with layer_replication=, which are not exported",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_are_not_merged(config: Any, message: str, base: Path, tmp_path: Path) -> None:
    refused(message, from_run(make_adapters(base, tmp_path / "adapters", config)), tmp_path / "to")


def test_a_base_that_is_cut_short(base: Path, adapters: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    path = sorted(broken.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    cut = rf"{path.name} \([\d,]+ bytes\) cannot be read.*It may be cut short; repair"
    refused(cut, from_run(adapters, base=str(broken)), tmp_path / "to")
    shutil.rmtree(broken)
    shutil.copytree(base, broken)
    trained = from_run(adapters, base=str(broken))
    path.write_bytes(path.read_bytes()[:-100])  # meanwhile
    refused(cut, trained, tmp_path / "to")


# ----------------------------------------------------------------------------------------------------------- the target


def test_settings(base: Path, adapters: Path, tmp_path: Path) -> None:
    trained = from_run(adapters)
    refused(r"^format='onnx' must be safetensors or gguf", trained, tmp_path / "to", format="onnx")
    refused(r"^dtype='int4' must be one of auto", trained, tmp_path / "to", dtype="int4")
    refused(r"^dtype=q8_0 is a format of GGUF files", trained, tmp_path / "to", dtype="q8_0")
    refused(r"^merge=false writes adapters as PEFT does", trained, tmp_path / "to", merge=False, format="gguf")
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "all.ckpt")
    whole = from_checkpoint(tmp_path / "all.ckpt", str(base))
    refused(r"^merge=false writes adapters, and ckpt=.* has none", whole, tmp_path / "to", merge=False)


def test_a_folder_that_is_there(base: Path, adapters: Path, tmp_path: Path) -> None:
    trained, to = from_run(adapters), tmp_path / "to"
    to.mkdir()
    export(trained, to)  # it is empty
    first = (to / "config.json").stat().st_mtime_ns
    refused(r"^to=.*to is not empty \(it holds config.json\): name a new folder, or set overwrite=true", trained, to)
    assert (to / "config.json").stat().st_mtime_ns == first
    export(trained, to, overwrite=True, max_shard_size=100_000)
    assert not (to / "model.safetensors").exists() and (to / "model.safetensors.index.json").exists()
    (to / "more").mkdir()
    refused(r"holds the folder more, which no export has written", trained, to, overwrite=True)
    for used in (base, adapters, base.parent):
        with pytest.raises(ValueError, match=r"holds what is exported: name another folder"):
            export(trained, used, overwrite=True)
    (tmp_path / "file").write_text("")
    refused(r"file is a file: name a new folder", trained, tmp_path / "file", overwrite=True)


def test_a_full_disk(adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(job.shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    refused(
        r"^to=.*to needs \d+ KiB, and .* has 1000 bytes left: name a folder on", from_run(adapters), tmp_path / "to"
    )


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_export(error: BaseException, adapters: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing that looks whole is left; the folder that was there before stays as it was."""
    trained, to = from_run(adapters), tmp_path / "to"
    export(trained, to)
    before = {path.name: path.read_bytes() for path in to.iterdir()}
    written = []

    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        if written:
            raise error
        written.append(path)
        path.write_bytes(b"")

    monkeypatch.setattr(shards, "save_file", fail)
    with pytest.raises(type(error)):
        export(trained, to, overwrite=True, max_shard_size=100_000)
    assert written and not list(tmp_path.glob("*.unfinished"))
    assert {path.name: path.read_bytes() for path in to.iterdir()} == before


def test_a_folder_with_files_of_the_users(base: Path, adapters: Path, tmp_path: Path) -> None:
    """They were deleted."""
    trained, to = from_run(adapters), tmp_path / "to"
    export(trained, to, max_shard_size=100_000)
    for name in ("notes.txt", "README.md"):
        (to / name).write_text("mine")
        refused(rf"^to=.*to holds {name}, which no export has written", trained, to, overwrite=True)
        assert (to / name).read_text() == "mine"
        (to / name).unlink()
    export(trained, to, merge=False, overwrite=True)  # over a model, and that again: PEFT writes a README.md
    export(trained, to, overwrite=True)
    assert not (to / "README.md").exists()


def test_only_what_a_killed_export_has_left_is_deleted(adapters: Path, tmp_path: Path) -> None:
    """An export to `to` begins in `to.unfinished`, which may be a folder of the user's, and even one with a model."""
    trained, to, beside = from_run(adapters), tmp_path / "to", tmp_path / "to.unfinished"
    export(trained, beside)
    before = {path.name: path.read_bytes() for path in beside.iterdir()}
    refused(r"^to=.*to would be written to to.unfinished first, which is there already", trained, to)
    refused(r"first, which is there already", trained, to, merge=False)
    assert {path.name: path.read_bytes() for path in beside.iterdir()} == before and not to.exists()
    for merge in (True, False):
        beside.mkdir(exist_ok=True)
        (beside / job.MARK).touch()
        export(trained, to, merge=merge, overwrite=True)
        assert not beside.exists() and not (to / job.MARK).exists()


def test_a_link_to_a_folder(adapters: Path, tmp_path: Path) -> None:
    """The export was made, could not replace the link, and was deleted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "to").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "not yet")
    for link in ("to", "later"):
        export(from_run(adapters), tmp_path / link)
        assert (tmp_path / link).is_symlink() and (tmp_path / link / "model.safetensors").is_file()


def test_a_mount_point(adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "to").mkdir()
    monkeypatch.setattr(job.os.path, "ismount", lambda path: path == tmp_path / "to")
    refused(r"^to=.*to is the root of a disk.*name a folder in it", from_run(adapters), tmp_path / "to")


@pytest.mark.parametrize("merge", [True, False])
def test_a_disk_that_becomes_full(merge: bool, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of safetensors is no OSError, and came as a traceback."""
    import peft.peft_model
    from safetensors import SafetensorError

    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(shards, "save_file", fail)
    monkeypatch.setattr(peft.peft_model, "safe_save_file", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"^to=.*to cannot be written: .*No space left.*Name a folder"):
        export(from_run(adapters), tmp_path / "to", merge=merge)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made(adapters: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"^to=.*file/to cannot be written: NotADirectoryError.*Name a folder"):
        export(from_run(adapters), tmp_path / "file" / "to")


def test_a_folder_that_cannot_be_replaced(adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before comes back whole."""
    trained, to = from_run(adapters), tmp_path / "to"
    export(trained, to)
    before = {path.name: path.read_bytes() for path in to.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "to.unfinished":
            raise PermissionError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match=r"^to=.*to cannot be written: PermissionError: no"):
        export(trained, to, overwrite=True, max_shard_size=100_000)
    assert {path.name: path.read_bytes() for path in to.iterdir()} == before
    assert sorted(path.name for path in tmp_path.glob("to*")) == ["to"]
