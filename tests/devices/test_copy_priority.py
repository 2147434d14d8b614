"""Who goes first on a link, and for how long others are in the way."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from patience import longer_each_try

from lightning_roundpipe.devices import Device, copy_priority

MakeDevice = Callable[..., Device]
RATE = 100_000


def bytes_of(seconds: float) -> torch.Tensor:
    return torch.ones(int(seconds * RATE), dtype=torch.uint8)


def times_of(device: Device, before: float, between: float, small: float, count: int = 1) -> tuple[float, float, float]:
    """Seconds until activations have arrived, since they were asked for, and until a large copy has, since the start.

    Args:
        device: has a link of `RATE`.
        before: seconds of the large copy.
        between: after which the others are asked for.
        small: seconds of each of them.
        count: of them.
    """
    weights, activations = bytes_of(before), bytes_of(small)
    start = time.perf_counter()
    device.weights_up.copy(torch.zeros_like(weights), weights)
    large = device.weights_up.record(timed=True)
    time.sleep(between)
    asked = time.perf_counter()
    for _ in range(count):
        device.activations_up.copy(torch.zeros_like(activations), activations)
    arrived = device.activations_up.record(timed=True)
    large.wait()
    arrived.wait()
    return arrived.time() - asked, large.time() - start, asked - start


@longer_each_try
def test_activations_wait_for_one_chunk_at_most(make: MakeDevice, times: float) -> None:
    waited, took, _ = times_of(make(bandwidth=RATE / times), 0.3 * 1, 0.1 * times, 0.02)
    assert waited < (0.02 + 0.1) * times, "far less than what is left of the weights"
    assert took > 0.32 * times * 0.99, "both share the link"


@longer_each_try
def test_chunks_take_no_longer_than_the_whole(make: MakeDevice, times: float) -> None:
    """Each chunk's thread wakes up late, and the next one has begun by then."""
    device, weights = make(bandwidth=RATE / times), bytes_of(0.2)  # 200 chunks
    start = time.perf_counter()
    device.gradients_down.copy(torch.zeros_like(weights), weights)
    event = device.gradients_down.record(timed=True)
    event.wait()
    assert 0.19 * times < event.time() - start < 0.26 * times


@pytest.mark.parametrize("nbytes", [1, 24, 4096])
def test_chunks_are_the_whole(nbytes: int) -> None:
    dst, src = torch.zeros(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    pieces = copy_priority.chunks(dst, src, nbytes)
    for there, here in pieces:
        assert there.numel() * 8 <= max(nbytes, 8)
        there.copy_(here)
    assert torch.equal(dst, src)
    assert len(pieces) == {1: 21, 24: 7, 4096: 1}[nbytes]


def test_what_is_not_contiguous_goes_whole() -> None:
    dst, src = torch.zeros(7, 3).t(), torch.randn(3, 7)
    assert [t.shape for pair in copy_priority.chunks(dst, src, 8) for t in pair] == [(3, 7), (3, 7)]
