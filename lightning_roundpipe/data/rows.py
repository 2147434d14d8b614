"""Lays out records in rows of one length, as the batches of a causal language model.

There are three ways, for different data. Texts of any length are joined and cut, so that no token is padding. Records
that must not attend to each other are packed whole, or padded, one per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_roundpipe.data.sequences import Batch
from lightning_roundpipe.data.tokens import column

if TYPE_CHECKING:
    import datasets

NO_TARGET = -100
"""The label that the losses of Hugging Face and torch ignore."""

Numbers = npt.NDArray[np.int64]


class Rows(Dataset[Batch]):
    """Rows of ``length`` tokens, each of pieces of records.

    ``"joined"``: the records one after another, cut into rows; the remainder at the end is dropped. ``"packed"``: whole
    records, cut at ``length``, as many per row as fit. Position ids restart with each, and Hugging Face's models derive
    the attention mask from them, so a row's loss is that of its separate records. ``"padded"``: one record per row.

    Attributes:
        filled: the share of the rows' tokens that is not padding.
    """

    def __init__(
        self, table: datasets.Dataset, length: int, way: Literal["joined", "packed", "padded"], pad: int
    ) -> None:
        self._table = table.with_format("numpy", columns=["tokens"])
        self._length, self._way, self._pad = length, way, pad
        lengths = column(table, "length").astype(np.int64)
        ends = np.cumsum(lengths)
        if way == "joined":
            count = int(lengths.sum()) // length
            starts = np.union1d(np.arange(count) * length, ends[ends < count * length])  # of pieces
            self._records = np.searchsorted(ends, starts, "right")
            self._begins = starts - (ends - lengths)[self._records]
            self._sizes, rows = np.diff(starts, append=count * length), starts // length
        else:
            rows = packed(np.minimum(lengths, length), length) if way == "packed" else np.arange(len(lengths))
            self._records = np.argsort(rows, kind="stable")
            self._begins, rows = np.zeros_like(rows), rows[self._records]
            self._sizes, count = np.minimum(lengths, length)[self._records], int(rows.max(initial=-1)) + 1
        self._pieces = np.searchsorted(rows, np.arange(count + 1))
        self.filled = int(self._sizes.sum()) / max(1, count * length)

    def __len__(self) -> int:
        return len(self._pieces) - 1

    @override
    def __getitem__(self, row: int) -> Batch:
        pieces = slice(self._pieces[row], self._pieces[row + 1])
        tokens = np.full(self._length, ~self._pad, dtype=np.int64)
        positions = np.arange(self._length)
        used = 0
        records = self._table[self._records[pieces].tolist()]["tokens"]
        for found, begin, size in zip(records, self._begins[pieces], self._sizes[pieces], strict=True):
            tokens[used : used + size] = found[begin : begin + size]
            positions[used:] = np.arange(self._length - used)
            if used and self._way == "packed" and tokens[used] >= 0:
                tokens[used] = ~tokens[used]  # it would be predicted from the previous record
            used += size
        positions[used:] = np.arange(self._length - used)
        read = torch.from_numpy(tokens)
        inputs = torch.maximum(read, ~read)
        batch = {"input_ids": inputs, "labels": inputs.masked_fill(read < 0, NO_TARGET)}
        if self._way == "packed":
            batch["position_ids"] = torch.from_numpy(positions)
        elif self._way == "padded":
            batch["attention_mask"] = (torch.arange(self._length) < used).long()
        return batch


def packed(lengths: Numbers, room: int) -> Numbers:
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
