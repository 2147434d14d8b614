"""Weights that are read one layer at a time, converted by transformers, and written to safetensors files.

Some architectures are stored otherwise than they compute: the files of Qwen3-MoE have a tensor for each expert, the
model one parameter for all. transformers converts when it loads a model and back when it saves one, and both functions
also take the tensors of a single layer.

Tensors on the meta device stand for shapes and dtypes of what has not been read.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig, str_to_torch_dtype

from lightning_roundpipe.messages import plural
from lightning_roundpipe.model.loading import reading

_LAYER = re.compile(r"(.*?\.\d+)\.")


class Source(Protocol):
    """Tensors by name. ``specs`` are on the meta device; ``stored``: names are those of a model's files."""

    specs: dict[str, Tensor]
    stored: bool

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors. The caller may change them: files are mapped privately."""


class StoredWeights:
    """The safetensors files of a model. Each read maps them anew, so that pages do not add up."""

    stored = True

    def __init__(self, folder: Path, setting: str) -> None:
        self._setting = setting
        self._files: dict[str, Path] = {}
        self.specs = {}
        index, files = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
        if index.is_file():
            with reading(index, setting):
                files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        elif not files[0].is_file():
            raise ValueError(
                f"{setting}: {folder} holds no weights in safetensors files. Name a model with them by base=, or load "
                "this one and save_pretrained() it first."
            )
        for path in files:
            with reading(path, setting), safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part, self._files[name] = file.get_slice(name), path
                    dtype = str_to_torch_dtype[part.get_dtype()]
                    self.specs[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            wanted[self._files[name]].append(name)
        found: dict[str, Tensor] = {}
        for path, here in wanted.items():
            with reading(path, self._setting), safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in here}
        return found


class StateDict:
    """A state dict of a model: of one in memory, or in a checkpoint that ``load`` maps anew for each read."""

    stored = False

    def __init__(self, load: Callable[[], Mapping[str, Tensor]]) -> None:
        self._load = load
        self.specs = {name: torch.empty_like(tensor, device="meta") for name, tensor in load().items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        state = self._load()
        return {name: state[name].detach() for name in names}


def layers(names: Iterable[str]) -> list[list[str]]:
    """Return the names in parts: a part for each of a model's layers, and one for each name outside of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=dot_natural_key):
        layer = _LAYER.match(name)
        found[layer[1] if layer else name].append(name)
    return list(found.values())


class Converter:
    """Makes parameters of ``model``, which is on the meta device, of what its files hold, and back."""

    def __init__(self, model: PreTrainedModel, source: Source) -> None:
        self._model, self._source = model, source
        self._options = {"tp_plan": None} if "tp_plan" in _LOADING else {}  # transformers before 5.10

    def check(self, shared: Iterable[tuple[str, ...]], setting: str) -> None:
        """Raise ``ValueError`` if the source lacks weights, or has other shapes. ``shared``: the names of each
        parameter.
        """
        info = self._convert(self._source.specs, "meta")
        if info.mismatched_keys:
            name, stored, wanted = min(info.mismatched_keys)
            raise ValueError(
                f"{setting} is another model: {name} has the shape {tuple(stored)}, and {tuple(wanted)} by the "
                "configuration. Name the model that was trained with base=."
            )
        spare = {name for names in shared if not info.missing_keys.issuperset(names) for name in names}
        if lacking := sorted(info.missing_keys - spare, key=dot_natural_key):
            raise ValueError(
                f"{setting} lacks {plural(len(lacking), 'weight')} of the model, such as {lacking[0]}. Name the model "
                "that was trained with base=."
            )

    def parameters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that a layer's tensors make, in fp32."""
        self._convert(tensors, "cpu")
        found = {name: value for name, value in self._model.state_dict().items() if not value.is_meta}
        cast(Any, self._model).to("meta")
        return found

    def stored(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's parameters as files hold them."""
        return dict(revert_weight_conversion(self._model, parameters))

    def _convert(self, tensors: dict[str, Tensor], device: str) -> Any:
        rules: Any = get_model_conversion_mapping(self._model) if self._source.stored else None
        config = LoadStateDictConfig(device_map={"": device}, dtype=torch.float32, weight_mapping=rules)
        info, _ = convert_and_load_state_dict_in_model(self._model, tensors, config, **self._options)
        if not self._source.stored:
            model: Any = self._model
            model._weight_conversions = None  # `stored` takes the architecture's own
        return info


_LOADING = inspect.signature(convert_and_load_state_dict_in_model).parameters


class ShardWriter:
    """Writes tensors to files of at most ``most`` bytes, or one tensor. The tensors of one file are held in memory."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self.sizes: dict[torch.dtype, int] = defaultdict(int)

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and tensor.nbytes + sum(held.nbytes for held in self._held.values()) > self._most:
            self._flush()
        self._held[name] = tensor
        self.sizes[tensor.dtype] += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, name all, and write the index that says what is where."""
        self._flush()
        number = len(self._files)
        if number == 1:
            self._part(1).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for place, names in enumerate(self._files, 1):
            file = f"model-{place:05}-of-{number:05}.safetensors"
            self._part(place).rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": dict(sorted(places.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        self._files.append(list(self._held))
        save_file(self._held, self._part(len(self._files)), metadata={"format": "pt"})
        self._held.clear()

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
