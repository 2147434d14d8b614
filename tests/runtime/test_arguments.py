from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.arguments import flatten, refuse_changed, unflatten

Pair = namedtuple("Pair", ["one", "other"])


@pytest.mark.parametrize(
    "value",
    [
        ((), {}),
        ((1, None, "x"), {}),
        ((1, 2), {"mask": 3, "cache": None}),
        ((1,), {"b": 1, "a": 2}),
        (5, {}),  # an output, and nothing collected
        (None, {"router": 3}),
        ((1, (2, 3)), {}),
        (([1, {"x": 2}],), {"y": [3]}),
        ([1, 2], {}),
        (Pair(1, 2), {}),
        ((Pair(1, [2]),), {}),
        ((1,), OrderedDict(a=1)),
        ((1, 2), 3),
        (1, 2, 3),
        7,
        {"a": (1, 2)},
    ],
    ids=repr,
)
def test_a_value_is_taken_apart_as_torch_does_and_put_together_again(value: Any) -> None:
    leaves, spec = flatten(value)
    expected, expected_spec = tree_flatten(value)
    assert leaves == expected
    assert spec == expected_spec
    assert unflatten(leaves, spec) == tree_unflatten(leaves, spec) == value
    assert type(unflatten(leaves, spec)) is type(value)
    assert flatten(value)[1] == spec


def test_shapes_stay_shapes() -> None:
    """torch would hand the layer an ordinary tuple, which its own arguments then differ from."""
    for value in (((1, torch.Size([2, 3])), {}), (([1], torch.Size([2])), {"size": torch.Size([4])})):
        leaves, spec = flatten(value)
        again = unflatten(leaves, spec)
        assert type(again[0][1]) is torch.Size
        assert again == value
        refuse_changed((leaves, spec), again, "block")


def test_structures_are_told_apart() -> None:
    values: list[Any] = [((1, 2), {}), ((1,), {"a": 2}), ((1,), {"b": 2}), (1, {"a": 2}), ((1, (2,)), {})]
    specs = [flatten(value)[1] for value in values]
    assert all((a == b) == (i == j) for i, a in enumerate(specs) for j, b in enumerate(specs))


def test_what_a_layer_adds_to_its_arguments_is_refused() -> None:
    given: Any = ((torch.ones(1), [1]), {"kept": {}})
    before = flatten(given)
    refuse_changed(before, given, "block")
    given[1]["kept"]["new"] = 1
    with pytest.raises(RoundPipeError, match="'block' changes a list or dict"):
        refuse_changed(before, given, "block")


def test_a_replaced_argument_is_refused() -> None:
    keywords: Any = {"mask": torch.ones(1)}
    before = flatten(((), keywords))
    keywords["mask"] = torch.ones(1)
    with pytest.raises(RoundPipeError):
        refuse_changed(before, ((), keywords), "block")
