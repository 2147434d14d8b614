"""Layers that are called again in a backward of user code, which autograd runs on threads of its own."""

from __future__ import annotations

from typing import Any

import pytest
from checkpointed import KINDS, PLACES, Net, batches, build
from harness import assert_same, ours, run


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_plain(place: type[Net], kind: str, microbatches: int, devices: list[Any]) -> None:
    module = build(place, kind)
    expected = run(ours(num_microbatches=1), build(place), batches())
    assert_same(expected, run(ours(num_microbatches=microbatches), module, batches(), devices=2))
