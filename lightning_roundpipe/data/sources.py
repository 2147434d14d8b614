"""Reads records from text files, JSON, Parquet and folders of the library ``datasets``, one at a time.

Text and JSON lines are read line by line, a JSON list and Parquet in pieces, a folder of ``datasets`` from its mapped
files: however large they are, only a small part is in memory. Only empty lines are skipped. A record that cannot be
used is yielded as a ``BadRecord``, so that the caller can report several at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_roundpipe.data.records import BadRecord, Fields, Record, Text, Wrong
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import first_line

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
KINDS = ".jsonl, .json, .parquet or .txt"
"""``SUFFIXES`` in words."""

LONGEST = 64 * 2**20
"""Most bytes of a line of JSONL, and most characters of a record in a JSON list."""

PIECE = 2**20
"""Length in characters from which a text is cut, at the end of a line: long texts cost tokenizers time and memory."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CUT = 16
"""An error this many characters before the end of the text in memory may be due to text that is not yet read."""


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
    if _is_saved(path, setting):
        return [path], []
    found: list[Path] = []
    others: list[Path] = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            inside, beside = find_sources(entry, setting)
            found += inside
            others += beside
        elif entry.is_file():
            (found if entry.suffix in SUFFIXES else others).append(entry)
    return found, others


def files_of(source: Path) -> list[Path]:
    """Return the files of a source."""
    return sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]


def unit_of(source: Path) -> str:
    """Return what a source's record numbers count: ``"line"`` or ``"record"``."""
    return "record" if source.is_dir() or source.suffix == ".parquet" or _is_list(source) else "line"


def read_records(source: Path, fields: Fields) -> Iterator[Record | BadRecord]:
    """Yield the records of ``source``, or the pieces of its text."""
    if source.is_dir():
        return _checked(_saved(source), fields)
    if source.suffix == ".parquet":
        return _checked(_parquet(source), fields)
    with source.open("rb") as begin:
        if begin.read(2) in _UTF_16:
            return iter([BadRecord(1, "the file is UTF-16: write it as UTF-8")])
    if source.suffix == ".txt":
        return _pieces(source)
    return _checked(_list(source) if _is_list(source) else _lines(source), fields)


def _checked(found: Iterator[tuple[int, Any]], fields: Fields) -> Iterator[Record | BadRecord]:
    """Yield records for values, and ``BadRecord`` for each ``Wrong``."""
    number = 0
    for number, values in found:
        if isinstance(values, Wrong):
            yield BadRecord(number, str(values))
            continue
        try:
            yield Record(number, *fields.read(values))
        except Wrong as wrong:
            yield BadRecord(number, str(wrong))
    if not number:
        yield BadRecord(1, "it holds no record")


# -- JSON --------------------------------------------------------------------------------------------------------------


def _is_list(file: Path) -> bool:
    """Return whether a ``.json`` file is one list. Some have a record on each line."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as begin:
        return begin.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        number, empty = 0, True
        while line := file.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                yield number, Wrong(f"the line is longer than {LONGEST // 2**20} MiB, and each is one record")
                return
            try:
                text = _decoded(line, "utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                if empty and text.lstrip().startswith("["):  # a list: none of its lines would be a record
                    yield number, Wrong("the file is a JSON list: rename it to .json")
                    return
                value = _value(text.rstrip())
            except Wrong as wrong:
                if empty and path.suffix == ".json":
                    yield number, Wrong("the file is neither a JSON list of records nor has it one on each line")
                    return
                value = wrong
            empty = False
            yield number, value


def _value(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Wrong(f"the line is not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise Wrong("its JSON is nested too deeply") from None


def _list(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the items of a JSON list, read in pieces."""
    text = _JsonText(path)
    number = 0
    try:
        text.skip("[")
        while text.next_is_not("]"):
            if number:
                text.skip(",")
            number += 1
            yield number, text.value()
        text.skip("]")
        if text.next_is_not(""):
            raise Wrong(f"there is more after the end of the list{text.place()}")
    except Wrong as wrong:  # the position of the next record is unknown
        yield max(number, 1), wrong


class _JsonText:
    """The JSON text of a file, with only as much in memory as one value needs."""

    def __init__(self, path: Path) -> None:
        self._pieces = _text_of(path)
        self._text = ""
        self._at = 0
        self._line = 1

    def next_is_not(self, wanted: str) -> bool:
        """Return whether the next character after white space is not ``wanted``. ``""`` stands for the file's end."""
        while True:
            rest = self._text[self._at :].lstrip(" \t\r\n")
            self._at = len(self._text) - len(rest)
            if rest or not self._read():
                return rest[:1] != wanted

    def skip(self, wanted: str) -> None:
        if self.next_is_not(wanted):
            there = repr(self._text[self._at]) if self._at < len(self._text) else "the end of the file"
            raise Wrong(f"the file is not JSON: {wanted!r} is expected, and there is {there}{self.place()}")
        self._at += 1

    def value(self) -> Any:
        """Return the next value."""
        self.next_is_not("")
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _CUT or error.msg.startswith("Unterminated string")
                long = len(self._text) - self._at > LONGEST
                if not cut or long or not self._read():
                    what = f"it is longer than {LONGEST // 2**20} MiB" if long else error.msg
                    raise Wrong(f"the file is not JSON: {what}{self.place(error.pos)}") from None
            except RecursionError:
                raise Wrong(f"its JSON is nested too deeply{self.place()}") from None

    def place(self, position: int | None = None) -> str:
        """Return, for messages, the line of a position in the text in memory; by default of the next character."""
        return f" (line {self._line + self._text.count(chr(10), 0, self._at if position is None else position)})"

    def _read(self) -> bool:
        """Drop the text that is used and add a piece. Return False at the file's end."""
        piece = next(self._pieces, "")
        self._line += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + piece
        self._at = 0
        return bool(piece)


def _text_of(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as file:
        while True:
            piece = file.read(PIECE)
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                at = file.tell() - len(piece) + error.start
                raise Wrong(f"the file is not UTF-8 (near byte {at + 1:,})") from None
            if text:
                yield text
            elif not piece:
                return


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ``Wrong`` for duplicate keys."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise Wrong(f'"{key}" is there twice')
        values[key] = value
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


# -- text --------------------------------------------------------------------------------------------------------------


def _pieces(path: Path) -> Iterator[Record | BadRecord]:
    """Yield the text in pieces that end at line ends. Each is held back until it is known whether it is the last."""
    held: Record | None = None
    begin, number, size, lines = 1, 1, 0, []
    with path.open("rb") as file:
        encoding = "utf-8-sig"
        while line := file.readline(PIECE):
            for _ in range(3):  # a line longer than a piece is cut, but not within a character
                if (file.peek(1)[:1] or b"\0")[0] & 0xC0 == 0x80:
                    line += file.read(1)
            try:
                text = _decoded(line, encoding)
            except Wrong as wrong:
                yield BadRecord(number, str(wrong))
                return
            encoding = "utf-8"
            lines.append(text)
            size += len(text)
            number += line.endswith(b"\n")
            if size >= PIECE:
                if held:
                    yield held
                held = Record(begin, Text("".join(lines), first=held is None, last=False))
                begin, size, lines = number, 0, []
    text = "".join(lines)
    if held is None and not text.strip():
        yield BadRecord(1, "the file is empty")
    elif not text:
        assert held is not None and isinstance(held.content, Text)
        yield Record(held.number, Text(held.content.text, held.content.first, last=True))
    else:
        if held:
            yield held
        yield Record(begin, Text(text, first=held is None))


def _decoded(line: bytes, encoding: str) -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise Wrong(f"the line is not UTF-8 (byte {error.start + 1} of the line)") from None


# -- tables ------------------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    pq = need("pyarrow.parquet", f"{path.name} is a Parquet file")
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        yield number + 1, Wrong(f"the file cannot be read as Parquet ({first_line(error)}): copy it again")


def _is_saved(folder: Path, setting: str) -> bool:
    """Return whether ``Dataset.save_to_disk`` wrote the folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ValueError(
            f"{setting}: {str(folder)!r} holds a DatasetDict of {', '.join(splits) or 'nothing'}. Name the folder of "
            f"one split, such as {str(folder / (splits or ['train'])[0])!r}; data.validation_path takes another."
        )
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved(folder: Path) -> Iterator[tuple[int, Any]]:
    datasets = need("datasets", f"{folder.name} is a folder that Dataset.save_to_disk() wrote")
    number = 0
    try:
        for values in datasets.load_from_disk(str(folder)):
            number += 1
            yield number, values
    except Exception as error:  # the library raises various errors for a broken folder
        yield number + 1, Wrong(f"the folder cannot be read ({first_line(error)}): save it again")
