"""The export itself: checks what was asked for, writes to a folder beside the final one, and renames it at the end."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from lightning_roundpipe.export.exported_weights import Weights
from lightning_roundpipe.export.gguf_file import GgufFile, check_architecture
from lightning_roundpipe.export.layout import OfFiles, OfParameters
from lightning_roundpipe.export.merging import Adapters
from lightning_roundpipe.export.quantised import Dequantised, is_quantised, method
from lightning_roundpipe.export.shards import write_shards
from lightning_roundpipe.export.skeleton import Skeleton, once, skeleton_of
from lightning_roundpipe.export.trained import CheckpointFile, Trained
from lightning_roundpipe.export.weight_sources import Source, StateDict, WeightFiles
from lightning_roundpipe.messages import first_line, gib, plural

Format = Literal["safetensors", "gguf"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "q8_0"]

MAX_SHARD_SIZE = 5 * 10**9
"""Bytes of a safetensors file, unless another number is asked for."""

UNFINISHED = ".unfinished"
MARK = ".roundpipe-export"
"""A file in a folder that an export has not finished: only such a folder may be deleted."""
"""Suffix of a folder that is being written. A killed process leaves one behind; the next export removes it."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_COMPANIONS = ("generation_config.json", *_TOKENIZER)
"""Files of a model beside its weights and configuration."""

_WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", "model-*.gguf")
_OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "README.md")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where it is.
        files: names and bytes of the files.
        contents: what they hold, in words.
        notes: what the user should know.
        how: the statement that loads it.
        seconds: how long it took.
    """

    folder: Path
    files: tuple[tuple[str, int], ...]
    contents: str
    notes: tuple[str, ...]
    how: str
    seconds: float


def _no_progress(done: int, total: int) -> None:
    pass


def export(
    trained: Trained,
    to: str | Path,
    format: Format = "safetensors",
    dtype: Dtype = "auto",
    merge: bool = True,
    max_shard_size: int = MAX_SHARD_SIZE,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = _no_progress,
) -> Exported:
    """Write what was trained to the folder ``to``.

    Args:
        trained: what `from_run` or `from_checkpoint` returns.
        to: a new folder.
        format: ``"safetensors"``: a Hugging Face model; ``"gguf"``: one file for llama.cpp.
        dtype: dtype of the weights. ``"auto"``: as the base model's files have it, bfloat16 where those hold fewer
            bits, and float16 in a GGUF file. ``"q8_0"``: eight bits, in a GGUF file only.
        merge: merge adapters into the weights; otherwise write the adapters alone, as PEFT does.
        max_shard_size: bytes of a safetensors file. One file's weights are held in memory at a time.
        overwrite: replace a folder that is there already.
        progress: called with the bytes that are done and those of all weights.

    Raises:
        ValueError: a setting is invalid, or does not fit what was trained.
        OSError: a file cannot be written.
    """
    started = time.monotonic()
    final = Path(to).expanduser().absolute()
    final = final.resolve() if final.is_symlink() else final  # what a link points to can be replaced
    _check_settings(trained, format, dtype, merge)
    if merge:
        _ = trained.tokenizer  # read before anything is written
    _check_target(final, trained, to, overwrite)
    unfinished = final.with_name(final.name + UNFINISHED)
    _clear(unfinished, to)
    skeleton = skeleton_of(trained.base.config)
    try:
        with _writing(to):
            if not merge:
                contents, notes = _write_adapters(trained, skeleton, unfinished)
            else:
                contents, notes = _write_model(
                    trained, skeleton, unfinished, to, format, dtype, max_shard_size, progress
                )
            (unfinished / MARK).unlink()
            _replace(final, unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    files = tuple((path.name, path.stat().st_size) for path in sorted(final.iterdir()))
    how = _how(final, format if merge else "adapters")
    return Exported(final, files, contents, (*trained.notes, *notes), how, time.monotonic() - started)


def _how(folder: Path, kind: str) -> str:
    if kind == "gguf":
        return f"llama-cli -m {next(folder.glob('*.gguf'))}"
    if kind == "adapters":
        return f"PeftModel.from_pretrained(model, {str(folder)!r})"
    return f'AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype="auto")'


def _check_settings(trained: Trained, format: str, dtype: str, merge: bool) -> None:
    if format not in ("safetensors", "gguf"):
        raise ValueError(f"format={format!r} must be safetensors or gguf.")
    if dtype not in ("auto", "q8_0", *_DTYPES):
        raise ValueError(f"dtype={dtype!r} must be one of auto, {', '.join(_DTYPES)}, q8_0.")
    if dtype == "q8_0" and format != "gguf":
        raise ValueError("dtype=q8_0 is a format of GGUF files: set format=gguf, or another dtype.")
    if not merge and trained.adapters is None:
        raise ValueError(f"merge=false writes adapters, and {trained.where} has none: all weights were trained.")
    if not merge and (format != "safetensors" or dtype != "auto"):
        raise ValueError("merge=false writes adapters as PEFT does: leave format= and dtype= out.")


def _check_target(final: Path, trained: Trained, to: str | Path, overwrite: bool) -> None:
    for used in filter(None, (trained.base.folder, trained.file)):
        if used.resolve() == final.resolve() or final.resolve() in used.resolve().parents:
            raise ValueError(f"to={to} holds what is exported: name another folder.")
    if final.is_file():
        raise ValueError(f"to={to} is a file: name a new folder.")
    if os.path.ismount(final):
        raise ValueError(
            f"to={to} is the root of a disk, which the finished folder cannot replace: name a folder in it, such as "
            f"to={Path(to) / 'model'}."
        )
    if not final.is_dir() or not (there := sorted(path.name for path in final.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"to={to} is not empty (it holds {there[0]}): name a new folder, or set overwrite=true.")
    if foreign := _foreign(final, trained):
        what = f"the folder {foreign.name}" if foreign.is_dir() else foreign.name
        raise ValueError(
            f"to={to} holds {what}, which no export has written, and overwrite=true would delete it: name a new folder."
        )


def _clear(unfinished: Path, to: str | Path) -> None:
    """Delete what an export that was killed has left. Refuse to delete anything else."""
    if (unfinished / MARK).is_file():
        shutil.rmtree(unfinished)
    elif os.path.lexists(unfinished):
        raise ValueError(
            f"to={to} would be written to {unfinished.name} first, which is there already and is not the rest of an "
            "export: rename that, or name another folder."
        )


def _foreign(folder: Path, trained: Trained) -> Path | None:
    """Return something in ``folder`` that no export of this model has written."""
    known = {"config.json", *_WEIGHTS, *_COMPANIONS}
    with suppress(ValueError):  # adapters are written without the tokenizer, which may not be there any more
        if (tokenizer := trained.tokenizer or trained.base.tokenizer) is not None:
            known.update(tokenizer.vocab_files_names.values())
    if (folder / _OF_ADAPTERS[0]).is_file():
        known.update(_OF_ADAPTERS)
    paths = sorted(folder.iterdir())
    return next((path for path in paths if path.is_dir() or not any(fnmatch(path.name, name) for name in known)), None)


@contextmanager
def _writing(to: str | Path) -> Iterator[None]:
    """Say in an error of the target's disk which setting it is about. What is read has errors of its own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"to={to} cannot be written: {first_line(error)}. Name a folder on a disk that has space and takes files."
        ) from error


def _replace(final: Path, unfinished: Path) -> None:
    """Put the new folder in the place of the old one, which is deleted last: nothing is lost if one of these fails."""
    mask = os.umask(0)
    os.umask(mask)
    for path in unfinished.iterdir():
        path.chmod(0o666 & ~mask)  # safetensors lets nobody else read what it writes
    if not final.exists():
        unfinished.rename(final)
        return
    previous = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=final.parent)) / final.name
    try:
        final.rename(previous)
        try:
            unfinished.rename(final)
        except BaseException:
            previous.rename(final)
            raise
    finally:
        if final.exists():
            shutil.rmtree(previous.parent, ignore_errors=True)


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapters(trained: Trained, skeleton: Skeleton) -> Adapters | None:
    if trained.adapters is None:
        return None
    config, weights = trained.adapters
    return Adapters(skeleton.model, config, weights, trained.where)


def _write_adapters(trained: Trained, skeleton: Skeleton, folder: Path) -> tuple[str, tuple[str, ...]]:
    adapters = _adapters(trained, skeleton)
    assert adapters is not None
    _make_folder(folder)
    adapters.save(str(folder), trained.base.name)
    return f"adapters of {plural(len(adapters.modules), 'module')}", ()


# -- a whole model -----------------------------------------------------------------------------------------------------


def _write_model(
    trained: Trained,
    skeleton: Skeleton,
    folder: Path,
    to: str | Path,
    format: str,
    dtype: str,
    max_shard_size: int,
    progress: Callable[[int, int], None],
) -> tuple[str, tuple[str, ...]]:
    base = trained.base
    if format == "gguf":
        check_architecture(base.config)
    weights, notes = _weights(trained, skeleton, _DTYPES.get(dtype))
    merged = f"adapters of {plural(weights.modules, 'module')}, merged into the base model"
    what = "all weights" if trained.adapters is None else merged
    done = 0

    def came(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    if format == "gguf":
        name = folder.name.removesuffix(UNFINISHED)
        own = trained.tokenizer
        file = GgufFile(weights, base.config, dtype, name, own or base.tokenizer, base.gguf if own is None else None)
        total = file.nbytes
        _check_space(folder, total, to)
        _make_folder(folder)
        file.write(folder / f"model-{file.type}.gguf", came)
        return f"{what}, in {file.type}", notes
    total = weights.nbytes
    _check_space(folder, total, to)
    _make_folder(folder)
    write_shards(weights.stored(), weights.specs, folder, max_shard_size, came)
    main = _main_dtype(weights)
    _write_companions(trained, skeleton, folder, main, weights.untied)
    return f"{what}, in {main}", notes


def _main_dtype(weights: Weights) -> str:
    """Return the dtype that most bytes are in, which the configuration names."""
    sizes: Counter[torch.dtype] = Counter()
    for spec in weights.specs.values():
        sizes[spec.dtype] += spec.nbytes
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _weights(trained: Trained, skeleton: Skeleton, dtype: torch.dtype | None) -> tuple[Weights, tuple[str, ...]]:
    """Return the weights of the exported model, and what is to be said of them."""
    base = trained.base
    if trained.adapters is None:
        checkpoint = CheckpointFile(trained.file, skeleton)
        return _of_parameters(skeleton, checkpoint, None, dtype, _dtypes_of(trained), trained.where), ()
    if base.folder is None:
        assert base.load is not None
        in_memory: Source = StateDict(base.load().state_dict())
        size = gib(_nbytes(in_memory))
        if is_quantised(in_memory.specs):
            in_memory = Dequantised(in_memory, base.setting)
        if dtype is None and base.gguf is not None:
            dtype = torch.bfloat16
        adapters = _adapters(trained, skeleton)
        note = f"the base model was held in memory as a whole ({size}): {base.source}"
        return _of_parameters(skeleton, in_memory, adapters, dtype, {}, base.setting), (note,)
    source, notes = _files(trained, base.folder)
    layout = OfFiles(skeleton.model, source.specs)
    adapters = _adapters(trained, skeleton)
    return Weights(skeleton, source, layout, adapters, dtype, {}, base.setting), notes


def _of_parameters(
    skeleton: Skeleton,
    source: Source,
    adapters: Adapters | None,
    dtype: torch.dtype | None,
    dtypes: dict[str, torch.dtype],
    setting: str,
) -> Weights:
    kept = {name: source.specs[name] for name in once(source.specs, skeleton) if name in skeleton.shapes}
    return Weights(skeleton, source, OfParameters(skeleton.model, kept), adapters, dtype, dtypes, setting)


def _files(trained: Trained, folder: Path) -> tuple[Source, tuple[str, ...]]:
    """Return the weights in the base model's files, as numbers."""
    base = trained.base
    source: Source = WeightFiles(folder, base.setting)
    quantised = method(base.config.to_dict())
    if quantised not in (None, "bitsandbytes"):
        raise ValueError(
            f"{base.setting} is quantised by {quantised}, which is not unpacked here. Name the model that it was "
            "made of, in 16 bits, with base=."
        )
    if not is_quantised(source.specs):
        return source, ()
    wide = getattr(base.config, "dtype", None)
    unpacked = Dequantised(source, base.setting, wide if wide in (torch.float16, torch.bfloat16) else torch.bfloat16)
    return unpacked, (f"the base model: {plural(len(unpacked.quantised), 'weight')} unpacked from 4 or 8 bits",)


def _dtypes_of(trained: Trained) -> dict[str, torch.dtype]:
    """Return the dtypes of the base model's files, which trained weights are written in."""
    if trained.base.folder is None:
        return {}
    source, _ = _files(trained, trained.base.folder)
    return {name: spec.dtype for name, spec in source.specs.items()}


def _nbytes(source: Source) -> int:
    return sum(spec.nbytes for spec in source.specs.values())


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _check_space(folder: Path, needed: int, to: str | Path) -> None:
    there = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"to={to} needs {gib(needed)}, and {there} has {gib(free)} left: name a folder on another disk, or a "
            "smaller dtype=."
        )


def _write_companions(trained: Trained, skeleton: Skeleton, folder: Path, dtype: str, untied: bool) -> None:
    """Write the configuration, and what the base model has besides."""
    config: Any = copy.deepcopy(skeleton.model.config)
    config.architectures = [type(skeleton.model).__name__]
    config.dtype = dtype
    if untied:
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    base, tokenizer = trained.base, trained.tokenizer or trained.base.tokenizer
    names = _COMPANIONS if trained.tokenizer is None else [name for name in _COMPANIONS if name not in _TOKENIZER]
    for path in () if base.folder is None else (base.folder / name for name in names):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if tokenizer is not None and not any(folder.glob("tokenizer*")) and not (folder / "vocab.json").is_file():
        tokenizer.save_pretrained(str(folder))
