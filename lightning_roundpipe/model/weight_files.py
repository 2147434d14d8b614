"""The safetensors files of a model's weights: where they are, and whether they are complete.

They are checked before a model is loaded, because transformers' error for a truncated file does not name it. Only
headers are read; the weights stay on the disk until they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open

from lightning_roundpipe.messages import plural

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIGURATION = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model on the hub other than its weights."""


def from_the_hub(name: str, *, weights: bool) -> Path:
    """Return the folder with the files of the model ``name``, downloaded unless they are cached.

    Raises:
        Exception: of many types, if the files are neither cached nor available.
    """
    wanted = (*_CONFIGURATION, "*.safetensors") if weights else _CONFIGURATION
    return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=["*/*"]))


def weight_files(folder: Path) -> Mapping[Path, frozenset[str]]:
    """Return the files in ``folder`` that transformers reads weights from, each with the names that its index lists.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: the index is invalid.
    """
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: frozenset()}
    if not (folder / _INDEX).is_file():
        if any(folder.glob("pytorch_model*.bin")):
            return {}  # the older format has no header to check
        raise FileNotFoundError(f"it holds neither {_SINGLE} nor {_INDEX}")
    index = json.loads((folder / _INDEX).read_text())
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{_INDEX} has no weight_map")
    files: dict[Path, frozenset[str]] = {}
    for name, file in placed.items():
        files[folder / file] = files.get(folder / file, frozenset()) | {name}
    return files


def check_file(path: Path, names: frozenset[str]) -> None:
    """Raise unless ``path`` is as long as its header says and contains all ``names``.

    Raises:
        Exception: of many types, if the file is truncated, incomplete or missing.
    """
    with safe_open(path, framework="pt") as file:
        if missing := names - set(file.keys()):
            raise ValueError(
                f"it lacks {plural(len(missing), 'weight')} that the index puts into it, such as {min(missing)!r}"
            )
