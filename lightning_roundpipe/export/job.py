"""The export itself: checks what was asked for, writes to a folder beside the final one, and renames it at the end."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_roundpipe.config import refuse_taken
from lightning_roundpipe.export.merging import Adapters
from lightning_roundpipe.export.trained import Trained, find_trained, read_tokenizer, state_of
from lightning_roundpipe.export.weight_sources import (
    Converter,
    ShardWriter,
    Source,
    StateDict,
    StoredWeights,
    layers,
)
from lightning_roundpipe.messages import first_line, gib, plural
from lightning_roundpipe.model.quantize import without_progress_bars

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

MAX_SHARD_SIZE = 5 * 10**9
"""Bytes of a safetensors file, unless another number is asked for."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What was written: its folder, what it holds, in words, and what the user should know."""

    folder: Path
    contents: str
    notes: tuple[str, ...]


def export(
    run: str | Path,
    to: str | Path,
    *,
    ckpt: str | Path | None = None,
    base: str | None = None,
    dtype: Dtype = "auto",
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Exported:
    """Write what was trained to the folder ``to``, as a Hugging Face model, with adapters merged into its weights.

    Args:
        run: a folder of ``roundpipe-train``, a folder of PEFT's adapters, or a checkpoint of any Lightning module that
            has the Hugging Face model, or the ``PeftModel``, as an attribute.
        to: a new folder, or an empty one.
        ckpt: the run's checkpoint; None: the best if the run looked for one, else the newest.
        base: the base model, a folder or a name on the Hugging Face hub; None: as the run or the adapters say.
        dtype: dtype of the weights. ``"auto"``: as the base model's files have it.
        max_shard_size: bytes of a safetensors file. One file's weights are held in memory at a time.

    Raises:
        ValueError: a setting is invalid, or does not fit what was trained.
        OSError: a file cannot be read or written.
    """
    trained = find_trained(run, ckpt, base)
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"dtype={dtype!r} must be one of auto, {', '.join(_DTYPES)}.")
    final = refuse_taken(to, "to")
    with without_progress_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about a model without weights
        job = _Job(trained, _DTYPES.get(dtype))
        with _writing(to):
            unfinished = final.with_name(f"{final.name}.{os.getpid()}.unfinished")
            unfinished.mkdir(parents=True)
            try:
                job.write(unfinished, max_shard_size)
                for path in unfinished.iterdir():  # safetensors lets no one else read what it writes
                    path.chmod(unfinished.stat().st_mode & 0o666)
                if final.is_dir():
                    final.rmdir()
                unfinished.rename(final)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(final, job.contents, (*trained.notes, *job.notes))


# -- what is written ---------------------------------------------------------------------------------------------------


class _Job:
    """What is to be written, checked and ready. ``contents``, ``notes``: as in `Exported`."""

    def __init__(self, trained: Trained, dtype: torch.dtype | None) -> None:
        self._trained, self._dtype = trained, dtype
        self._model = skeleton_of(trained.base.config)
        self._shared = shared_names(self._model)
        self.notes: list[str] = []
        self._adapters: Adapters | None = None
        self.contents = "all weights"
        if trained.adapters is not None:
            self._adapters = Adapters(copy.deepcopy(self._model), *trained.adapters, trained.where)
            self.contents = f"adapters of {plural(self._adapters.modules, 'module')}"
        self._own_tokenizer = trained.tokenizer and read_tokenizer(trained.tokenizer, trained.where)
        self._check_shared()
        self._source = self._find_source()
        self._converter = Converter(self._model, self._source)
        where = trained.where if trained.adapters is None else trained.base.setting
        self._converter.check(self._shared, where)
        self._dtypes = {name: spec.dtype for name, spec in self._source.specs.items()}
        if trained.adapters is None and trained.base.folder is not None:  # trained weights are written as these are
            stored = self._stored(trained.base.folder)
            self._dtypes = {name: spec.dtype for name, spec in stored.specs.items()}

    def write(self, folder: Path, max_shard_size: int) -> None:
        """Write the files to ``folder``."""
        writer = ShardWriter(folder, max_shard_size)
        for name, tensor in self._weights():
            writer.add(name, tensor)
        writer.finish()
        main = str(max(writer.sizes, key=lambda dtype: writer.sizes[dtype])).removeprefix("torch.")
        self._write_companions(folder, main)
        merged = "" if self._adapters is None else ", merged into the base model"
        self.contents += f"{merged}, in {main}"

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as they are written, a layer at a time."""
        written: set[tuple[str, ...]] = set()
        for names in layers(self._source.specs):
            layer = self._layer(names, written)
            for name in list(layer):
                yield name, layer.pop(name)  # nothing of it is held while the next is read

    def _layer(self, names: list[str], written: set[tuple[str, ...]]) -> dict[str, Tensor]:
        values = self._converter.parameters(self._source.read(names))
        self._settle_shared(values, written)
        if self._adapters is not None:
            self._adapters.merge(values)
        found = {}
        for name, tensor in self._converter.stored(values).items():
            own = self._dtypes.get(name, self._source.specs[names[0]].dtype)
            found[name] = tensor.to(self._dtype if self._dtype and own.is_floating_point else own).contiguous()
        return found

    def _settle_shared(self, values: dict[str, Tensor], written: set[tuple[str, ...]]) -> None:
        """Keep a parameter that has several names once, or under all of them where adapters tell these apart."""
        for names in self._shared:
            there = [name for name in names if name in values]
            if not there:
                continue
            value = values[there[0]]
            for name in there:
                del values[name]
            if names not in written:
                written.add(names)
                values |= {name: value.clone() for name in (names if self._untied(names) else there[:1])}

    def _untied(self, names: tuple[str, ...]) -> bool:
        return self._adapters is not None and not self._adapters.changed.isdisjoint(names)

    def _check_shared(self) -> None:
        ends = [cast(Any, self._model).get_input_embeddings(), cast(Any, self._model).get_output_embeddings()]
        embeddings = {id(end.weight) for end in ends if end is not None}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for names in self._shared:
            if self._untied(names) and id(parameters[names[0]]) not in embeddings:
                raise ValueError(
                    f"{self._trained.where}: {' and '.join(names)} are one weight, and adapters would change one of "
                    "them only. Such adapters cannot be merged: use them with PEFT."
                )

    def _find_source(self) -> Source:
        """Return the weights that are written, before adapters are merged."""
        base = self._trained.base
        if self._trained.adapters is None:
            aliases = {name for names in self._shared for name in names[1:]}
            return StateDict(state_of(self._trained.file, [n for n in self._model.state_dict() if n not in aliases]))
        if base.folder is not None:
            return self._stored(base.folder)
        assert base.load is not None
        state = base.load().state_dict()
        size = sum(tensor.nbytes for tensor in state.values())
        self.notes.append(f"the base model was held in memory as a whole ({gib(size)})")
        return StateDict(lambda: state)

    def _stored(self, folder: Path) -> Source:
        """Return the weights in the base model's files."""
        setting = self._trained.base.setting
        if getattr(self._trained.base.config, "quantization_config", None):
            raise ValueError(f"{setting} is quantised: name the model in 16 bits, which it was made of, with base=.")
        return StoredWeights(folder, setting)

    def _write_companions(self, folder: Path, dtype: str) -> None:
        """Write the configuration, and what the base model has besides."""
        base, config = self._trained.base, copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__]
        config.dtype = dtype
        if any(map(self._untied, self._shared)):
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
        config.save_pretrained(folder)
        tokenizer = self._own_tokenizer or (base.tokenizer if base.folder is None else None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        names = ("generation_config.json", *(() if tokenizer else _TOKENIZER))
        for path in () if base.folder is None else (path for name in names for path in base.folder.glob(name)):
            shutil.copyfile(path, folder / path.name)


def skeleton_of(config: PretrainedConfig) -> PreTrainedModel:
    """Return the causal language model of ``config`` on the meta device, in fp32."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def shared_names(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


# -- the folder --------------------------------------------------------------------------------------------------------


@contextmanager
def _writing(to: str | Path) -> Iterator[None]:
    """Say in an error of the target's disk which setting it is about. What is read has errors of its own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"to={to} cannot be written: {first_line(error)}. Name a folder on a disk that has space and takes files."
        ) from error
