"""What code leaves on objects that a module reaches is found, and put back in place."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.user_code import left_behind
from lightning_roundpipe.runtime.user_code.left_behind import ELSEWHERE, MODULES, LeftBehind


class Holds(nn.Module):
    """A module with one attribute."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def _append(value: Any) -> None:
    value.append(8)


def _add(value: Any) -> None:
    value[-1] = 8


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (list(range(9)), _append),
        (deque(range(9)), _append),
        (dict.fromkeys(range(9), 0), _add),
        (OrderedDict.fromkeys(range(9), 0), _add),
        (set(range(9)), lambda value: value.add(-1)),
    ],
    ids=["list", "deque", "dict", "OrderedDict", "set"],
)
def test_what_is_added_to_many_items_is_removed(
    held: Any, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in all but lists: a dict of losses by sample had those of rehearsals."""
    monkeypatch.setattr(left_behind, "_MANY", 8)
    before = type(held)(held)
    left = LeftBehind(Holds(held))
    assert not left.changes()[MODULES]
    change(held)
    assert left.changes()[MODULES] == {"held": 10}
    left.put_back()
    assert held == before


def test_iterators_that_cannot_be_copied_are_named() -> None:
    left = LeftBehind(Holds(number for number in range(3)))
    assert left.stuck == ["held"]


class Silent(Iterator[int]):
    """It can be copied, and does not say where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")

    def __copy__(self) -> Silent:
        copied = Silent()
        copied.at = self.at
        return copied

    def __deepcopy__(self, memo: Any) -> Silent:
        return self.__copy__()


@pytest.mark.parametrize("make", [lambda: iter([3, 4, 5]), itertools.count, Silent])
def test_iterators_go_on_where_they_were(make: Callable[[], Iterator[int]]) -> None:
    module = Holds(make())
    next(module.held)
    left, expected = LeftBehind(module), list(itertools.islice(make(), 1, 3))
    assert not left.stuck
    for _ in range(2):  # it may be put back several times
        assert [next(module.held), next(module.held)] == expected
        left.put_back()


def test_more_tensors_than_can_be_kept_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "_TENSOR_BYTES", 15)
    left = LeftBehind(Holds([torch.zeros(2), torch.zeros(2)]))
    assert len(left.stuck) == 1 and left.stuck[0].endswith("GiB of tensors that are no parameters")


def test_tensors_are_put_back_whatever_was_done_to_them() -> None:
    grown, written, moved = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    left = LeftBehind(Holds({"grown": grown, "written": written, "moved": moved}))
    grown.resize_(3).fill_(1)
    written.numpy()[0] = 1  # which counts as no new version
    moved.data = torch.ones(2)
    assert {path: value.tolist() for path, value in left.changes()[MODULES].items()} == {
        "held['grown']": [1.0, 1.0, 1.0],
        "held['written']": [1.0, 0.0],
        "held['moved']": [1.0, 1.0],
    }
    left.put_back()
    assert [tensor.tolist() for tensor in (grown, written, moved)] == [[0.0, 0.0]] * 3


def test_variables_of_functions_are_unset_again() -> None:
    def make() -> Callable[[], None]:
        def later() -> None:
            nonlocal total
            total = 1

        total: int
        return later

    later = make()
    cell = later.__closure__[0]  # type: ignore[index]
    left = LeftBehind(Holds(later))
    later()
    assert [*left.changes()[ELSEWHERE].values()] == [1]
    left.put_back()
    with pytest.raises(ValueError, match="empty"):
        _ = cell.cell_contents


class Data:
    """Around the module: an object that reaches more than is walked."""

    def __init__(self) -> None:
        self.count, self.rows, self.samples = 0, [Row() for _ in range(20)], list[Tensor]()


class Row:
    """One of its many objects."""

    def __init__(self) -> None:
        self.number = 0


def test_of_large_objects_around_the_module_numbers_and_lengths_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_behind, "_FEW_OBJECTS", 10)
    data = Data()
    left = LeftBehind(Holds(None), [("data", data)])
    data.count = 3
    data.samples.append(torch.zeros(2))
    data.rows[0].number = 4  # is not looked at
    assert left.changes()[ELSEWHERE] == {"data.count": 3, "data.samples": 1}
    left.put_back()
    assert (data.count, data.samples, data.rows[0].number) == (0, [], 4)
