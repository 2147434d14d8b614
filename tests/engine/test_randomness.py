"""Seeds, and what is known to draw."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.randomness import CallerRandomState, Randomness, derive


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_are_the_same_everywhere_and_differ_for_different_keys() -> None:
    assert derive(1, 2, 3) == derive(1, 2, 3)
    seeds = [derive(1, 23), derive(12, 3), derive(1, 2, 3), derive(123), derive(-123), derive()]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_callers_state_is_given_back() -> None:
    expected = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    state = CallerRandomState([])
    assert not state.has_moved
    draw()
    assert state.has_moved
    state.restore()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert [random.getstate(), np.random.get_state()[1].tolist()] == expected[1:]


def learned() -> Randomness:
    """Layer 0 draws from torch, layer 1 from the host's generators, layer 2 not at all."""
    randomness = Randomness([])
    for layer, draws in enumerate((lambda: torch.rand(()), random.random, lambda: None)):
        assert randomness.begin(layer, None, (layer,))
        draws()
        randomness.end(layer)
    randomness.learning = False
    return randomness


@pytest.mark.parametrize("layer", [0, 1])
def test_what_draws_is_seeded_each_time(layer: int) -> None:
    """The recomputation draws what the forward drew, whatever was drawn between them; another seed, others."""
    randomness = learned()
    drawn = []
    for seed in (5, 5, 6):
        assert randomness.begin(layer, None, (seed,))
        drawn.append(draw()[1:] if layer else draw()[:1])
        randomness.end(layer)
        random.random()
    assert drawn[0] == drawn[1] != drawn[2]
    randomness.check()


def test_a_layer_that_draws_later_is_refused() -> None:
    randomness = learned()
    assert not randomness.begin(2, None, (5,))
    torch.rand(())
    with pytest.raises(RoundPipeError, match="none were drawn in the first batch"):
        randomness.check()
