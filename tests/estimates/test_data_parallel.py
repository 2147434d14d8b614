"""Data parallelism on the same machine: what it takes, in memory and in seconds."""

import pytest

from lightning_roundpipe.estimates.data_parallel import STATE_BYTES, data_parallel_s
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import Parameters
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.updates import adamw_bytes

MACHINE = Hardware(
    title="two", workers=2, flops={"bf16": 1.0}, memory=10_000, memory_bandwidth=1000.0, memory_efficiency=0.5,
    upload=100.0, download=80.0, host_memory=10**9, host_memory_bandwidth=1e6, matmul_efficiency=1.0, kernel_s=0.0,
    hop_s=0.0,
)  # fmt: skip
TRAINED = 100
PARAMETERS = Parameters(TRAINED, 0, 2)
UPDATE_S = adamw_bytes() * TRAINED / 500
SUMS_S = 4 * TRAINED / 80
"""Over the slower direction; of two GPUs, each sends half of the gradients twice."""


def costs(size, activations=10):
    """Two calls of 1 and 3 seconds a sequence."""
    calls = (
        CallCost("a", 1.0 * size, 0.0, 0, 0, 0, activations * size, needs_backward=True),
        CallCost("b", 1.0 * size, 2.0 * size, 0, 0, 0, activations * size, needs_backward=True),
    )
    return Costs(calls)


def test_a_step_is_passes_then_what_is_left_of_the_sums_then_the_update():
    seconds = data_parallel_s(costs, (1,), PARAMETERS, MACHINE, 2, 6, 10_000)
    assert SUMS_S > 2.0
    assert seconds == pytest.approx(3 * 4.0 + (SUMS_S - 2.0) + UPDATE_S)


def test_the_best_size_that_fits_counts():
    def slower_when_small(size):
        return costs(size) if size > 1 else costs(3)

    state = STATE_BYTES * TRAINED
    both = data_parallel_s(slower_when_small, (2, 1), PARAMETERS, MACHINE, 1, 6, state + 40)
    small = data_parallel_s(slower_when_small, (2, 1), PARAMETERS, MACHINE, 1, 6, state + 39)
    assert both == pytest.approx(3 * 8.0 + UPDATE_S)
    assert small is None, "three sequences' activations at size 1"
    assert data_parallel_s(costs, (2, 1), PARAMETERS, MACHINE, 1, 6, state + 39) == pytest.approx(6 * 4.0 + UPDATE_S)


def test_frozen_weights_take_their_compute_format_and_packed_ones_their_bytes():
    parameters = Parameters(TRAINED, 50, 2, packed=40, packed_bytes=25)
    state = STATE_BYTES * TRAINED + 2 * 10 + 25
    assert data_parallel_s(costs, (1,), parameters, MACHINE, 1, 1, state + 20) is not None
    assert data_parallel_s(costs, (1,), parameters, MACHINE, 1, 1, state + 19) is None
