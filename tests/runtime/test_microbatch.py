"""Cutting batches and putting outputs together."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_roundpipe.runtime.microbatch import batch_size, merge, sizes_of, split

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    scale: float


@pytest.mark.parametrize(
    ("samples", "count", "size", "workers", "expected"),
    [
        (8, None, None, 4, [1] * 8),
        (20, None, None, 2, [5] * 4),
        (5, 3, None, 1, [2, 2, 1]),
        (2, 3, None, 1, [1, 1]),
        (7, None, 3, 1, [3, 3, 1]),
    ],
)
def test_sizes(samples: int, count: int | None, size: int | None, workers: int, expected: list[int]) -> None:
    assert sizes_of(samples, count, size, workers) == expected


def test_containers_keep_their_types() -> None:
    x = torch.arange(10).reshape(5, 2)
    batch = {
        "enc": BatchEncoding({"ids": x}),
        "pair": Pair(x, [x]),
        "record": Record(x, 0.5),
        "names": list("abcde"),
        "scalar": torch.tensor(3.0),
        "table": torch.ones(7, 2),
    }
    first, second = split(batch, [3, 2])
    assert isinstance(first["enc"], BatchEncoding) and first["enc"]["ids"].equal(x[:3])
    assert batch["enc"]["ids"].equal(x), "the batch itself was changed"
    assert type(second["pair"]) is Pair and second["pair"].y[0].equal(x[3:])
    assert second["record"].x.equal(x[3:]) and second["record"].scale == 0.5 and batch["record"].x is x
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert first["scalar"] is batch["scalar"] and first["table"] is batch["table"]


def test_a_list_of_whole_batches_is_cut_inside() -> None:
    x, y = torch.arange(2), torch.arange(2) + 10
    first, _ = split([x, y], [1, 1])
    assert [t.tolist() for t in first] == [[0], [10]]


def test_size_that_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="num_microbatches=1"):
        batch_size({"flag": True})


def test_merge() -> None:
    parts = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3), "name": "a", "f": 2.0},
        {"loss": torch.tensor(4.0), "rows": torch.zeros(1), "name": "a", "f": 5.0},
    ]
    merged = merge(parts, [3, 1], [2.0, 1.0])
    assert merged["loss"] == 2.0 and merged["rows"].tolist() == [1, 1, 1, 0]
    assert merged["name"] == "a" and merged["f"] == pytest.approx(3.0)


def test_a_microbatch_that_weighs_nothing_counts_for_nothing() -> None:
    """A mean over no targets is NaN, and plain training never computes it."""
    assert merge([torch.tensor(2.0), torch.tensor(float("nan"))], [1, 1], [3.0, 0.0]) == 2.0
