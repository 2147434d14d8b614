"""Lays out records in rows of one length, as the batches of a causal language model.

There are three ways, for different data. Texts of any length are joined and cut, so that no token is padding. Records
that must not attend to each other are packed whole, or padded, one per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_roundpipe.data.sequences import Batch
from lightning_roundpipe.data.token_store import TokenStore, Whole

NO_TARGET = -100
"""The label that the losses of Hugging Face and torch ignore."""


class Rows(Dataset[Batch]):
    """``count`` rows of ``length`` tokens. ``tokens`` of all these are not padding."""

    def __init__(self, store: TokenStore, records: Whole, length: int, count: int, tokens: int) -> None:
        self._store, self._records, self._length = store, records, length
        self._count, self._tokens = count, tokens

    def __len__(self) -> int:
        return self._count

    @property
    def filled(self) -> float:
        """The share of the rows' tokens that is not padding."""
        return self._tokens / max(1, len(self) * self._length)


class JoinedRows(Rows):
    """The records one after another, cut into rows. The remainder at the end is dropped."""

    def __init__(self, store: TokenStore, records: Whole, length: int) -> None:
        self._ends = np.cumsum(store.lengths[records])
        count = int(self._ends[-1]) // length if len(self._ends) else 0
        super().__init__(store, records, length, count, count * length)

    @override
    def __getitem__(self, row: int) -> Batch:
        begin, end = row * self._length, (row + 1) * self._length
        first, last = int(np.searchsorted(self._ends, begin, "right")), int(np.searchsorted(self._ends, end))
        tokens = np.concatenate(self._store.tokens(self._records[first : last + 1]))
        before = int(self._ends[first - 1]) if first else 0
        tokens = tokens[begin - before : end - before]
        return _batch(tokens, tokens >= 0)


class WholeRows(Rows):
    """Whole records, cut at ``length``: several per row, which do not attend to each other, or one and padding.

    In packed rows, position ids restart with each record, and Hugging Face's models derive the attention mask from
    them. A row's loss is that of its separate records.
    """

    def __init__(self, store: TokenStore, records: Whole, length: int, pad: int, *, packs: bool) -> None:
        lengths = np.minimum(store.lengths[records], length)
        rows = packed(lengths, length) if packs else np.arange(len(records))
        order, count = np.argsort(rows, kind="stable"), int(rows.max(initial=-1)) + 1
        super().__init__(store, records[order], length, count, int(lengths.sum()))
        self._pad, self._packs = pad, packs
        self._starts = np.searchsorted(rows[order], np.arange(count + 1))

    @override
    def __getitem__(self, row: int) -> Batch:
        tokens = np.full(self._length, self._pad, dtype=np.int32)
        learn = np.zeros(self._length, dtype=bool)
        positions = np.empty(self._length, dtype=np.int64)
        used = 0
        for whole in self._store.tokens(self._records[self._starts[row] : self._starts[row + 1]]):
            found = whole[: self._length]
            part = slice(used, used + len(found))
            tokens[part], learn[part], positions[part] = found, found >= 0, np.arange(len(found))
            learn[used] &= not used  # it would be predicted from the previous record
            used += len(found)
        positions[used:] = np.arange(self._length - used)
        if self._packs:
            return _batch(tokens, learn) | {"position_ids": torch.from_numpy(positions)}
        return _batch(tokens, learn) | {"attention_mask": (torch.arange(self._length) < used).long()}


def packed(lengths: Whole, room: int) -> Whole:
    """Return the row of each record, with at most ``room`` tokens a row: best fit, longest records first."""
    rows = np.empty(len(lengths), dtype=np.int64)
    with_space: list[list[int]] = [[] for _ in range(room + 1)]
    spaces = count = 0
    """Bit n of ``spaces``: some row has space for n tokens."""
    for record in np.argsort(-lengths, kind="stable"):
        length = int(lengths[record])
        if enough := spaces >> length:
            space = length + (enough & -enough).bit_length() - 1
            row = with_space[space].pop()
            spaces ^= (not with_space[space]) << space
        else:
            row, space, count = count, room, count + 1
        rows[record] = row
        if left := space - length:
            with_space[left].append(row)
            spaces |= 1 << left
    return rows


def _batch(tokens: npt.NDArray[Any], learn: npt.NDArray[np.bool_]) -> Batch:
    inputs = torch.from_numpy(np.maximum(tokens, ~tokens).astype(np.int64))
    return {"input_ids": inputs, "labels": inputs.masked_fill(~torch.from_numpy(learn), NO_TARGET)}
