"""Seeds, and who holds the generator when."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState, Randomness, derive


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_are_the_same_everywhere_and_differ_for_different_keys() -> None:
    assert derive(1, 2, 3) == derive(1, 2, 3)
    seeds = [derive(1, 23), derive(12, 3), derive(1, 2, 3), derive(123), derive(-123), derive()]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_callers_state_is_given_back(device: Device) -> None:
    expected = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    state = GlobalRandomState([device])
    state.park()
    draw()
    state.restore()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert [random.getstate(), np.random.get_state()[1].tolist()] == expected[1:]


def learned(device: Device) -> Randomness:
    """Call 0 draws from torch, call 1 from the host's generators, call 2 not at all."""
    randomness = Randomness()
    for call, draws in enumerate((lambda: torch.rand(()), random.random, lambda: None)):
        with randomness.segment(("call", call), (call,), device, "a layer"):
            draws()
    randomness.learning = False
    return randomness


@pytest.mark.parametrize("call", [0, 1])
def test_what_draws_is_seeded_each_time(device: Device, call: int) -> None:
    """The recomputation draws what the forward drew, whatever was drawn between them; and another seed, others."""
    randomness = learned(device)
    drawn = []
    for seed in (5, 5, 6):
        with randomness.segment(("call", call), (seed,), device, "a layer"):
            drawn.append(draw()[1:] if call else draw()[:1])
        random.random()
    assert drawn[0] == drawn[1] != drawn[2]


def test_learning_seeds_all_as_later_steps_do(device: Device) -> None:
    """The first batch runs in another way, and its masks are the same nevertheless."""
    first = Randomness()
    with first.segment("x", (5,), device, "a layer"):
        one = draw()
    first.learning = False
    with first.segment("x", (5,), device, "a layer"):
        assert draw() == one


def test_what_begins_to_draw_later_is_refused(device: Device) -> None:
    randomness = learned(device)
    with (
        pytest.raises(RoundPipeError, match="drawn in a layer"),
        randomness.segment(("call", 2), (5,), device, "a layer"),
    ):
        torch.rand(())
    with randomness.segment(("call", 0), (5,), device, "a layer"):
        torch.rand(())
    with randomness.segment(("call", 2), (5,), device, "a layer"):
        pass  # nothing is left of it


def test_the_generator_is_held_from_seeding_to_return(device: Device) -> None:
    """Other threads share it."""
    from concurrent.futures import ThreadPoolExecutor

    randomness = learned(device)

    def is_free() -> bool:
        free = device.generator_lock.acquire(blocking=False)
        if free:
            device.generator_lock.release()
        return free

    with ThreadPoolExecutor(1) as other:
        for call, held in ((0, True), (1, True), (2, False)):
            with randomness.segment(("call", call), (5,), device, "a layer"):
                assert other.submit(is_free).result() is not held
            assert other.submit(is_free).result()


def test_a_generator_in_use_elsewhere_says_nothing(device: Device) -> None:
    """Who does not draw cannot tell by the generator's state while another one draws, and does not wait for it."""
    from concurrent.futures import ThreadPoolExecutor

    randomness = learned(device)
    with ThreadPoolExecutor(1) as other:
        other.submit(device.generator_lock.acquire).result()
        try:
            with randomness.segment(("call", 2), (5,), device, "a layer"):
                torch.rand(())
        finally:
            other.submit(device.generator_lock.release).result()
