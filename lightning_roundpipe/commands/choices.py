"""Models, adapters and machines by the names that they have in ``conf/``, or as files of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_roundpipe.planning.cases import read_json
from lightning_roundpipe.planning.meter import ATTENTION, attention
from lightning_roundpipe.planning.profile import Hardware, Precision, read_hardware

_MADE_BY = {"model": "lightning_roundpipe.model.loading.from_config", "lora": "peft.LoraConfig"}
"""``_target_`` of the choices that can be taken here."""

_ABOUT_FILES = ("quantization_config", "dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path")
"""Keys of a config.json that are about its weights' files."""

_ABOUT_WEIGHTS = ("weights", "dtype")
"""Settings of ``from_config`` that are about its weights, of which there are none here."""

DTYPES: Mapping[Precision, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def read_machine(text: str) -> Hardware:
    """The machine of that name, or of that YAML file.

    Raises:
        ValueError: there is none, or something is wrong with the file.
    """
    if _is_path(text):
        return read_hardware(Path(text).expanduser())
    _check_name("hardware", text, sorted(_choices("hardware")), "a YAML file like those in conf/hardware")
    with as_file(files("lightning_roundpipe.conf") / "hardware" / f"{text}.yaml") as path:
        return read_hardware(path)


def read_config(text: str) -> PretrainedConfig:
    """The configuration of a model in ``conf/model``, or of a Hugging Face ``config.json`` or a folder with one.

    Raises:
        ValueError: there is none, or transformers does not take it.
    """
    if _is_path(text):
        path = Path(text).expanduser()
        path = path / "config.json" if path.is_dir() else path
        settings = read_json(path)
        if not isinstance(settings, Mapping) or not isinstance(settings.get("model_type"), str):
            raise ValueError(f"model={text}: {path} is no Hugging Face configuration: it has no model_type.")
        settings = {key: value for key, value in settings.items() if key not in _ABOUT_FILES}
    else:
        settings = _choice("model", text, "a config.json of Hugging Face, or a folder with one")
    settings = {key: value for key, value in settings.items() if key not in _ABOUT_WEIGHTS}
    kind = settings.pop("model_type")
    if kind not in CONFIG_MAPPING:
        close = get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"model={text}: transformers has no model_type {kind!r}.{hint}")
    try:
        config: PretrainedConfig = AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise ValueError(f"model={text}: transformers does not take these settings: {_line(error)}") from error
    return config


def make_model(config: PretrainedConfig, name: str, lora: str, precision: Precision) -> nn.Module:
    """The model without data, in the format that it computes in, with the adapters of ``conf/lora``'s choice ``lora``.

    Raises:
        ValueError: it is no causal language model, or the adapters do not fit it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries about each other
        return _make_model(config, name, lora, precision)


def _make_model(config: PretrainedConfig, name: str, lora: str, precision: Precision) -> nn.Module:
    AttentionInterface.register(ATTENTION, attention)
    build: Any = AutoModelForCausalLM.from_config
    dtype = DTYPES[precision]
    try:
        with torch.device("meta"):
            try:
                model: nn.Module = build(config, dtype=dtype, attn_implementation=ATTENTION)
            except (KeyError, ValueError):  # architectures with attention of their own
                model = build(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:
        raise ValueError(f"model={name} makes no causal language model: {_line(error)}") from error
    if settings := _choice("lora", lora, "a YAML file like those in conf/lora", none=True):
        try:
            # As under autocast, adapters compute in the format of the weights beside them.
            model = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
        except Exception as error:
            raise ValueError(f"lora={lora} does not fit model={name}: {_line(error)}") from error
    return model.train()


def _choice(group: str, text: str, otherwise: str, none: bool = False) -> dict[str, Any]:
    """The settings of a choice, without the name of what takes them."""
    if _is_path(text):
        data = _load(Path(text).expanduser(), group)
        data.pop("_target_", None)
        return data
    found = _choices(group)
    usable = [name for name, data in found.items() if data.get("_target_") == _MADE_BY[group] or (none and not data)]
    if text in found and text not in usable:
        raise ValueError(
            f"{group}={text} has no shape of its own, as it reads weights. Take {', '.join(sorted(usable))}, "
            f"or {otherwise}."
        )
    _check_name(group, text, sorted(usable), otherwise)
    data = dict(found[text])
    data.pop("_target_", None)
    return data


def _choices(group: str) -> dict[str, dict[str, Any]]:
    folder = files("lightning_roundpipe.conf") / group
    found = {}
    for item in folder.iterdir():
        if item.name.endswith(".yaml"):
            with as_file(item) as path:
                found[item.name.removesuffix(".yaml")] = _load(path, group)
    return found


def _load(path: Path, group: str) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ValueError(f"{group}: {path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:
        raise ValueError(f"{group}: {path} is not YAML: {_line(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{group}: {path} must hold settings, each with its name.")
    return {str(key): value for key, value in data.items()}


def _check_name(group: str, text: str, known: list[str], otherwise: str) -> None:
    if text not in known:
        close = get_close_matches(text, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"There is no {group}={text}.{hint} Allowed are {', '.join(known)}, and {otherwise}.")


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((".json", ".yaml", ".yml"))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}." if lines else f"{type(error).__name__}."
