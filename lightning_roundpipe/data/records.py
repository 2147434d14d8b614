"""Records of text files and JSONL files, one at a time, and what is wrong with those that are none.

A file is read line by line, a text in pieces: however large it is, little of it is in memory at a time. Nothing is
skipped but empty lines. What cannot be used comes as a ``BadRecord``, so that whoever reads can name several at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

SUFFIXES = (".jsonl", ".txt")

LONGEST_LINE = 64 * 2**20
"""Bytes of a line of JSONL. A longer one is no record: most likely the file is one JSON list."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

PIECE = 2**20
"""Characters from which a text is cut, at the end of a line: tokenizers take time and memory for long texts."""


@dataclass(frozen=True)
class Text:
    """Text to be learnt as a whole: a ``"text"``, or a piece of a text file, the first or the last one perhaps."""

    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation, as chat templates take it."""

    messages: list[dict[str, Any]]


Content: TypeAlias = Text | Completion | Chat


@dataclass(frozen=True)
class Record:
    """One record, the line on which it begins, and the keys beside it that nobody reads."""

    line: int
    content: Content
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BadRecord:
    """A line that is no record, and why."""

    line: int
    reason: str


class _Wrong(Exception):
    """The reason why a record cannot be used."""


def find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to read, sorted, and those in the folder that are of another kind. A file may be named by itself."""
    if path.is_file():
        return ([path], []) if path.suffix in SUFFIXES else ([], [path])
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return [file for file in files if file.suffix in SUFFIXES], [file for file in files if file.suffix not in SUFFIXES]


def read_records(file: Path) -> Iterator[Record | BadRecord]:
    """What is in ``file``: a record for each line of JSONL, the pieces of one text otherwise."""
    with file.open("rb") as begin:
        if begin.read(2) in _UTF_16:
            return iter([BadRecord(1, "the file is UTF-16; write it as UTF-8")])
    return _lines(file) if file.suffix == ".jsonl" else _pieces(file)


def _lines(path: Path) -> Iterator[Record | BadRecord]:
    with path.open("rb") as file:
        number, empty = 0, True
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                yield BadRecord(
                    number, f"the line is longer than {LONGEST_LINE // 2**20} MiB; JSONL has one per record"
                )
                return
            try:
                text = _decoded(line, "utf-8-sig" if number == 1 else "utf-8")
                if empty and text.strip() == "[":  # nothing that follows would be a record
                    yield BadRecord(number, "the file is one JSON list; JSONL has each record on a line of its own")
                    return
                if text.strip():
                    empty = False
                    yield _record(number, text)
            except _Wrong as wrong:
                empty = False
                yield BadRecord(number, str(wrong))
    if empty:
        yield BadRecord(1, "the file is empty")


def _pieces(path: Path) -> Iterator[Record | BadRecord]:
    """The text in pieces that end where a line does. Each is held back until it is known whether it is the last."""
    held: Record | None = None
    begin, number, size, lines = 1, 1, 0, []
    with path.open("rb") as file:
        encoding = "utf-8-sig"
        while line := file.readline(PIECE):
            for _ in range(3):  # a line that is longer than a piece is cut, but not within a character
                if (file.peek(1)[:1] or b"\0")[0] & 0xC0 == 0x80:
                    line += file.read(1)
            try:
                text = _decoded(line, encoding)
            except _Wrong as wrong:
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
        yield Record(held.line, Text(held.content.text, held.content.first, last=True))
    else:
        if held:
            yield held
        yield Record(begin, Text(text, first=held is None))


def _decoded(line: bytes, encoding: str) -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise _Wrong(f"no UTF-8 (byte {error.start + 1} of the line)") from None


def _record(number: int, text: str) -> Record:
    try:
        values = json.loads(text.rstrip(), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise _Wrong(f"no JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise _Wrong("no record (its JSON is nested too deeply)") from None
    if not isinstance(values, dict):
        raise _Wrong(f"no JSON object but a {type(values).__name__}")
    kinds = [keys for keys in ({"text"}, {"prompt", "completion"}, {"messages"}) if keys & values.keys()]
    if len(kinds) != 1:
        which = "has several of" if kinds else "has none of"
        raise _Wrong(f'the record {which} "text", "prompt" with "completion", and "messages"')
    unread = frozenset(values.keys() - kinds[0])
    if "text" in values:
        return Record(number, Text(_string(values, "text")), unread)
    if "messages" in values:
        return Record(number, Chat(_messages(values["messages"])), unread)
    return Record(
        number, Completion(_string(values, "prompt", may_be_empty=True), _string(values, "completion")), unread
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, none of whose values another one replaces."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Wrong(f'"{key}" is there twice')
        values[key] = value
    return values


def _string(values: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    if key not in values:
        raise _Wrong(f'"{key}" is missing')
    value = values[key]
    if not isinstance(value, str):
        raise _Wrong(f'"{key}" is no text but a {type(value).__name__}')
    if not may_be_empty and not value.strip():
        raise _Wrong(f'"{key}" is empty')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Wrong(f'"{key}" holds half of a character (a lone surrogate)') from None
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Wrong('"messages" is no list of messages')
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise _Wrong(f"message {number} is no JSON object but a {type(message).__name__}")
        try:
            role = _string(message, "role")
            _string(message, "content", may_be_empty=role != "assistant")
        except _Wrong as wrong:
            raise _Wrong(f"message {number}: {wrong}") from None
    return value
