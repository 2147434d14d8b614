"""The trace of microbatches that call different layers is a sequence that all of them are parts of."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.core.trace import Trace


def layer(index: int) -> Any:
    return SimpleNamespace(index=index, name=f"layer{index}", mutable_buffers={})


LAYERS = [layer(i) for i in range(6)]


def trace_of(*indices: int) -> Trace:
    trace = Trace()
    for index in indices:
        trace.append(LAYERS[index])
    return trace


def indices(trace: Trace) -> list[int]:
    return [call.layer.index for call in trace.calls]


def is_part(part: Trace, whole: Trace) -> bool:
    position = 0
    for call in part.calls:
        found = whole.find(call.layer, position, can_tape=call.can_tape)
        if found is None:
            return False
        position = found + 1
    return True


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ((0, 1, 2), (0, 1, 2), [0, 1, 2]),
        ((0, 2), (0, 1, 2), [0, 1, 2]),
        ((0, 1, 5), (0, 2, 5), [0, 1, 2, 5]),
        ((0, 2, 5), (0, 1, 3, 5), [0, 1, 2, 3, 5]),
        ((0, 1, 1, 5), (0, 1, 1, 1, 5), [0, 1, 1, 1, 5]),
        ((), (0, 1), [0, 1]),
        ((0, 1), (), [0, 1]),
    ],
)
def test_merged(first: tuple[int, ...], second: tuple[int, ...], merged: list[int]) -> None:
    trace = trace_of(*first)
    trace.take_in(trace_of(*second), 1)
    assert indices(trace) == merged


def test_every_microbatch_is_a_part_of_it() -> None:
    chance = random.Random(5)
    refused = 0
    for again in range(400):
        order = range(6) if again % 2 else [chance.randrange(6) for _ in range(8)]
        parts = [trace_of(*(i for i in order if chance.random() < 0.6)) for _ in range(4)]
        whole = Trace()
        try:
            for part in parts:
                whole.take_in(part, 0)
        except RoundPipeError:
            refused += 1
            assert again % 2 == 0, "only a layer that is called twice can be mistaken for one in another order"
            continue
        assert all(is_part(part, whole) for part in parts)
        uses = [(call.layer.index, call.use) for call in whole.calls]
        assert len(set(uses)) == len(uses)
        for index, calls in itertools.groupby(sorted(uses), key=lambda pair: pair[0]):
            assert [use for _, use in calls] == list(range(len([u for u in uses if u[0] == index])))
    assert refused < 200


@pytest.mark.parametrize(
    ("first", "second", "called", "expected"),
    [
        ((0, 1, 2, 3), (0, 2, 1, 3), 1, 3),
        ((0, 1), (1, 0), 0, None),
        ((0, 1, 2), (0, 4, 2, 1), 1, None),
    ],
)
def test_another_order_is_refused(
    first: tuple[int, ...], second: tuple[int, ...], called: int, expected: int | None
) -> None:
    trace = trace_of(*first)
    with pytest.raises(RoundPipeError, match=f"microbatch 5 called layer 'layer{called}' after") as caught:
        trace.take_in(trace_of(*second), 5)
    assert (f"layer 'layer{expected}' was expected" if expected else "no further layer was expected") in str(caught)


def test_learned_when_nothing_new_can_come() -> None:
    assert Trace().learn([trace_of(0, 1), trace_of(0, 1)], {}, 6), "all alike"
    assert Trace().learn([trace_of(0, 1), trace_of(0, 2)], {}, 3), "all layers were called"
    trace = Trace()
    assert not trace.learn([trace_of(0, 1, 5), trace_of(0, 5)], {}, 6)
    assert not trace.learn([trace_of(0, 2, 5), trace_of(0, 5)], {}, 6)
    assert trace.learn([trace_of(0, 2, 5), trace_of(0, 1, 5)], {}, 6), "nothing new came"


def test_the_fastest_time_counts() -> None:
    trace = Trace()
    seconds = {
        ("forward", 0, 0): [3.0],
        ("forward", 1, 0): [2.0, 5.0],
        ("forward", 1, 1): [4.0],
        ("backward", 1, 1): [6.0],
    }
    trace.learn([trace_of(0), trace_of(0, 1)], seconds, 2)
    assert [(call.forward_s, call.backward_s) for call in trace.calls] == [(2.0, 0.0), (4.0, 6.0)]
