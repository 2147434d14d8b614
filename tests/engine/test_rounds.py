"""Any plan, any delays, calls that are skipped, repeated and swapped, errors anywhere: plain weights, and no hang."""

from __future__ import annotations

import pytest
from engine_rounds import bits, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(4))
def test_rounds(part: int) -> None:
    outcomes = [run(15 * part + seed) for seed in range(15)]
    assert "failed" in outcomes and "trained" in outcomes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(2))
def test_the_same_bits_under_any_plan(part: int) -> None:
    for seed in range(4):
        bits(4 * part + seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_many_rounds(part: int) -> None:
    for seed in range(500):
        run(1000 + 500 * part + seed)
