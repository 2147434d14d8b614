"""Tokens of files, made once and kept on disk, and read by record number.

Rows can be laid out, shuffled, counted and resumed only if the lengths of all records are known, which requires
tokenising them all. So this happens first, file after file, which also finds every bad record before training. The
tokens are mapped into memory, never read as a whole. The key of a store hashes what it was made from: files with sizes
and times, the tokenizer, how records are read, and what is learnt of them. When one of these changes, nothing has to be
deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_roundpipe.data.encoding import CannotEncode, Encoder, NoTemplate, Tokens
from lightning_roundpipe.data.records import BadRecord, Fields, Record, Text
from lightning_roundpipe.data.sources import KINDS, files_of, find_sources, read_records, unit_of
from lightning_roundpipe.messages import plural

_FORMAT = 2
_NAMED = 10
"""Most reasons that an error names, each with its first record. Further ones are counted."""

Whole = npt.NDArray[np.int64]


class TokenStore:
    """The records in a folder that ``open_store`` wrote. Other processes receive only its path and facts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "facts": self.facts}

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of all records, one after another; see ``encoding.Tokens``."""
        return np.memmap(self.folder / "tokens", dtype=np.int32, mode="r")

    @cached_property
    def starts(self) -> Whole:
        """Where each record begins in ``tokens``, and the length of ``tokens`` as the last entry."""
        return self._numbers("starts")

    @cached_property
    def digests(self) -> Whole:
        """A digest of each record's tokens, equal for records with the same text."""
        return self._numbers("digests")

    @property
    def lengths(self) -> Whole:
        return np.diff(self.starts)

    def place(self, record: int) -> str:
        """Return file and line (or number) of a record, for messages."""
        file = int(self._numbers("files")[record])
        return f"{self.facts['files'][file]} {self.facts['units'][file]} {int(self._numbers('numbers')[record])}"

    def _numbers(self, name: str) -> Whole:
        return np.memmap(self.folder / name, dtype=np.int64, mode="r")


def open_store(path: Path, setting: str, fields: Fields, encoder: Encoder, folder: Path) -> TokenStore:
    """Return the tokens of the file or folder ``path``, from an earlier run if there was one.

    Args:
        path: what to read.
        setting: name of the setting, for messages.
        fields: how records are read.
        encoder: makes the tokens.
        folder: the folder of all stores.

    Raises:
        FileNotFoundError: there is nothing to read.
        ValueError: some records are invalid; the message names them.
        ImportError: the files need a package that is not installed.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{setting}={str(path)!r} is not there. Name a file that ends in {KINDS}, or a folder of such."
        )
    found, others = find_sources(path, setting)
    if not found:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} holds no file that ends in {KINDS}. Name such a file or a folder."
        )
    root = path if path.is_dir() else path.parent
    left = [str(file.relative_to(root)) for file in others]
    sources = [_SourceFile(file, str(file.relative_to(root)) if file != root else file.name) for file in found]
    store = folder / _key(sources, [str(path.absolute()), *left], fields, encoder)
    if not (store / "facts.json").is_file():
        _check(setting, sources, fields)
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder, prefix="draft-"))
        try:
            facts = _write(draft, setting, sources, fields, encoder)
            (draft / "facts.json").write_text(json.dumps(facts | {"others": left}))
            _put(draft, store)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return TokenStore(store)


@dataclass(frozen=True)
class _SourceFile:
    """A file or a folder of ``datasets``, its name for messages, and what its record numbers count."""

    path: Path
    name: str

    @cached_property
    def unit(self) -> str:
        return unit_of(self.path)


def _key(sources: Sequence[_SourceFile], names: Sequence[str], fields: Fields, encoder: Encoder) -> str:
    """Return a hash of everything that a store depends on."""
    files = [file.absolute() for source in sources for file in files_of(source.path)]
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    everything = [_FORMAT, stats, names, fields.settings, encoder.settings]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:32]


def _put(draft: Path, store: Path) -> None:
    try:
        os.replace(draft, store)
    except OSError:  # another process was faster
        if not (store / "facts.json").is_file():
            raise


class _Complaints:
    """Collects the errors of records, to report them together."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._first: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, source: _SourceFile, number: int, reason: str) -> None:
        if reason not in self._first and len(self._first) >= _NAMED:
            reason = ""
        self._first.setdefault(reason, f"{source.name} {source.unit} {number}")
        self._count[reason] += 1

    def end(self, records: int) -> None:
        """Raise ``ValueError`` if there were errors."""
        if not self._count:
            return
        named = []
        for reason, place in self._first.items():
            others = f" and {self._count[reason] - 1:,} more" if self._count[reason] > 1 else ""
            named.append(f"{place}{others}: {reason}" if reason else f"and {self._count[reason]:,} for other reasons")
        bad = self._count.total()
        raise ValueError(
            f"{self._setting}: {bad:,} of {plural(records, 'record')} cannot be used: {'; '.join(named)}. Correct or "
            f"remove {'it' if bad == 1 else 'them'}."
        )


def _check(setting: str, sources: Sequence[_SourceFile], fields: Fields) -> None:
    """Read all records and raise for the invalid ones together. Reading is fast compared with tokenising."""
    complaints, count = _Complaints(setting), 0
    for source in sources:
        for record in read_records(source.path, fields):
            count += 1
            if isinstance(record, BadRecord):
                complaints.add(source, record.number, record.reason)
    complaints.end(count)


def _write(
    folder: Path, setting: str, sources: Sequence[_SourceFile], fields: Fields, encoder: Encoder
) -> dict[str, Any]:
    """Write the tokens and the numbers of each record. Return the facts about all of them."""
    complaints, count = _Complaints(setting), 0
    with (folder / "tokens").open("wb") as out:
        draft = _Draft(out)
        for number, source in enumerate(sources):
            for record in read_records(source.path, fields):
                count += 1
                assert isinstance(record, Record), "checked before"
                try:
                    draft.add(number, record, encoder.encode(record.content))
                except NoTemplate as error:  # all other records would fail too
                    raise ValueError(
                        f"{setting}: {source.name} {source.unit} {record.number}: {error}. Set data.chat_template to "
                        "plain or to a file with a template, or data.tokenizer to a tokenizer that has one."
                    ) from None
                except CannotEncode as error:
                    complaints.add(source, record.number, str(error))
    complaints.end(count)
    for key, numbers in (
        ("starts", draft.starts),
        ("digests", draft.digests),
        ("files", draft.files),
        ("numbers", draft.numbers),
    ):
        with (folder / key).open("wb") as out:
            numbers.tofile(out)
    return {
        "files": [source.name for source in sources],
        "units": [source.unit for source in sources],
        "largest_token": draft.largest,
        "everything_learnt": not (draft.prompts and encoder.completions_only),
        "unread": dict(draft.unread.most_common()),
    }


class _Draft:
    """A store that is being written: tokens go to a file; 32 bytes per record stay in memory."""

    def __init__(self, out: BinaryIO) -> None:
        self.starts, self.digests, self.files, self.numbers = array("q", [0]), array("q"), array("q"), array("q")
        self.unread: Counter[str] = Counter()
        self.largest = 0
        self.prompts = 0
        self._out = out
        self._begin()

    def _begin(self) -> None:
        self._length, self._number, self._digest = 0, 0, hashlib.blake2b(digest_size=8)

    def add(self, file: int, record: Record, tokens: Tokens) -> None:
        """Add the tokens of a record, or of a piece of a text that continues with the next call."""
        content = record.content
        self._number = self._number or record.number
        self._length += len(tokens)
        self._digest.update(tokens.tobytes())
        tokens.tofile(self._out)
        self.unread.update(record.unread)
        self.largest = max(self.largest, int(np.maximum(tokens, ~tokens).max(initial=0)))
        self.prompts += not isinstance(content, Text)
        if not isinstance(content, Text) or content.last:
            self.starts.append(self.starts[-1] + self._length)
            self.digests.append(int.from_bytes(self._digest.digest(), "little", signed=True))
            self.files.append(file)
            self.numbers.append(self._number)
            self._begin()
