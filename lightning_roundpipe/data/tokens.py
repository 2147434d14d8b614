"""Tokens of files: read and tokenised once by ``datasets``, which caches them on disk and maps them into memory.

Rows can be laid out, shuffled, counted and resumed only if the lengths of all records are known, which requires
tokenising them all. So this happens first, file after file, which also finds bad records before training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_roundpipe.data.encoding import Encoder
from lightning_roundpipe.data.records import BadRecord, Text, read_record
from lightning_roundpipe.messages import first_line

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 7
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_KINDS = ".jsonl, .json, .parquet or .txt"
_NAMED = 10
"""Most reasons that an error names, each with its first record."""


def read_tokens(path: Path, setting: str, encoder: Encoder) -> tuple[Dataset, int, list[str]]:
    """Return the records of a file or folder as tokens, from so many files, and the names of files that are not read.

    A row has the ``tokens`` of a record (see ``encoding.Tokens``), their number (``length``), the file and number of
    the record (``place``), a ``digest`` of the tokens, and whether there is a ``prompt``.

    Raises:
        FileNotFoundError: there is nothing to read.
        ValueError: some records are invalid; the message names them and the ``setting``.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{setting}={str(path)!r} is not there. Name a file that ends in {_KINDS}, or a folder of such."
        )
    found = [path] if path.is_file() else [*_files(path, setting)]
    sources = [file for file in found if file.is_dir() or file.suffix in _BUILDERS]
    if not sources:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} holds no file that ends in {_KINDS}. Name such a file or a folder."
        )
    import datasets  # takes two seconds

    root = path if path.is_dir() and path not in sources else path.parent
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        tables = [_tokenised(source, str(source.relative_to(root)), setting, encoder) for source in sources]
    finally:
        if not bars:
            datasets.enable_progress_bars()
    others = [str(file.relative_to(root)) for file in found if file not in sources]
    return datasets.concatenate_datasets(tables), len(sources), others


def column(table: Dataset, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers. ``datasets`` itself takes seconds for a million selected rows."""
    whole: npt.NDArray[Any] = table.data.column(name).to_numpy()
    return whole if table._indices is None else whole[table._indices.column(0).to_numpy()]


def _files(folder: Path, setting: str) -> Iterator[Path]:
    """Yield the files below ``folder``, sorted, and the folders that ``Dataset.save_to_disk`` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ValueError(
            f"{setting}: {str(folder)!r} holds a DatasetDict of {', '.join(splits) or 'nothing'}. Name the folder of "
            f"one split, such as {str(folder / (splits or ['train'])[0])!r}; data.validation_path takes another."
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _files(entry, setting)
        elif entry.is_file() and not entry.name.startswith("."):
            yield entry


def _tokenised(source: Path, name: str, setting: str, encoder: Encoder) -> Dataset:
    """Return the tokens of a file or saved folder. A text is one record."""
    import datasets

    try:
        if source.is_dir():
            records: Any = datasets.load_from_disk(str(source))
        else:
            whole = {"sample_by": "document"} if source.suffix == ".txt" else {}
            records = datasets.load_dataset(_BUILDERS[source.suffix], data_files=str(source), split="train", **whole)
        len(records) and records[len(records) - 1]
    except Exception as error:  # of many types, for a broken file
        cause = error.__cause__ or error
        raise ValueError(
            f"{setting}: {name} cannot be read ({first_line(cause)}). Correct it, or save it again."
        ) from error
    if not len(records):
        raise ValueError(f"{setting}: {name} holds no record. Correct it, or save it again.")
    made_from = [_FORMAT, records._fingerprint, name, encoder.settings]
    kinds = {"tokens": "int32", "length": "int32", "place": "string", "digest": "int64", "prompt": "bool"}
    features = {key: datasets.Value(kind) for key, kind in kinds.items()}
    tokens: Dataset = records.map(
        partial(_encoded, encoder, name, setting),
        with_indices=True,
        batched=True,
        remove_columns=records.column_names,
        features=datasets.Features({**features, "tokens": datasets.List(features["tokens"])}),
        writer_batch_size=100,  # long texts are large
        new_fingerprint=hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32],
    )
    return tokens


def _encoded(
    encoder: Encoder, name: str, setting: str, columns: dict[str, list[Any]], indices: list[int]
) -> dict[str, list[Any]]:
    """Return the tokens of some records, or raise ``ValueError`` about the invalid ones."""
    rows: list[dict[str, Any]] = []
    bad: dict[str, list[int]] = {}
    for index, values in zip(indices, zip(*columns.values(), strict=True), strict=True):
        try:
            content = read_record(dict(zip(columns, values, strict=True)))
            tokens = encoder.encode(content)
        except BadRecord as error:
            bad.setdefault(str(error), []).append(index + 1)
            continue
        largest = np.maximum(tokens, ~tokens).max()
        if encoder.vocab_size is not None and largest >= encoder.vocab_size:
            raise ValueError(
                f"{setting}: the tokenizer makes token {largest}, and the model's vocabulary has "
                f"{encoder.vocab_size}. Set data.tokenizer to that of the model."
            )
        digest = int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), signed=True)
        prompted = not isinstance(content, Text) or bool(content.prompt)
        rows.append({"tokens": tokens, "length": len(tokens), "place": f"{name} record {index + 1}"})
        rows[-1] |= {"digest": digest, "prompt": prompted}
    if bad:
        named = [
            f"record {numbers[0]:,}{f' and {len(numbers) - 1:,} more' if len(numbers) > 1 else ''}: {reason}"
            for reason, numbers in [*bad.items()][:_NAMED]
        ]
        more = "; and others" if len(bad) > _NAMED else ""
        raise ValueError(
            f"{setting}: {name} has records that cannot be used: {'; '.join(named)}{more}. Correct or remove them."
        )
    return {key: [row[key] for row in rows] for key in rows[0]}
