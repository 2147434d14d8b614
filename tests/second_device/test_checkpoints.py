"""Layers that are called again in a backward of user code, which autograd runs on threads of its own."""

from __future__ import annotations

from typing import Any

import pytest
from checkpointed import KINDS, PLACES, Net, batches, build
from harness import assert_same, ours, run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_the_same_without_checkpoints(place: type[Net], kind: str, devices: list[Any]) -> None:
    results = [run(ours(num_microbatches=2), build(place, each), batches(), devices=2) for each in ("", kind)]
    assert_same(*results)
