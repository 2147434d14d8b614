"""Tokens of files, made once and cached on disk by ``datasets``, and read by record number.

Rows can be laid out, shuffled, counted and resumed only if the lengths of all records are known, which requires
tokenising them all. So this happens first, file after file, which also finds every bad record before training. The
tokens are mapped into memory, never read as a whole. The fingerprint hashes what they were made from: files with sizes
and times, the tokenizer, how records are read, and what is learnt of them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from lightning_roundpipe.data.encoding import CannotEncode, Encoder, NoTemplate, Tokens
from lightning_roundpipe.data.records import BadRecord, Fields, Text
from lightning_roundpipe.data.sources import KINDS, find_sources, read_records
from lightning_roundpipe.messages import plural

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 3
_NAMED = 10
"""Most reasons that an error names, each with its first record. Further ones are counted."""

Whole = npt.NDArray[np.int64]


class TokenStore:
    """The tokens of all records under a path.

    Args:
        table: their tokens, and what is known of each.
        files: how many files they come from.
        others: names of files beside them that are not read.

    Attributes:
        lengths: tokens of each record.
    """

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

    @property
    def unread(self) -> list[str]:
        """Names of the records' fields that are not read."""
        names = cast(list[str], self._table.unique("unread"))
        return sorted({field for record in names for field in json.loads(record)})

    def place(self, record: int) -> str:
        """Return file and line (or number) of a record, for messages."""
        return str(self._table.data.column("place")[int(record)].as_py())


def open_store(path: Path, setting: str, fields: Fields, encoder: Encoder, folder: Path) -> TokenStore:
    """Return the tokens of the file or folder ``path``, from an earlier run if there was one.

    Args:
        path: what to read.
        setting: name of the setting, for messages.
        fields: how records are read.
        encoder: makes the tokens.
        folder: the cache folder.

    Raises:
        FileNotFoundError: there is nothing to read.
        ValueError: some records are invalid; the message names them.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{setting}={str(path)!r} is not there. Name a file that ends in {KINDS}, or a folder of such."
        )
    sources, others = find_sources(path, setting)
    if not sources:
        raise FileNotFoundError(
            f"{setting}={str(path)!r} holds no file that ends in {KINDS}. Name such a file or a folder."
        )
    import datasets  # takes two seconds

    root = path if path.is_dir() and path not in sources else path.parent
    names = {source: str(source.relative_to(root)) for source in sources}
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("int32")),
        place=datasets.Value("string"),
        digest=datasets.Value("int64"),
        largest=datasets.Value("int32"),
        prompt=datasets.Value("bool"),
        unread=datasets.Value("string"),
    )
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table = datasets.Dataset.from_generator(
            partial(_examples, names, setting, fields, encoder),
            features,
            str(folder),
            fingerprint=_fingerprint(sources, root, fields, encoder),
            writer_batch_size=100,  # pieces of long texts are large
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    finally:
        if not bars:
            datasets.enable_progress_bars()
    return TokenStore(table, len(sources), [str(file.relative_to(root)) for file in others])


def _fingerprint(sources: Sequence[Path], root: Path, fields: Fields, encoder: Encoder) -> str:
    """Return a hash of everything that the tokens depend on."""
    files = [file for source in sources for file in ([source] if source.is_file() else sorted(source.rglob("*")))]
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    everything = [_FORMAT, str(root.absolute()), stats, fields.settings, encoder.settings]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:32]


def _examples(names: dict[Path, str], setting: str, fields: Fields, encoder: Encoder) -> Iterator[dict[str, Any]]:
    """Yield each record's tokens. All records are read once before, which is fast compared with tokenising.

    Raises:
        ValueError: records are invalid.
    """
    complaints = _Complaints(setting)
    for source, name in names.items():
        for record in read_records(source, fields):
            complaints.records += 1
            if isinstance(record, BadRecord):
                complaints.add(f"{name} {record.place}", record.reason)
    complaints.end()
    for source, name in names.items():
        for record in read_records(source, fields):
            assert not isinstance(record, BadRecord), "checked before"
            place = f"{name} {record.place}"
            try:
                tokens = encoder.encode(record.content)
            except NoTemplate as error:  # all other records would fail too
                raise ValueError(
                    f"{setting}: {place}: {error}. Set data.chat_template to plain or to a file with a template, or "
                    "data.tokenizer to a tokenizer that has one."
                ) from None
            except CannotEncode as error:
                complaints.add(place, str(error))
                continue
            yield {
                "tokens": tokens,
                "place": place,
                "digest": int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), signed=True),
                "largest": int(np.maximum(tokens, ~tokens).max(initial=0)),
                "prompt": not isinstance(record.content, Text),
                "unread": json.dumps(sorted(record.unread)),
            }
    complaints.end()


class _Complaints:
    """Collects the errors of records, to report them together."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._first: dict[str, str] = {}
        self._count: Counter[str] = Counter()
        self.records = 0

    def add(self, place: str, reason: str) -> None:
        if reason not in self._first and len(self._first) >= _NAMED:
            reason = ""
        self._first.setdefault(reason, place)
        self._count[reason] += 1

    def end(self) -> None:
        """Raise ``ValueError`` if there were errors."""
        if not self._count:
            return
        named = []
        for reason, place in self._first.items():
            others = f" and {self._count[reason] - 1:,} more" if self._count[reason] > 1 else ""
            named.append(f"{place}{others}: {reason}" if reason else f"and {self._count[reason]:,} for other reasons")
        bad = self._count.total()
        raise ValueError(
            f"{self._setting}: {bad:,} of {plural(self.records, 'record')} cannot be used: {'; '.join(named)}. Correct "
            f"or remove {'it' if bad == 1 else 'them'}."
        )
