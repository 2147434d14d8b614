"""Tokens of files, made once and kept on disk, from where they are read by number whenever they are wanted.

Rows can only be laid out, shuffled, counted and resumed if the lengths of all records are known, and those are known
when all are tokenised. So this is done beforehand, file after file, which also shows every bad record before anything
is trained. The tokens are mapped into memory, never read as a whole. A store is found again by what it was made from:
files with their sizes and times, the tokenizer, and what is learnt; nothing has to be deleted when one of them changes.
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
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from lightning_roundpipe.data.encoding import CannotEncode, Encoder, Tokens
from lightning_roundpipe.data.records import BadRecord, Record, Text, find_files, read_records

_FORMAT = 1
_NAMED = 10
"""Bad records that an error names; beyond these it counts."""

Whole = npt.NDArray[np.int64]


class TokenStore:
    """The records in a folder that ``open_store`` made. Goes to other processes as its path alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "facts": self.facts}

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def tokens(self) -> Tokens:
        """All records' tokens, one after another; see ``encoding.Tokens``."""
        return np.memmap(self.folder / "tokens", dtype=np.int32, mode="r")

    @cached_property
    def starts(self) -> Whole:
        """Where each record begins in ``tokens``; one more number, its length, at the end."""
        return self._numbers("starts")

    @cached_property
    def digests(self) -> Whole:
        """Of each record's tokens: records with the same text have the same."""
        return self._numbers("digests")

    @property
    def lengths(self) -> Whole:
        return np.diff(self.starts)

    def place(self, record: int) -> str:
        """File and line of a record, for people."""
        file = self.facts["files"][int(self._numbers("files")[record])]
        return f"{file} line {int(self._numbers('lines')[record])}"

    def _numbers(self, name: str) -> Whole:
        return np.memmap(self.folder / name, dtype=np.int64, mode="r")


def open_store(path: Path, setting: str, tokenizer: PreTrainedTokenizerBase, loss_on: str, folder: Path) -> TokenStore:
    """The tokens of the file or folder ``path``, made now if they have not been before.

    Args:
        path: what to read.
        setting: the name of that setting, for messages.
        tokenizer: a fast one.
        loss_on: see ``Encoder``.
        folder: stores are kept here.

    Raises:
        FileNotFoundError, ValueError: there is nothing to read, or some of it is no record; the bad ones are named.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{setting}={str(path)!r} is not there. Name a file or a folder of .jsonl and .txt files."
        )
    files, others = find_files(path)
    if not files:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} holds no file that ends in .jsonl or .txt. Name such a file or a folder."
        )
    root = path if path.is_dir() else path.parent
    names, left = ([str(file.relative_to(root)) for file in some] for some in (files, others))
    store = folder / _key(files, [str(path.absolute()), *left], tokenizer, loss_on)
    if not (store / "facts.json").is_file():
        _check(setting, files, names)
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder, prefix="draft-"))
        try:
            facts = _write(draft, setting, files, names, Encoder(tokenizer, loss_on))
            (draft / "facts.json").write_text(json.dumps(facts | {"others": left}))
            _put(draft, store)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return TokenStore(store)


def _key(files: Sequence[Path], names: Sequence[str], tokenizer: Any, loss_on: str) -> str:
    """Another one for everything that a store depends on."""
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts |= {"truncation": None, "padding": None}  # of the last call, whatever that was
    made_by = [parts, tokenizer.chat_template, tokenizer.eos_token_id, loss_on]
    return hashlib.sha256(json.dumps([_FORMAT, stats, names, made_by]).encode()).hexdigest()[:32]


def _put(draft: Path, store: Path) -> None:
    try:
        os.replace(draft, store)
    except OSError:  # another process was faster
        if not (store / "facts.json").is_file():
            raise


class _Complaints:
    """What is wrong with records, to be said at once."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._named: list[str] = []
        self._bad = 0

    def add(self, file: str, line: int, reason: str) -> None:
        self._bad += 1
        if self._bad <= _NAMED:
            self._named.append(f"{file} line {line}: {reason}")

    def end(self, records: int) -> None:
        if self._bad:
            more = f"; and {self._bad - _NAMED} more" if self._bad > _NAMED else ""
            raise ValueError(
                f"{self._setting}: {self._bad:,} of {records:,} records cannot be used: {'; '.join(self._named)}{more}"
                ". Correct or remove them."
            )


def _check(setting: str, files: Sequence[Path], names: Sequence[str]) -> None:
    """Reads everything, which is fast beside tokenising it, so that what is no record is known soon and all at once."""
    complaints, count = _Complaints(setting), 0
    for file, name in zip(files, names, strict=True):
        for record in read_records(file):
            count += 1
            if isinstance(record, BadRecord):
                complaints.add(name, record.line, record.reason)
    complaints.end(count)


def _write(folder: Path, setting: str, files: Sequence[Path], names: Sequence[str], encoder: Encoder) -> dict[str, Any]:
    """Writes the tokens and what is known of each record; returns the facts of all together."""
    complaints, count = _Complaints(setting), 0
    with (folder / "tokens").open("wb") as out:
        draft = _Draft(out)
        for number, (file, name) in enumerate(zip(files, names, strict=True)):
            for record in read_records(file):
                count += 1
                assert isinstance(record, Record), "checked before"
                try:
                    draft.add(number, record, encoder.encode(record.content))
                except CannotEncode as error:
                    complaints.add(name, record.line, str(error))
    complaints.end(count)
    for key, numbers in (
        ("starts", draft.starts),
        ("digests", draft.digests),
        ("files", draft.files),
        ("lines", draft.lines),
    ):
        with (folder / key).open("wb") as out:
            numbers.tofile(out)
    return {
        "files": list(names),
        "largest_token": draft.largest,
        "everything_learnt": not (draft.prompts and encoder.completions_only),
        "unread": dict(draft.unread.most_common()),
    }


class _Draft:
    """A store that is being written: tokens to a file, eight bytes and less of everything else in memory."""

    def __init__(self, out: BinaryIO) -> None:
        self.starts, self.digests, self.files, self.lines = array("q", [0]), array("q"), array("q"), array("q")
        self.unread: Counter[str] = Counter()
        self.largest = 0
        self.prompts = 0
        self._out = out
        self._begin()

    def _begin(self) -> None:
        self._length, self._line, self._digest = 0, 0, hashlib.blake2b(digest_size=8)

    def add(self, file: int, record: Record, tokens: Tokens) -> None:
        """The tokens of a record, or of a piece of a text that goes on or ends with the next ones."""
        content = record.content
        self._line = self._line or record.line
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
            self.lines.append(self._line)
            self._begin()
