"""Cutting batches and putting outputs together."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_roundpipe.runtime.batch.microbatches import Columns, merge, sizes_of, weighted_mean
from lightning_roundpipe.runtime.batch.samples import batch_size

Pair = namedtuple("Pair", "x y")


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """The parts of a first batch."""
    return Columns().split(batch, sizes)


@dataclass
class Record:
    x: Tensor
    scale: float


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Labelled(list[Any]):
    """A list that means to be a list."""


# ---------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("samples", "count", "size", "workers", "expected"),
    [
        (8, None, None, 4, [1] * 8),
        (20, None, None, 2, [5] * 4),
        (5, 3, None, 1, [2, 2, 1]),
        (2, 3, None, 1, [1, 1]),
        (7, None, 3, 1, [3, 3, 1]),
        (7, None, 9, 1, [7]),
        (1, None, None, 8, [1]),
    ],
)
def test_sizes(samples: int, count: int | None, size: int | None, workers: int, expected: list[int]) -> None:
    assert sizes_of(samples, count, size, workers) == expected


@given(samples=st.integers(1, 50), count=st.integers(1, 60), workers=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_sizes_cover_the_batch_evenly(samples: int, count: int, workers: int) -> None:
    """A sample that is in no microbatch, or an empty microbatch, would change the loss or crash the step."""
    for sizes in (sizes_of(samples, count, None, workers), sizes_of(samples, None, None, workers)):
        assert sum(sizes) == samples and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert len(sizes_of(samples, count, None, workers)) == min(samples, count)
    by_size = sizes_of(samples, None, count, workers)
    assert sum(by_size) == samples and set(by_size[:-1]) <= {count} and 1 <= by_size[-1] <= count


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(4), torch.ones(5, 2)], 4),
        ({"scalar": torch.tensor(1.0), "text": ["a", "b"], "x": torch.ones(5, 1)}, 5),
        ({"text": ["a", "b"], "flag": True}, 2),
        ([["a"] * 3, ["b"] * 3], 3),
        (Record(torch.ones(6), 1.0), 6),
        (Pair(1.0, {"deep": (torch.ones(2),)}), 2),
        (BatchEncoding({"ids": torch.ones(7, 1)}), 7),
        ({"size": (4, 4), "texts": ("a", "b", "c")}, 3),
        ({"flag": True, "x": np.ones((5, 2))}, 5),
        ((np.ones(4), torch.ones(5)), 5),
    ],
)
def test_batch_size(batch: Any, size: int) -> None:
    """The first tensor decides; lists only where there is none, because a batch may carry lists of other things."""
    assert batch_size(batch) == size


@pytest.mark.parametrize("batch", [{"flag": True}, torch.tensor(1.0), (), "text", {"n": 3, "t": torch.tensor(1)}])
def test_size_that_cannot_be_found(batch: Any) -> None:
    with pytest.raises(ValueError, match=rf"{type(batch).__name__} holds no tensor.*num_microbatches=1"):
        batch_size(batch)


IMAGES = [torch.ones(3, 4, 4) for _ in range(6)]
BOXES = [{"boxes": torch.ones(n, 4), "label": n} for n in (1, 0, 2, 5, 1, 1)]
ROW = {"x": torch.ones(8), "y": 1}


def targets_of(*counts: int) -> list[dict[str, torch.Tensor]]:
    """The targets of one image for each of ``counts``, with so many boxes."""
    return [{"boxes": torch.ones(n, 4), "classes": torch.ones(n)} for n in counts]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((IMAGES, BOXES), 6),
        ((IMAGES[:3], BOXES[:3]), 3),
        ((IMAGES, BOXES[4:5] * 6), 6),
        ((torch.ones(6, 3, 4, 4), BOXES), 6),
        ([ROW] * 5, 5),
        ([(torch.ones(8), torch.tensor(1))] * 5, 5),
        ([{"ids": torch.ones(n)} for n in (7, 9)], 2),
        ([torch.ones(6, 8), torch.ones(6, 8)], 6),
        ({"views": [torch.ones(6, 8)] * 2, "y": torch.ones(6)}, 6),
        ([{"ids": torch.ones(6, 9), "mask": torch.ones(6, 9)}] * 2, 6),
        ({"x": torch.ones(6, 8), "tables": [torch.ones(3, 2), torch.ones(4, 2)]}, 6),
        ({"pixel_values": torch.ones(6, 3, 2, 2), "labels": targets_of(3, 3, 3, 3, 3, 3)}, 6),
        ([torch.ones(6, 3, 2, 2), targets_of(1, 2, 3, 4, 5, 6)], 6),
        ((IMAGES[:4], targets_of(3, 3, 3, 3)), 4),
        ({"views": targets_of(4, 4), "scale": torch.ones(4)}, 4),
    ],
)
def test_lists_of_samples_and_lists_of_columns(batch: Any, size: int) -> None:
    """Images that are cut by their channels, or sequences by their tokens, may train without an error."""
    assert batch_size(batch) == size


def test_targets_of_detection_are_cut_with_their_images() -> None:
    """Whether or not each image has as many of them as the others."""
    for counts in ((3, 3, 3), (1, 3, 2)):
        first, second = split([torch.ones(3, 2), targets_of(*counts)], [2, 1])
        assert (len(first[0]), len(second[0])) == (2, 1)
        assert [len(target["boxes"]) for target in first[1] + second[1]] == list(counts)
        assert len(first[1]) == 2


@pytest.mark.parametrize("names", [("a", "b", "c"), ["a", "b", "c"]])
def test_as_many_columns_as_samples(names: Any) -> None:
    """The last batch of an epoch may have any size, and what is a column in the others is one there."""
    first, second = split([torch.arange(3), torch.ones(3, 2), names], [2, 1])
    assert (len(first), first[0].tolist(), second[0].tolist()) == (3, [0, 1], [2])
    assert (list(first[2]), list(second[2])) == (["a", "b"], ["c"])
    first, second = split([IMAGES[:3], BOXES[:3], names], [2, 1])
    assert (len(first), first[0], second[1], list(second[2])) == (3, IMAGES[:2], BOXES[2:3], ["c"])


def test_arrays_are_cut_as_tensors_are() -> None:
    first, second = split([torch.ones(3, 2), np.arange(3), np.ones(()), np.ones(2)], [2, 1])
    assert (first[1].tolist(), second[1].tolist()) == ([0, 1], [2])
    assert first[2] is second[2] and first[3] is second[3]


def test_listed_samples_stay_whole() -> None:
    """As many images as channels: each image is as long as the batch, and is still one sample."""
    first, second = split((IMAGES[:3], BOXES[:3]), [2, 1])
    assert [image.shape[0] for image in first[0] + second[0]] == [3, 3, 3]
    assert (first[1], second[1]) == (BOXES[:2], BOXES[2:3])


@pytest.mark.parametrize(
    "batch",
    [
        {"images": IMAGES, "labels": torch.ones(6)},  # or six views of three samples, and what each view weighs
        [torch.ones(4), torch.ones(5)],
        {"scale": torch.ones(3), "x": torch.ones(6, 8), "y": torch.ones(6)},
    ],
)
def test_size_that_cannot_be_told(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"size of the batch cannot be told: .*num_microbatches=1"):
        batch_size(batch)


# ---------------------------------------------------------------------------------------------------------------- split


def test_containers_keep_their_types() -> None:
    """The user's code takes apart what it knows: a tokenizer's ``BatchEncoding`` by attribute, a tuple by name."""
    x = torch.arange(10).reshape(5, 2)
    batch = {
        "enc": BatchEncoding({"ids": x}),
        "user": UserDict(ids=x),
        "ordered": OrderedDict(b=x, a=x),
        "pair": Pair(x, [x]),
        "record": Record(x, 0.5),
        "frozen": Frozen(x),
        "plain": (x, [x, None]),
        "labelled": Labelled([x, 1]),
    }
    first, second = split(batch, [3, 2])
    assert type(first["enc"]) is BatchEncoding and first["enc"]["ids"].equal(x[:3]) and first["enc"].ids.equal(x[:3])
    assert type(first["user"]) is UserDict and first["user"]["ids"].equal(x[:3])
    assert list(second["ordered"]) == ["b", "a"] and type(second["ordered"]) is OrderedDict
    assert type(second["pair"]) is Pair and second["pair"].x.equal(x[3:]) and second["pair"].y[0].equal(x[3:])
    assert type(second["record"]) is Record and second["record"].x.equal(x[3:]) and second["record"].scale == 0.5
    assert type(second["frozen"]) is Frozen and second["frozen"].x.equal(x[3:])
    assert type(first["plain"]) is tuple and first["plain"][1][0].equal(x[:3]) and first["plain"][1][1] is None
    assert type(first["labelled"]) is Labelled and first["labelled"][0].equal(x[:3]) and first["labelled"][1] == 1


def test_the_batch_itself_is_not_changed() -> None:
    """Callbacks are given the whole batch after the step."""
    x = torch.arange(10).reshape(5, 2)
    batch: Any = {"enc": BatchEncoding({"ids": x}), "user": UserDict(ids=x), "record": Record(x, 0.5), "list": [x]}
    split(batch, [3, 2])
    assert batch["enc"]["ids"] is x and batch["user"]["ids"] is x
    assert batch["record"].x is x and batch["list"][0] is x


def test_what_has_no_sample_per_row_is_replicated() -> None:
    """Scalars, tables of another length, texts: every microbatch gets them as they are, not a copy."""
    table, scalar = torch.ones(7, 2), torch.tensor(3.0)
    batch = {"x": torch.ones(4, 2), "table": table, "scalar": scalar, "text": "abcd", "other": ["a"] * 3, "lr": 0.1}
    for part in split(batch, [1, 3]):
        assert part["table"] is table and part["scalar"] is scalar
        assert part["text"] == "abcd" and part["other"] == ["a"] * 3 and part["lr"] == 0.1


def test_lists_with_one_item_per_sample_are_cut_across() -> None:
    """Texts, and what object detection makes: a tensor per sample, each of its own size."""
    boxes = [torch.ones(n, 4) for n in (1, 0, 2, 5)]
    targets = [{"boxes": b} for b in boxes]
    batch = {"x": torch.ones(4, 2), "names": list("abcd"), "texts": tuple("abcd"), "boxes": boxes, "targets": targets}
    first, second = split(batch, [1, 3])
    assert (first["names"], second["names"]) == (["a"], ["b", "c", "d"])
    assert (first["texts"], second["texts"]) == (("a",), ("b", "c", "d"))
    assert all(a is b for a, b in zip(first["boxes"] + second["boxes"], boxes, strict=True))
    assert len(second["targets"]) == 3 and second["targets"][2]["boxes"] is boxes[3]


def test_a_list_of_whole_batches_is_cut_inside() -> None:
    """A pair of columns of a batch of two is as long as the batch, and is still a pair of columns."""
    first, second = split([torch.arange(2), torch.arange(2) + 10], [1, 1])
    assert [t.tolist() for t in first] == [[0], [10]] and [t.tolist() for t in second] == [[1], [11]]


def test_parts_are_views() -> None:
    """A batch of images is not copied."""
    x = torch.arange(12).reshape(6, 2)
    parts = split({"x": x}, [1, 2, 3])
    assert [p["x"].shape[0] for p in parts] == [1, 2, 3]
    assert all(p["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)


def test_one_microbatch_is_the_batch_itself() -> None:
    batch = object()
    assert split(batch, [3]) == [batch]


# ---------------------------------------------------------------------------------------------------------------- merge


def test_merge() -> None:
    """Rows are put behind each other, scalars averaged by weight, and what is the same for all is kept."""
    parts = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3), "name": "a", "f": 2.0, "n": 3, "two": (1, torch.zeros(3))},
        {"loss": torch.tensor(4.0), "rows": torch.zeros(1), "name": "a", "f": 5.0, "n": 1, "two": (1, torch.ones(1))},
    ]
    merged = merge(parts, [3, 1], [2.0, 1.0])
    assert merged["loss"] == 2.0 and merged["rows"].tolist() == [1, 1, 1, 0]
    assert merged["name"] == "a" and type(merged["f"]) is float and merged["f"] == pytest.approx(3.0)
    assert merged["n"] == [3, 1], "counts have no mean"
    assert merged["two"][0] == 1 and merged["two"][1].tolist() == [0, 0, 0, 1]


def test_merged_containers_keep_their_types() -> None:
    assert type(merge([Pair(torch.ones(1), 1), Pair(torch.zeros(1), 1)], [1, 1], [1, 1])) is Pair
    merged = merge([CausalLMOutput(logits=torch.ones(2, 3))] * 2, [2, 2], [1, 1])
    assert type(merged) is CausalLMOutput and merged.logits.shape == (4, 3) and merged.loss is None


def test_merged_tensors_have_no_graph() -> None:
    """A graph that hung on an output would be kept until the next step, with everything that it saved."""
    parts = [{"rows": torch.ones(1, requires_grad=True) * 2, "deep": [torch.ones(1, requires_grad=True) * 2]}] * 2
    for merged in (merge(parts, [1, 1], [1, 1]), merge(parts[:1], [1], [1])):
        assert not merged["rows"].requires_grad and not merged["deep"][0].requires_grad


def test_rows_that_are_no_samples_are_averaged_or_gathered() -> None:
    table = merge([torch.ones(5), torch.zeros(5)], [2, 1], [3.0, 1.0])
    assert table.tolist() == [0.75] * 5
    odd = merge([torch.ones(5), torch.ones(4)], [2, 1], [1.0, 1.0])
    assert [len(t) for t in odd] == [5, 4]


def test_what_differs_is_gathered() -> None:
    assert merge(["a", "b"], [1, 1], [1, 1]) == ["a", "b"]
    assert merge([{"a": 1}, {"b": 1}], [1, 1], [1, 1]) == [{"a": 1}, {"b": 1}]
    assert merge([None, None], [1, 1], [1, 1]) is None


def test_a_microbatch_that_weighs_nothing_counts_for_nothing() -> None:
    """A mean over no targets is NaN, and plain training never computes it."""
    nan = float("nan")
    assert merge([torch.tensor(2.0), torch.tensor(nan)], [1, 1], [3.0, 0.0]) == 2.0
    assert merge([nan, 2.0], [1, 1], [0.0, 3.0]) == 2.0
    assert math.isnan(merge([torch.tensor(nan), torch.tensor(nan)], [1, 1], [0.0, 0.0])), "no targets at all: as plain"
    assert math.isnan(merge([torch.tensor(2.0), torch.tensor(nan)], [1, 1], [3.0, 1.0])), "a real NaN must be seen"


def test_weighted_mean_keeps_its_type_and_loses_nothing() -> None:
    """Summed in double precision: the merged loss is the whole batch's to rounding, however many parts there are."""
    parts = [torch.tensor(0.1) for _ in range(1000)]
    assert weighted_mean(parts, [1.0] * 1000) == torch.tensor(0.1)
    assert weighted_mean([torch.tensor(1.0, dtype=torch.bfloat16)], [1.0]).dtype == torch.bfloat16
    assert weighted_mean([torch.tensor(1), torch.tensor(2)], [1.0, 1.0]).item() == 1.5


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_merging_undoes_splitting(parts: list[tuple[int, int]]) -> None:
    """Whatever the sizes are, and a weighted mean of means is the mean of all where weights are numbers of targets."""
    sizes = [size for size, _ in parts]
    x = torch.arange(sum(sizes) * 2.0).reshape(-1, 2)
    assert merge([p["x"] for p in split({"x": x}, sizes)], sizes, [1.0] * len(sizes)).equal(x)
    counts = [float(count) for _, count in parts]
    values = [torch.arange(count, dtype=torch.float64) + size for size, count in parts]
    if any(counts):
        merged = merge([v.mean() for v in values], sizes, counts)
        torch.testing.assert_close(merged, torch.cat(values).mean())


def test_rows_of_different_lengths_are_gathered() -> None:
    """A step that trims padding returns logits that are as long as its microbatch's longest sample."""
    merged = merge([torch.ones(2, 3), torch.ones(2, 4)], [2, 2], [1, 1])
    assert [t.shape[1] for t in merged] == [3, 4]


@pytest.mark.parametrize("value", [lambda: np.ones(3), lambda: Frozen(torch.ones(2))], ids=["array", "dataclass"])
def test_values_that_cannot_be_compared_are_no_error(value: Callable[[], Any]) -> None:
    """The step is done by then: whatever it returned must not make it fail."""
    assert merge([{"extra": value()}, {"extra": value()}], [1, 1], [1, 1]).keys() == {"extra"}


def test_an_empty_batch_is_one_microbatch() -> None:
    """Plain training runs it: a mean over nothing is NaN, which is then the user's to see."""
    assert sizes_of(0, None, None, 2) == sizes_of(0, 3, None, 2) == sizes_of(0, None, 3, 2) == [0]


def test_what_is_cut_was_cut_in_the_first_batch() -> None:
    """A tensor that all samples share has as many rows as the last batch has samples."""
    columns, shared = Columns(), torch.arange(6).reshape(3, 2)
    first = columns.split({"x": torch.ones(8, 2), "shared": shared}, [4, 4])
    last = columns.split({"x": torch.ones(3, 2), "shared": shared}, [2, 1])
    assert [len(part["x"]) for part in (*first, *last)] == [4, 4, 2, 1]
    assert all(part["shared"] is shared for part in (*first, *last))
    assert len(columns.split({"x": torch.ones(3), "shared": shared}, [2, 1])[0]["shared"]) == 2  # of another structure
