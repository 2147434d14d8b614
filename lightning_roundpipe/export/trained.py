"""What is exported: a base model, and what training has changed in it.

A run of ``roundpipe-train`` says both: its configuration names the base model, and its checkpoint holds what was
trained. A folder of adapters names its base model. For a checkpoint of any other Lightning module, the caller does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_roundpipe.export.merging import IN_PEFT
from lightning_roundpipe.messages import plural
from lightning_roundpipe.model.loading import Pretrained, find_files, read_config, reading


@dataclass(frozen=True)
class Base:
    """The model that was trained. Its weights are in ``folder``, or ``load`` makes them in memory.

    ``setting``: how an error names the model.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    folder: Path | None
    load: Callable[[], PreTrainedModel] | None
    setting: str


@dataclass(frozen=True)
class Trained:
    """A base model, and what training has changed, in ``file``: a checkpoint, or a folder of adapters.

    ``adapters``: configuration and weights; None: all weights were trained. ``notes``: on the choice. ``tokenizer``:
    folder of the tokenizer that the run trained with instead of the base model's.
    """

    base: Base
    file: Path
    where: str
    adapters: tuple[PeftConfig, Mapping[str, Tensor]] | None
    notes: tuple[str, ...] = ()
    tokenizer: Path | None = None


def find_trained(run: str | Path, ckpt: str | Path | None = None, base: str | None = None) -> Trained:
    """Return what a run, a checkpoint or a folder of adapters holds. The arguments are those of `export`."""
    path = Path(run).expanduser().absolute()
    if path.is_file() and ckpt is None:
        if (path.parent.parent / "config.yaml").is_file():
            return _of_run(path.parent.parent, path, base)
        return _of_checkpoint(path, base)
    if not path.is_dir():
        raise ValueError(
            f"run={run} is not a folder. Name one that roundpipe-train has printed as its last line, a folder of "
            "PEFT's adapters, or a checkpoint."
        )
    if (path / "adapter_config.json").is_file():
        if ckpt is not None:
            raise ValueError(f"ckpt={ckpt} is about a run, and run={run} is a folder of adapters: leave it out.")
        return _of_adapters(path, base, f"run={run}")
    if not (path / "config.yaml").is_file():
        raise ValueError(
            f"run={run} holds no config.yaml and no adapter_config.json. Name a folder of roundpipe-train, one of "
            "PEFT's adapters, or a checkpoint with base=."
        )
    return _of_run(path, ckpt, base)


def state_of(path: Path, names: Iterable[str]) -> Callable[[], Mapping[str, Tensor]]:
    """Return what maps the weights of these names, those of a model, that a checkpoint has under any common prefix."""
    names = list(names)
    where, state = f"ckpt={path}", _state_of(path)
    if any(IN_PEFT in name for name in state):
        raise ValueError(
            f"{where} holds adapters of PEFT, and how they are scaled is not in it. Export the run's folder, or one "
            "that peft_model.save_pretrained() wrote."
        )
    prefixes = {name[: -len(names[0])] for name in state if name.endswith(names[0])} or {""}
    prefix = min(prefixes, key=lambda start: sum(start + name not in state for name in names))
    if lacking := [name for name in names if prefix + name not in state]:
        raise ValueError(
            f"{where} lacks {plural(len(lacking), 'weight')} of the model, such as {lacking[0]}. Name the model that "
            "was trained with base=."
        )

    def load() -> Mapping[str, Tensor]:
        state = _state_of(path)
        return {name: state[prefix + name] for name in names}

    return load


def _of_run(folder: Path, ckpt: str | Path | None, base: str | None) -> Trained:
    setting = f"run={folder}"
    with reading(folder / "config.yaml", setting):
        cfg: Any = OmegaConf.load(folder / "config.yaml")
        model, lora = cfg.model, cfg.get("lora")
    working = _working_folder(folder)
    notes: list[str] = []
    if base is not None:
        found = _named_base(base)
    else:
        found = _base_of_run(model, cfg.get("seed"), working, setting)
        if quantised := model.get("quantization"):
            notes.append(f"trained on weights in {quantised}; the base model is the weights that those were made of")
    file, why = _checkpoint(folder, cfg, ckpt, setting)
    place = OmegaConf.select(cfg, "data.tokenizer")  # None also where it was left to be filled in
    tokenizer = _within(working, place) if isinstance(place, str) else None
    if file.is_dir():
        adapters: Any = _read_adapters(file, setting)
    else:
        adapters = (instantiate(lora, _convert_="all"), _adapted_part(file)) if lora else None
    where = f"{setting}: {file.name}" if file.is_dir() else f"ckpt={file}"
    return Trained(found, file, where, adapters, (*notes, why), tokenizer)


def _of_checkpoint(path: Path, base: str | None) -> Trained:
    if base is None:
        raise ValueError(
            f"run={path} is a checkpoint, which does not say what model it is of. Name that with base=, a folder or a "
            "name on the Hugging Face hub."
        )
    return Trained(_named_base(base), path, f"ckpt={path}", None)


def _of_adapters(folder: Path, base: str | None, setting: str) -> Trained:
    adapters = _read_adapters(folder, setting)
    name = base if base is not None else adapters[0].base_model_name_or_path
    if not name:
        raise ValueError(
            f"{setting}: adapter_config.json does not say which model the adapters belong to. Name it with base=."
        )
    return Trained(_named_base(name), folder, setting, adapters, (f"adapters of {folder.name}",))


# -- the base model ----------------------------------------------------------------------------------------------------


def _named_base(base: str) -> Base:
    """Return the model in a folder, or of that name on the hub."""
    setting = f"base={base}"
    folder = find_files(base, setting, weights=True)
    return Base(read_config(folder, setting), None, folder, None, setting)


def _base_of_run(model: DictConfig, seed: Any, working: Path | None, setting: str) -> Base:
    """Return the model that a run's configuration names. Its paths are relative to the folder that the run began in."""
    model = copy.deepcopy(model)
    for key in ("folder", "name", "weights"):
        if isinstance(place := model.get(key), str) and _within(working, place).is_dir():
            model[key] = str(_within(working, place))
    unpacked = {key: value for key, value in model.items() if key not in ("quantization", "double_quantization")}
    found = _made(OmegaConf.create(unpacked), setting)
    if found.folder is not None or found.gguf is not None:
        load = None if found.folder is not None else found.load
        return Base(found.config, found.tokenizer, found.folder, load, setting)
    if model.get("quantization"):
        raise ValueError(
            f"{setting}: its base model has random weights that were quantised, which are not drawn again. Name a "
            "folder with the weights with base=."
        )

    def draw() -> PreTrainedModel:
        if seed is None:
            raise ValueError(
                f"{setting}: its base model has random weights, and without a seed (seed=null) they cannot be drawn "
                "again. Name a folder with those weights with base=."
            )
        seed_everything(int(seed), workers=True, verbose=False)
        return found.load()

    return Base(found.config, found.tokenizer, None, draw, setting)


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


def _within(working: Path | None, place: str) -> Path:
    return (working or Path()).absolute() / Path(place).expanduser()


# -- the checkpoint ----------------------------------------------------------------------------------------------------


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
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    if monitor := callback.get("monitor"):
        for state in _loaded(newest).get("callbacks", {}).values():
            if isinstance(state, Mapping) and state.get("monitor") == monitor and state.get("best_model_path"):
                best = newest.parent / Path(str(state["best_model_path"])).name
                if best.is_file():
                    return best, f"checkpoint {best.name}, the best by {monitor}"
    return newest, f"checkpoint {newest.name}" + (f", the newest of {len(files)}" if len(files) > 1 else "")


def _loaded(path: Path) -> dict[str, Any]:
    with reading(path, f"ckpt={path}", "take another checkpoint with ckpt="):
        loaded: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        if not isinstance(loaded, dict) or not isinstance(loaded.get("state_dict"), Mapping):
            raise ValueError("it is no checkpoint of Lightning: it has no state_dict")
        return dict(loaded)


def _state_of(path: Path) -> Mapping[str, Tensor]:
    state: Mapping[str, Tensor] = _loaded(path)["state_dict"]
    return state


def _adapted_part(path: Path) -> dict[str, Tensor]:
    """Return what the adapted model has in a checkpoint. It stays in the file: all of the base model may be in it."""
    return {name: tensor for name, tensor in _state_of(path).items() if IN_PEFT in name}


def _read_adapters(folder: Path, setting: str) -> tuple[PeftConfig, Mapping[str, Tensor]]:
    with reading(folder, setting):
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    return config, weights


def read_tokenizer(folder: Path, setting: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a run was trained with."""
    if not folder.is_dir():
        raise ValueError(f"{setting} was trained with data.tokenizer={folder}, which is not there: put it back.")
    with reading(folder, setting):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer
