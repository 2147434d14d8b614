"""Cutting a batch into parts, and putting their values together."""

import dataclasses
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding

from lightning_roundpipe.batches.cutting import cut
from lightning_roundpipe.batches.outputs import joined
from lightning_roundpipe.batches.weights import weighted_mean


@dataclasses.dataclass
class Fields:
    x: Tensor


@given(samples=st.integers(1, 50), count=st.integers(1, 60))
def test_parts_cover_the_batch_in_order(samples, count):
    """A sample that is in no part, or an empty part, would change the loss or crash the step."""
    x = torch.arange(samples)
    parts = cut(x, count, None)
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).equal(x)
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and len(sizes) == min(samples, count)
    sizes = [len(part) for part in cut(x, None, count)]
    assert sum(sizes) == samples and set(sizes[:-1]) <= {count} and 1 <= sizes[-1] <= count


@pytest.mark.parametrize("count", [None, 3])
def test_an_empty_batch_is_one_microbatch(count):
    """Plain training runs it: a mean over nothing is NaN, which is then the user's to see."""
    empty = torch.ones(0, 2)
    assert cut({"x": empty}, count, None if count else 3)[0]["x"] is empty


def test_parts_are_views_and_the_batch_is_not_changed():
    """A batch of images is not copied, and callbacks are given the whole batch after the step."""
    x = torch.arange(10).reshape(5, 2)
    batch = {"enc": BatchEncoding({"ids": x}), "user": UserDict(ids=x), "fields": Fields(x), "list": [x, None]}
    first, second = cut(batch, 2, None)
    for part, rows in ((first, x[:3]), (second, x[3:])):
        assert type(part["enc"]) is BatchEncoding and type(part["user"]) is UserDict and part["list"][1] is None
        for cut_x in (part["enc"].ids, part["user"]["ids"], part["fields"].x, part["list"][0]):
            assert cut_x.equal(rows)
            assert cut_x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert batch["enc"]["ids"] is batch["user"]["ids"] is batch["fields"].x is batch["list"][0] is x


def test_outputs_of_parts_are_joined():
    """Rows are put behind each other; of everything else the last part's value is kept."""
    parts = [
        {"rows": torch.ones(3), "name": "a", "table": torch.ones(5), "once": torch.ones(3)},
        {"rows": torch.zeros(1), "name": "b", "table": torch.zeros(5)},
    ]
    found = joined(parts, [3, 1])
    assert found["rows"].tolist() == [1, 1, 1, 0]
    assert found["name"] == "b" and found["table"].tolist() == [0] * 5 and "once" not in found
    assert joined([None, None], [1, 1]) is None
    assert joined(["a", "b"], [1, 1]) == "b"


def test_weighted_mean_loses_nothing():
    """Summed in double precision. A part that weighs nothing counts for nothing, as a mean over no targets is NaN."""
    assert weighted_mean([torch.tensor(0.1)] * 1000, [1.0] * 1000) == torch.tensor(0.1)
    assert weighted_mean([torch.tensor(1.0, dtype=torch.bfloat16)], [1.0]).dtype == torch.bfloat16
    assert weighted_mean([torch.tensor(1), torch.tensor(2)], [1.0, 1.0]) == 1.5
    nan = torch.tensor(float("nan"))
    assert weighted_mean([torch.tensor(2.0), nan], [3.0, 0.0]) == 2.0
    assert weighted_mean([nan, nan], [0.0, 0.0]).isnan() and weighted_mean([torch.tensor(2.0), nan], [3.0, 1]).isnan()
