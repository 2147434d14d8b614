"""Tokens of files: read and tokenised once by ``datasets``, which caches them on disk, and read by record number.

Rows can be laid out, shuffled, counted and resumed only if the lengths of all records are known, which requires
tokenising them all. So this happens first, file after file, which also finds bad records before training. The tokens
are mapped into memory, never read as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_roundpipe.data.encoding import Encoder, Tokens
from lightning_roundpipe.data.records import BadRecord, Text, read_record
from lightning_roundpipe.messages import first_line

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 6
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_KINDS = ".jsonl, .json, .parquet or .txt"
_NAMED = 10
"""Most reasons that an error names, each with its first record."""

Whole = npt.NDArray[np.int64]


class TokenStore:
    """The tokens of all records under a path, from so many files. ``others``: names of files that are not read."""

    def __init__(self, table: Dataset, files: int, others: Sequence[str]) -> None:
        import pyarrow.compute as pc

        self._table = table.with_format("numpy", columns=["tokens"])
        self.files, self.others = files, others
        self.lengths: Whole = pc.list_value_length(table.data.column("tokens")).to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, records: Whole) -> list[Tokens]:
        """Return the tokens of these records; see ``encoding.Tokens``."""
        return [np.asarray(tokens, np.int32) for tokens in self._table[records.tolist()]["tokens"]]

    def column(self, name: str) -> Any:
        """Return one of ``digest``, ``largest`` and ``prompt`` of all records."""
        return self._table.data.column(name).to_numpy()

    def place(self, record: int) -> str:
        """Return file and number of a record, for messages."""
        return str(self._table.data.column("place")[int(record)].as_py())


def open_store(path: Path, setting: str, encoder: Encoder) -> TokenStore:
    """Return the tokens of the file or folder ``path``, from an earlier run if there was one.

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
    tables = []
    try:
        for source in sources:
            name = str(source.relative_to(root))
            records = _read(source, f"{setting}: {name}")
            tables.append(_tokenised(records, name, setting, encoder))
    finally:
        if not bars:
            datasets.enable_progress_bars()
    others = [str(file.relative_to(root)) for file in found if file not in sources]
    return TokenStore(datasets.concatenate_datasets(tables), len(sources), others)


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
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, setting)


def _read(source: Path, where: str) -> Dataset:
    """Return the records of a file or saved folder. A text is one record."""
    import datasets

    try:
        if source.is_dir():
            found: Any = datasets.load_from_disk(str(source))
        else:
            whole = {"sample_by": "document"} if source.suffix == ".txt" else {}
            found = datasets.load_dataset(_BUILDERS[source.suffix], data_files=str(source), split="train", **whole)
        len(found) and found[len(found) - 1]
    except Exception as error:  # of many types, for a broken file
        cause = error.__cause__ or error
        raise ValueError(f"{where} cannot be read ({first_line(cause)}). Correct it, or save it again.") from error
    if not len(found):
        raise ValueError(f"{where} holds no record. Correct it, or save it again.")
    return found


def _tokenised(records: Dataset, name: str, setting: str, encoder: Encoder) -> Dataset:
    """Return the tokens of a file's records."""
    import datasets

    made_from = [_FORMAT, records._fingerprint, name, encoder.settings]
    return records.map(
        partial(_encoded, encoder, name, setting),
        with_indices=True,
        batched=True,
        remove_columns=records.column_names,
        features=datasets.Features(
            tokens=datasets.List(datasets.Value("int32")),
            place=datasets.Value("string"),
            digest=datasets.Value("int64"),
            largest=datasets.Value("int32"),
            prompt=datasets.Value("bool"),
        ),
        writer_batch_size=100,  # long texts are large
        new_fingerprint=hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32],
    )


def _encoded(
    encoder: Encoder,
    name: str,
    setting: str,
    columns: dict[str, list[Any]],
    indices: list[int],
) -> dict[str, list[Any]]:
    """Return the tokens of some records, or raise ``ValueError`` about the invalid ones."""
    items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows: dict[str, list[Any]] = {key: [] for key in ("tokens", "place", "digest", "largest", "prompt")}
    bad: dict[str, list[int]] = {}
    for index, item in zip(indices, items, strict=True):
        try:
            content = read_record(item)
            tokens = encoder.encode(content)
        except BadRecord as error:
            bad.setdefault(str(error), []).append(index + 1)
            continue
        rows["tokens"].append(tokens)
        rows["place"].append(f"{name} record {index + 1}")
        rows["digest"].append(int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), signed=True))
        rows["largest"].append(int(np.maximum(tokens, ~tokens).max(initial=0)))
        rows["prompt"].append(not isinstance(content, Text) or bool(content.prompt))
    if bad:
        named = [
            f"record {numbers[0]:,}{f' and {len(numbers) - 1:,} more' if len(numbers) > 1 else ''}: {reason}"
            for reason, numbers in [*bad.items()][:_NAMED]
        ]
        more = "; and others" if len(bad) > _NAMED else ""
        raise ValueError(
            f"{setting}: {name} has records that cannot be used: {'; '.join(named)}{more}. Correct or remove them."
        )
    return rows
