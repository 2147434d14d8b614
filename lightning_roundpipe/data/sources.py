"""Reads records from text files, JSON, Parquet and folders of the library ``datasets``, one at a time.

The loaders of ``datasets`` infer one schema for a whole file, and their error for a record that does not fit names
neither line nor field. So values are read here, and a record that cannot be used is yielded as a ``BadRecord``: the
caller reports several at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_roundpipe.data.records import BadRecord, Fields, Record, Text, Wrong
from lightning_roundpipe.messages import first_line

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
KINDS = ".jsonl, .json, .parquet or .txt"
"""``SUFFIXES`` in words."""

PIECE = 2**20
"""Bytes after which a text is cut, at the end of a line: long texts cost tokenizers time and memory."""


def find_sources(path: Path, setting: str) -> tuple[list[Path], list[Path]]:
    """Return what to read, sorted (files, and folders that ``datasets`` saved), and the files of other kinds.

    Args:
        path: a file, a saved folder, or a folder that is searched recursively.
        setting: name of the setting, for messages.

    Raises:
        ValueError: a folder holds a ``DatasetDict``, which has several data sets.
    """
    if path.is_file():
        return ([path], []) if path.suffix in SUFFIXES else ([], [path])
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise ValueError(
            f"{setting}: {str(path)!r} holds a DatasetDict of {', '.join(splits) or 'nothing'}. Name the folder of "
            f"one split, such as {str(path / (splits or ['train'])[0])!r}; data.validation_path takes another."
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return [path], []
    found: list[Path] = []
    others: list[Path] = []
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            inside, beside = find_sources(entry, setting)
            found, others = found + inside, others + beside
        elif entry.is_file() and not entry.name.startswith("."):
            (found if entry.suffix in SUFFIXES else others).append(entry)
    return found, others


def read_records(source: Path, fields: Fields) -> Iterator[Record | BadRecord]:
    """Yield the records of ``source``, or the pieces of its text."""
    if source.suffix == ".txt" and source.is_file():
        yield from _pieces(source)
        return
    empty, unit = True, "record"
    values: Iterator[tuple[int, Any]]
    if source.is_dir() or source.suffix == ".parquet":
        values = _rows(source)
    elif source.suffix == ".json" and _is_list(source):
        values = _list(source)
    else:
        values, unit = _json_lines(source), "line"
    for number, value in values:
        empty = False
        try:
            if isinstance(value, Wrong):
                raise value
            yield Record(f"{unit} {number}", *fields.read(value))
        except Wrong as wrong:
            yield BadRecord(f"{unit} {number}", str(wrong))
    if empty:
        yield BadRecord(f"{unit} 1", "it holds no record")


# -- JSON --------------------------------------------------------------------------------------------------------------


def _is_list(file: Path) -> bool:
    """Return whether a ``.json`` file is one list. Some have a record on each line."""
    with file.open("rb") as begin:
        return begin.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _list(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(_parsed(path.read_text("utf-8-sig"), "the file"), 1)
    except UnicodeDecodeError as error:
        yield 1, Wrong(f"the file is not UTF-8 (byte {error.start + 1:,})")
    except Wrong as wrong:
        yield 1, wrong


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    first = True
    for number, line in _lines(path):
        if isinstance(line, str) and not line.strip():
            continue
        value: Any = line
        if isinstance(line, str):
            try:
                value = _parsed(line, "the line")
            except Wrong as wrong:
                value = wrong
            if first and line.lstrip().startswith("["):
                value = Wrong("the file is a JSON list: rename it to .json")
            elif first and isinstance(value, Wrong) and path.suffix == ".json":
                value = Wrong("the file is neither a JSON list of records nor has it one on each line")
        yield number, value
        if first and isinstance(value, Wrong) and str(value).startswith("the file"):
            return  # none of its lines would be a record
        first = False


def _lines(path: Path) -> Iterator[tuple[int, str | Wrong]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                yield 1, Wrong("the file is UTF-16: write it as UTF-8")
                return
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, Wrong(f"the line is not UTF-8 (byte {error.start + 1} of the line)")


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}" if "\n" in text.rstrip() else f"column {error.colno}"
        raise Wrong(f"{what} is not JSON ({error.msg}, {place})") from None
    except RecursionError:
        raise Wrong("its JSON is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ``Wrong`` for duplicate keys."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Wrong(f'"{next(key for key in keys if keys.count(key) > 1)}" is there twice')
    return values


# -- text and tables ---------------------------------------------------------------------------------------------------


def _pieces(path: Path) -> Iterator[Record | BadRecord]:
    """Yield the text in pieces that end at line ends."""
    held: list[str] = []
    begin, size, first = 1, 0, True
    for number, line in _lines(path):
        if isinstance(line, Wrong):
            yield BadRecord(f"line {number}", str(line))
            return
        if size >= PIECE:
            yield Record(f"line {begin}", Text("".join(held), first, last=False))
            begin, size, first, held = number, 0, False, []
        held.append(line)
        size += len(line)
    text = "".join(held)
    yield (
        Record(f"line {begin}", Text(text, first))
        if text.strip() or not first
        else BadRecord("line 1", "the file is empty")
    )


def _rows(source: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a Parquet file, or of a folder that ``Dataset.save_to_disk`` wrote."""
    import datasets
    import pyarrow.parquet as pq

    number = 0
    try:
        if source.is_dir():
            batches: Any = datasets.load_from_disk(str(source)).with_format("arrow").iter(1024)
        else:
            batches = pq.ParquetFile(source).iter_batches(1024)
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield number, values
    except Exception as error:  # of many types, for a broken file
        yield number + 1, Wrong(f"it cannot be read ({first_line(error)}): copy or save it again")
