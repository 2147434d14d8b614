from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_roundpipe.runtime.layer_calls import arguments
from lightning_roundpipe.runtime.layer_calls.arguments import (
    flatten,
    flatten_call,
    mutable_parts,
    unflatten,
    unflatten_call,
)
from lightning_roundpipe.runtime.user_code import inference_writes

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


def test_structures_are_told_apart() -> None:
    values: list[Any] = [((1, 2), {}), ((1,), {"a": 2}), ((1,), {"b": 2}), (1, {"a": 2}), ((1, (2,)), {})]
    specs = [flatten(value)[1] for value in values]
    assert all((a == b) == (i == j) for i, a in enumerate(specs) for j, b in enumerate(specs))


class Registry(dict[str, Any]):
    pass


def test_objects_that_hold_tensors_are_taken_apart() -> None:
    """Anything else would take them past the boundary between devices."""
    one, two = torch.ones(1), torch.zeros(1)
    shared = object()
    value = ((SimpleNamespace(a=one, b=[shared], c=Registry(d=two)), Registry(), shared), {})
    leaves, spec = flatten(value)
    assert leaves == [one, shared, two, shared]
    [(made, empty, last), _] = unflatten([two, shared, one, shared], spec)
    assert made is not value[0][0] and made.a is two and made.b == [shared] and made.c == {"d": one}
    assert type(made.c) is type(empty) is Registry and last is shared


def test_a_block_mask_is_taken_apart_with_what_its_function_sees() -> None:
    """Packed documents' numbers, in a closure of a closure, are tensors of the call like any others."""
    numbers = torch.arange(12).repeat(2, 1) // 5

    def same(row: Any, head: Any, query: Any, key: Any) -> Any:
        return numbers[row, query] == numbers[row, key]

    mask = create_block_mask(and_masks(same, lambda row, head, q, k: k <= q), 2, None, 12, 12, "cpu", BLOCK_SIZE=4)
    leaves, spec = flatten(((mask,), {}))
    assert sum(leaf is numbers for leaf in leaves) == 1
    moved = [leaf.clone() if leaf is numbers else leaf for leaf in leaves]
    ((again,), _) = unflatten(moved, spec)
    assert type(again) is BlockMask and torch.equal(again.to_dense(), mask.to_dense())
    expected = create_mask(mask.mask_mod, 2, None, 12, 12, "cpu")
    numbers.zero_()  # which the other one does not see
    assert torch.equal(create_mask(again.mask_mod, 2, None, 12, 12, "cpu"), expected)
    assert flatten(((again,), {}))[1] == spec


def test_what_a_layer_may_change_is_found_on_both_sides() -> None:
    value = (([1, ({"a": [2]},)], SimpleNamespace(x=torch.ones(1), y=[3])), {"b": {}})
    args, kwargs, carried = unflatten_call(*flatten_call(*value, {}))
    assert list(mutable_parts((args, kwargs)))[1:3] == [{"a": [2]}, [2]]
    assert len(list(mutable_parts((args, kwargs)))) == len(list(mutable_parts(value))) == 7
    assert carried == {}


def test_attributes_are_carried_behind_the_arguments() -> None:
    leaves, spec = flatten_call((1,), {"a": 2}, {(0, "aux"): [3]})
    assert leaves == [1, 2, 3]
    assert unflatten_call([4, 5, 6], spec) == ((4,), {"a": 5}, {(0, "aux"): [6]})


@pytest.mark.parametrize(
    ("argument", "immutable"),
    [
        (torch.ones(1), True),
        ((torch.ones(1), (2, None)), True),
        (torch.Size([2]), True),
        ([1], False),
        ({}, False),
        ((1, ({"a": 2},)), False),
        (deque([1]), False),
        ({1}, False),
        (OrderedDict(a=1), False),
        (Pair(1, [2]), False),
        (SimpleNamespace(x=torch.ones(1)), False),
    ],
    ids=repr,
)
def test_what_a_layer_cannot_change_is_known(argument: Any, immutable: bool) -> None:
    for args, kwargs in (((argument,), {}), ((), {"a": argument})):
        assert flatten_call(args, kwargs, {})[1].is_immutable == immutable
        if immutable:
            assert [part for part in mutable_parts((args, kwargs)) if part is not kwargs] == []


def test_structures_without_end_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_specs", {})
    monkeypatch.setattr(arguments, "_shapes", {})
    monkeypatch.setattr(arguments, "MOST_SHAPES", 3)
    for length in range(6):
        value = (([*range(length)],), {})
        leaves, spec = flatten(value)
        assert leaves == [*range(length)] and unflatten(leaves, spec) == value
    assert len(arguments._specs) == len(arguments._shapes) == 3


def test_writes_to_inference_tensors_are_counted_where_memory_is_known() -> None:
    """A conjugate's is not: only the tensor itself knows that; and a sparse tensor has no memory of its own."""
    with torch.inference_mode():
        plain, conjugate = torch.zeros(3), torch.ones(3, dtype=torch.complex64).conj()
        alias, same = inference_writes.counting_writes([plain, conjugate], inference=True)
        assert same is conjugate and not inference_writes.is_written(alias, inference=True)
        with torch.inference_mode(False):
            alias.add_(1)
        assert inference_writes.is_written(alias, inference=True) and plain.eq(1).all()
        assert inference_writes.version_of(torch.eye(2).to_sparse()) == (0, 0)
