"""Files of ``conf`` by name, wherever the package is installed, and files of the user's own in their place.

This module imports neither torch nor transformers, so that a command reports a mistyped name at once.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_roundpipe.messages import did_you_mean, first_line

Settings = tuple[tuple[str, str], ...]
"""Settings that a command line changes in a choice, as pairs of name and text: ``lora.r=8`` is ``("r", "8")``."""

_MADE_BY = {"model": "lightning_roundpipe.model.loading.from_config", "lora": "peft.LoraConfig"}
"""``_target_`` of the choices that this module can read."""
_FILES = {"model": "a config.json of Hugging Face, or a folder with one", "lora": "a YAML file like those in conf/lora"}
"""What may be named instead of a choice."""


def shipped_files(group: str) -> dict[str, Path]:
    """Return the files of a folder in ``conf`` by their names without the suffix, in alphabetical order."""
    folder = Path(str(files("lightning_roundpipe.conf") / group))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def is_path(text: str) -> bool:
    """Return whether an option names a file instead of a choice."""
    return "/" in text or text.endswith((".json", ".yaml", ".yml"))


def read_model(text: str) -> dict[str, Any]:
    """Return the settings of a choice of ``conf/model``, or of a config.json: a file, in a folder, or in the hub's
    cache.
    """
    if not is_path(text):
        return read_choice("model", text)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.exists() and not text.endswith((".json", ".yaml", ".yml")):  # as the hub's Qwen/Qwen3-32B
        found = None
        with suppress(HFValidationError):
            found = try_to_load_from_cache(text, "config.json")
        if not isinstance(found, str):
            hint = did_you_mean(path.name.lower().replace("-", "_").replace(".", "_"), _usable("model"))
            raise ValueError(
                f"model={text}: there is no such file or folder, nor such a model in the cache of the Hugging Face "
                f"hub, which is not asked.{hint} To get its configuration: hf download {text} config.json."
            )
        path = Path(found)
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"model={text}: {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # also if it is no text
        raise ValueError(f"model={text}: {path} is not JSON: {first_line(error)}.") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ValueError(f"model={text}: {path} is not a Hugging Face configuration: it has no model_type.")
    return settings


def _is_usable(data: dict[str, Any], group: str) -> bool:
    """Return whether a choice describes a shape, or adapters."""
    return data.get("_target_") == _MADE_BY[group] or (group == "lora" and not data)


def _usable(group: str) -> list[str]:
    """Return the names of the choices that can be planned for, in alphabetical order."""
    return [name for name, path in shipped_files(group).items() if _is_usable(_load(path, group), group)]


def read_choice(group: str, text: str) -> dict[str, Any]:
    """Return the settings of a choice of a group, or of a YAML file, without its ``_target_``."""
    path = Path(text).expanduser() if is_path(text) else shipped_files(group).get(text)
    if path is None:
        usable = _usable(group)
        allowed = f"{', '.join(name for name in usable if not name.startswith('tiny_'))}, and {_FILES[group]}"
        raise ValueError(f"There is no {group}={text}.{did_you_mean(text, usable)} Allowed are {allowed}.")
    data = _load(path, group)
    if not (is_path(text) or _is_usable(data, group)):
        raise ValueError(f"{group}={text} has no shape of its own, as it reads weights. Take {_FILES[group]}.")
    return {name: value for name, value in data.items() if name != "_target_"}


def _load(path: Path, group: str) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ValueError(f"{group}: {path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:
        raise ValueError(f"{group}: {path} is not YAML: {first_line(error)}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{group}: {path} must hold settings, each with its name.")
    return {str(key): value for key, value in data.items()}
