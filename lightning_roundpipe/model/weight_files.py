"""The safetensors files that hold a model's weights: where they are, and whether they are whole.

They are looked at before a model is made of them, because what transformers says of a file that is cut short does not
name it. Only headers are read; the weights themselves stay on the disk until somebody looks at them.
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
"""Files of a model on the hub that are not its weights."""


def from_the_hub(name: str, *, weights: bool) -> Path:
    """The folder with the files of the model ``name``, which are downloaded unless they were before.

    Raises:
        Exception: of many kinds, if they are neither here nor to be had.
    """
    wanted = (*_CONFIGURATION, "*.safetensors") if weights else _CONFIGURATION
    return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=["*/*"]))


def weight_files(folder: Path) -> Mapping[Path, frozenset[str]]:
    """The files in ``folder`` that transformers reads weights from, and the names that its index puts into each.

    Raises:
        FileNotFoundError: there are none.
        ValueError: the index is none.
    """
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: frozenset()}
    if not (folder / _INDEX).is_file():
        if any(folder.glob("pytorch_model*.bin")):
            return {}  # older files, which are read as a whole
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
    """Whether ``path`` is as long as its header says, and has all ``names`` in it.

    Raises:
        Exception: it is not, or is not there.
    """
    with safe_open(path, framework="pt") as file:
        if missing := names - set(file.keys()):
            raise ValueError(
                f"it lacks {plural(len(missing), 'weight')} that the index puts into it, such as {min(missing)!r}"
            )
