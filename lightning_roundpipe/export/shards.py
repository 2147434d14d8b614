"""Writes weights to safetensors files of a limited size, and the index that says what is where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lightning_roundpipe.export.weight_sources import Spec

_METADATA = {"format": "pt"}  # transformers refuses files without it


def plan_shards(specs: Mapping[str, Spec], most: int) -> list[list[str]]:
    """Return the weights of each file: as many as fit into ``most`` bytes, in their order, and at least one."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards


def write_shards(
    weights: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, Spec],
    folder: Path,
    most: int,
    progress: Callable[[int], None],
) -> None:
    """Write ``weights``, which come in the order of ``specs``. One file's weights are held in memory at a time.

    Args:
        most: bytes of a file's weights.
        progress: called with the bytes of each weight that has come.
    """
    shards = plan_shards(specs, most)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else ["model.safetensors"]
    coming = iter(weights)
    for names, file in zip(shards, files, strict=True):
        held: dict[str, Tensor] = {}
        for expected in names:
            name, tensor = next(coming)
            assert (name, tuple(tensor.shape), tensor.dtype) == (expected, specs[name].shape, specs[name].dtype)
            held[name] = tensor
            progress(specs[name].nbytes)
        save_file(held, folder / file, metadata=_METADATA)
        held.clear()
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": {name: file for names, file in zip(shards, files, strict=True) for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
