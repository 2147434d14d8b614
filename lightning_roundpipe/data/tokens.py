"""Tokens of files: read and tokenised once by ``datasets``, which caches them on disk and maps them into memory.

Rows can be laid out, shuffled, counted and resumed only if the lengths of all records are known, which requires
tokenising them all. So this happens first, file after file, which also finds bad records before training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_roundpipe.data.encoding import Encoder
from lightning_roundpipe.data.records import BadRecord, Text, read_record
from lightning_roundpipe.messages import first_line

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_KINDS = ".jsonl, .json, .parquet or .txt"
_COLUMNS = {"length": "int32", "place": "string", "digest": "int64", "prompt": "bool", "error": "string"}
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
    if (path / "dataset_dict.json").is_file():
        raise ValueError(f"{setting}: {str(path)!r} holds a DatasetDict of splits. Name the folder of one split.")
    saved = (path / "dataset_info.json").is_file()  # by `Dataset.save_to_disk`
    root = path if path.is_dir() and not saved else path.parent
    found = [path] if root is not path else sorted(file for file in path.rglob("*") if file.is_file())
    names = {str(file.relative_to(root)): file for file in found}
    names = {name: file for name, file in names.items() if not any(part.startswith(".") for part in Path(name).parts)}
    sources = {name: file for name, file in names.items() if saved or file.suffix in _BUILDERS}
    if not sources:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} holds no file that ends in {_KINDS}. Name such a file or a folder."
        )
    import datasets  # takes two seconds

    tables = [_tokenised(source, name, setting, encoder) for name, source in sources.items()]
    return datasets.concatenate_datasets(tables), len(sources), sorted(names.keys() - sources.keys())


def column(table: Dataset, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers. ``datasets`` itself takes seconds for a million selected rows."""
    whole: npt.NDArray[Any] = table.data.column(name).to_numpy()
    return whole if table._indices is None else whole[table._indices.column(0).to_numpy()]


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
    kinds = {key: datasets.Value(kind) for key, kind in _COLUMNS.items()}
    tokens: Dataset = records.map(
        _row,
        with_indices=True,
        fn_kwargs={"encoder": encoder, "name": name},  # the cache's key has all of the encoder, with its tokenizer
        remove_columns=records.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("int32")), **kinds}),
        writer_batch_size=100,  # long texts are large
    )
    reasons: dict[str, list[int]] = {}
    for number, error in enumerate(column(tokens, "error"), 1):
        if error is not None:
            reasons.setdefault(error, []).append(number)
    if reasons:
        named = [
            f"record {numbers[0]:,}{f' and {len(numbers) - 1:,} more' if len(numbers) > 1 else ''}: {reason}"
            for reason, numbers in [*reasons.items()][:_NAMED]
        ]
        more = "; and others" if len(reasons) > _NAMED else ""
        raise ValueError(
            f"{setting}: {name} has records that cannot be used: {'; '.join(named)}{more}. Correct or remove them."
        )
    return tokens.remove_columns("error")


def _row(record: Mapping[str, Any], index: int, encoder: Encoder, name: str) -> dict[str, Any]:
    """Return a record's row, without tokens and with an ``error`` if the record is invalid."""
    content, tokens, error = None, np.empty(0, np.int32), None
    try:
        content = read_record(record)
        tokens = encoder.encode(content)
    except BadRecord as bad:
        error = str(bad)
    return {
        "tokens": tokens,
        "length": len(tokens),
        "place": f"{name} record {index + 1}",
        "digest": int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), signed=True),
        "prompt": not isinstance(content, Text) or bool(content.prompt),
        "error": error,
    }
