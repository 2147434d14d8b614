"""What is exported: a base model, and what training has changed in it.

A run of ``roundpipe-train`` says both: its configuration names the base model, and its checkpoint holds what was
trained. Adapters of any other training say the base model's name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig, OmegaConf
from peft import PeftConfig
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_roundpipe.export.skeleton import Skeleton
from lightning_roundpipe.export.weight_sources import Spec, reading, spec_of
from lightning_roundpipe.messages import first_line, plural
from lightning_roundpipe.model.loading import Pretrained
from lightning_roundpipe.model.weight_files import from_the_hub

_QUANTISATION = ("quantization", "double_quantization")
"""Settings of a model that say how its weights are kept in memory while it is trained."""

_PLACES = ("folder", "name", "weights", "gguf_file")
"""Settings of a model that may be paths."""


@dataclass(frozen=True)
class Base:
    """The model that was trained.

    Attributes:
        config, tokenizer: the model's.
        folder: the folder with its weights; None: they are made in memory.
        load: makes the model with its weights in memory, where there is no folder.
        setting: how an error names the model.
        source: what the weights are, in words.
        name: what PEFT's configuration of adapters calls it.
        gguf: the GGUF file that the weights are unpacked from.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    folder: Path | None
    load: Callable[[], PreTrainedModel] | None
    setting: str
    source: str
    name: str | None
    gguf: Path | None = None


@dataclass(frozen=True)
class Trained:
    """A base model, and what training has changed.

    Attributes:
        base: the model.
        file: what holds the trained weights.
        where: how an error names it.
        adapters: configuration and weights of adapters; None: all weights were trained.
        notes: what the user should know of the choice.
        load_tokenizer: reads the tokenizer that the run trained with instead of the base model's; None: it took that.
    """

    base: Base
    file: Path
    where: str
    adapters: tuple[PeftConfig, Mapping[str, Tensor]] | None
    notes: tuple[str, ...] = field(default=())
    load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that the run trained with instead of the base model's.

        Raises:
            ValueError: it is not there any more, or cannot be read.
        """
        return None if self.load_tokenizer is None else self.load_tokenizer()


class CheckpointFile:
    """All weights in a Lightning checkpoint, by the names that they have in the model.

    The file is mapped again for each read: pages of it that were read would add up otherwise.

    Raises:
        ValueError: the file cannot be read, or holds another model.
    """

    def __init__(self, path: Path, skeleton: Skeleton) -> None:
        self.path = path
        self.where = f"ckpt={path}"
        state = _state_of(path)
        self._prefix = _prefix(state, skeleton.shapes, self.where)
        self.specs: Mapping[str, Spec] = {
            name: spec_of(state[self._prefix + name]) for name in skeleton.shapes if self._prefix + name in state
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        state = _state_of(self.path)
        return {name: state[self._prefix + name].detach().clone() for name in names}


def from_run(run: str | Path, ckpt: str | Path | None = None, base: str | None = None) -> Trained:
    """Return what a run of ``roundpipe-train`` has trained, or what is in a folder with PEFT adapters.

    Args:
        run: the run's folder, or one with ``adapter_config.json``.
        ckpt: the checkpoint; None: the best if the run looked for one, else the newest.
        base: the base model, a folder or a name on the Hugging Face hub; None: as the run or the adapters say.

    Raises:
        ValueError, OSError, ImportError: something is missing or cannot be read; the message names the setting.
    """
    folder = Path(run).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"run={run} is not a folder. Name one that roundpipe-train has printed as its last line.")
    if (folder / "adapter_config.json").is_file():
        if ckpt is not None:
            raise ValueError(f"ckpt={ckpt} is about a run, and run={run} is a folder of adapters: leave it out.")
        return _from_adapters(folder, base, f"run={run}")
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"run={run} holds no config.yaml and no adapter_config.json. Name a folder of roundpipe-train, or one of "
            "PEFT's adapters."
        )
    with reading(folder / "config.yaml", f"run={run}"):
        cfg: Any = OmegaConf.load(folder / "config.yaml")
        model, lora = cfg.model, cfg.get("lora")
    notes: list[str] = []
    if base is not None:
        found = named_base(base)
        _refuse_other_type(found, model, _working_folder(folder), f"run={run}")
    else:
        found = _base_of_run(model, cfg.get("seed"), _working_folder(folder), f"run={run}")
        if quantised := model.get(_QUANTISATION[0]):
            original = found.folder is not None or found.gguf is not None
            kept = "; the base model is the weights that those were made of" if original else ""
            notes.append(f"trained on weights in {quantised}{kept}")
    file, why = _checkpoint(folder, cfg, ckpt, f"run={run}")
    notes.append(why)
    tokenizer = _own_tokenizer(cfg, _working_folder(folder), f"run={run}")
    if file.is_dir():
        adapters = _read_adapters(file, f"run={run}")
        return Trained(found, file, f"run={run}: {file.name}", adapters, tuple(notes), tokenizer)
    where = f"ckpt={file}"
    if not lora:
        return Trained(found, file, where, None, tuple(notes), tokenizer)
    made: Any = instantiate(lora, _convert_="all")
    return Trained(found, file, where, (made, _trained_part(file)), tuple(notes), tokenizer)


def from_checkpoint(ckpt: str | Path, base: str, lora: PeftConfig | None = None) -> Trained:
    """Return what a Lightning checkpoint holds: all weights of ``base``, or its adapters ``lora``.

    Args:
        ckpt: the checkpoint of a module that has the Hugging Face model, or the ``PeftModel``, as an attribute.
        base: the base model, a folder or a name on the Hugging Face hub.
        lora: the adapters' configuration; None: all weights were trained.

    Raises:
        ValueError, OSError: something is missing or cannot be read.
    """
    path = Path(ckpt).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"ckpt={ckpt} is not there: name a file that ModelCheckpoint wrote.")
    adapters = None if lora is None else (lora, _trained_part(path))
    return Trained(named_base(base), path, f"ckpt={path}", adapters)


def named_base(base: str) -> Base:
    """Return the model in a folder, or of that name on the hub.

    Raises:
        ValueError: there is none.
    """
    setting = f"base={base}"
    folder = Path(base).expanduser().absolute()
    if not folder.is_dir():
        try:
            folder = from_the_hub(base, weights=True)
        except Exception as error:
            raise ValueError(
                f"{setting} is neither a folder nor a model that the Hugging Face hub gives: {first_line(error)}. "
                "Name a folder with config.json and safetensors files."
            ) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"{setting} holds no config.json: name a model as save_pretrained() writes it.")
    with reading(folder, setting):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    return Base(config, tokenizer, folder, None, setting, str(folder), base)


# -- the base model of a run -------------------------------------------------------------------------------------------


def _base_of_run(model: DictConfig, seed: Any, working: Path | None, setting: str) -> Base:
    """Return the model that a run's configuration names. Its paths are relative to the folder that the run began in."""
    model = copy.deepcopy(model)
    for key in _PLACES:
        place = model.get(key)
        if isinstance(place, str) and working is not None and key != "gguf_file" and (working / place).is_dir():
            model[key] = str(working / place)
    plain = copy.deepcopy(model)
    for key in (key for key in _QUANTISATION if key in model):
        del plain[key]
    found = _made(plain, setting)
    name = next((str(model[key]) for key in _PLACES[:3] if model.get(key) not in (None, "pretrained", "random")), None)
    if found.folder is not None or found.gguf is not None:
        load = None if found.folder is not None else found.load
        name = name or found.source
        return Base(found.config, found.tokenizer, found.folder, load, setting, found.source, name, found.gguf)
    found = _made(model, setting)  # packed weights are drawn otherwise

    def draw() -> PreTrainedModel:
        if seed is None:
            raise ValueError(
                f"{setting}: its base model has random weights, and without a seed (seed=null) they cannot be drawn "
                "again. Name a folder with those weights with base=."
            )
        seed_everything(int(seed), workers=True, verbose=False)
        return found.load()

    return Base(found.config, found.tokenizer, None, draw, setting, f"{found.source}, seed {seed}", None)


def _own_tokenizer(cfg: DictConfig, working: Path | None, setting: str) -> Callable[[], PreTrainedTokenizerBase] | None:
    """Return what reads the tokenizer that a run's ``data.tokenizer`` names; None if the run took the model's."""
    place = OmegaConf.select(cfg, "data.tokenizer")  # None also where it was left to be filled in
    if not isinstance(place, str):
        return None
    folder = Path(place).expanduser()
    folder = working / folder if working is not None and (working / folder).is_dir() else folder

    def load() -> PreTrainedTokenizerBase:
        if not folder.is_dir():
            raise ValueError(f"{setting} was trained with data.tokenizer={place}, which is not there: put it back.")
        with reading(folder, setting):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer

    return load


def _refuse_other_type(base: Base, model: DictConfig, working: Path | None, setting: str) -> None:
    """Raise if a run is known to have trained another architecture than that of ``base``: shapes may be the same."""
    trained = model.get("model_type")
    if isinstance(place := model.get("folder"), str):
        path = (working or Path()) / Path(place).expanduser() / "config.json"
        trained = json.loads(path.read_text()).get("model_type") if path.is_file() else None
    if trained not in (None, base.config.model_type):
        raise ValueError(
            f"{base.setting} is a model of the type {base.config.model_type}, and {setting} has trained one of "
            f"{trained}. Name the model that was trained."
        )


def _made(model: DictConfig, setting: str) -> Pretrained:
    try:
        found: Any = instantiate(model, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        why = str(cause if isinstance(cause, (ValueError, OSError, ImportError)) else error)
        raise ValueError(
            f"{setting}: the model that it was trained on cannot be read: {why} Or name that model with base=."
        ) from None
    if not isinstance(found, Pretrained):
        raise ValueError(f"{setting}: what {model.get('_target_')} makes is not known here. Name the model with base=.")
    return found


def _working_folder(folder: Path) -> Path | None:
    """Return the folder that the run began in."""
    path = folder / ".hydra" / "hydra.yaml"
    if not path.is_file():
        return None
    with reading(path, f"run={folder}"):
        found = OmegaConf.select(OmegaConf.load(path), "hydra.runtime.cwd")
    return None if found is None else Path(str(found))


# -- its checkpoint ----------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, cfg: DictConfig, ckpt: str | Path | None, setting: str) -> tuple[Path, str]:
    """Return the checkpoint to take, or the folder of adapters where there is none, and why."""
    if ckpt is not None:
        asked = Path(ckpt).expanduser()
        for path in (asked, folder / asked, folder / "checkpoints" / asked):
            if path.is_file():
                return path.absolute(), f"checkpoint {path.name}, as asked for"
        raise ValueError(f"ckpt={ckpt} is not there: name a file of {folder / 'checkpoints'}.")
    callback: Any = OmegaConf.select(cfg, "callbacks.checkpoint") or {}
    places = [folder / "checkpoints", Path(str(callback.get("dirpath") or folder))]
    files = next((there for place in places if (there := sorted(place.glob("*.ckpt")))), [])
    if not files:
        if (folder / "adapters" / "adapter_config.json").is_file():
            return folder / "adapters", "the adapters of the last step, as there is no checkpoint"
        raise ValueError(
            f"{setting} holds no checkpoint: {places[0]} has no .ckpt file. Name one with ckpt=, or train with "
            "callbacks.checkpoint.save_top_k=1."
        )
    newest = max(files, key=lambda path: path.stat().st_mtime_ns) if len(files) > 1 else files[0]
    if monitor := callback.get("monitor"):
        best = _best(newest, str(monitor))
        if best is not None and (newest.parent / best).is_file():
            return newest.parent / best, f"checkpoint {best}, the best by {monitor}"
    others = len(files) - 1
    return newest, f"checkpoint {newest.name}" + (f", the newest of {others + 1}" if others else "")


def _best(path: Path, monitor: str) -> str | None:
    for state in _loaded(path).get("callbacks", {}).values():
        if isinstance(state, Mapping) and state.get("monitor") == monitor and state.get("best_model_path"):
            return Path(str(state["best_model_path"])).name
    return None


def _loaded(path: Path) -> dict[str, Any]:
    with reading(path, f"ckpt={path}", "take another checkpoint with ckpt="):
        loaded: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        if not isinstance(loaded, dict) or not isinstance(loaded.get("state_dict"), Mapping):
            raise ValueError("it is no checkpoint of Lightning: it has no state_dict")
        return dict(loaded)


def _state_of(path: Path) -> Mapping[str, Tensor]:
    state: Mapping[str, Tensor] = _loaded(path)["state_dict"]
    return state


def _trained_part(path: Path) -> dict[str, Tensor]:
    """Return what the adapted model has in a checkpoint. It stays in the file: all of the base model may be in it."""
    return {name: tensor for name, tensor in _state_of(path).items() if "base_model.model." in name}


def _prefix(state: Mapping[str, Tensor], names: Iterable[str], where: str) -> str:
    """Return what stands before the names of the model's weights in a module's state dict."""
    names = list(names)
    for name in state:
        if name.endswith(names[0]) and all(name[: -len(names[0])] + other in state for other in names):
            return name[: -len(names[0])]
    if any("base_model.model." in name for name in state):
        raise ValueError(f"{where} holds adapters of PEFT, and the settings say that all weights were trained.")
    partial = max((name.removesuffix(names[0]) for name in state if name.endswith(names[0])), key=len, default=None)
    lacking = names if partial is None else [name for name in names if partial + name not in state]
    raise ValueError(
        f"{where} lacks {plural(len(lacking), 'weight')} of the model, such as {lacking[0]}. Name the model that was "
        "trained with base=."
    )


# -- adapters ----------------------------------------------------------------------------------------------------------


def _from_adapters(folder: Path, base: str | None, setting: str) -> Trained:
    adapters = _read_adapters(folder, setting)
    name = base if base is not None else adapters[0].base_model_name_or_path
    if not name:
        raise ValueError(
            f"{setting}: adapter_config.json does not say which model the adapters belong to. Name it with base=."
        )
    return Trained(named_base(name), folder, setting, adapters, (f"adapters of {folder.name}",))


def _read_adapters(folder: Path, setting: str) -> tuple[PeftConfig, Mapping[str, Tensor]]:
    with reading(folder, setting):
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    return config, weights
