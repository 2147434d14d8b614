from __future__ import annotations

import pytest
from planning.making import call

from lightning_roundpipe.planning import Costs, Plan, greedy_partition
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.memory import device_bytes
from lightning_roundpipe.planning.occupancy import find_occupancy
from lightning_roundpipe.planning.pipeline import Rules, run_steps


def costs(n: int) -> Costs:
    return Costs(tuple(call(f"layers.{i}", weights=100 + i, gradients=40, activations=10) for i in range(n)))


def test_counted_by_hand() -> None:
    """Forward 0 to 1 on worker 0, fused 1 to 4 on worker 1, recomputation and backward from 2 on worker 0."""
    run = run_steps(Plan.parse("forward 0; fused 1; backward 0; round 1; recompute ahead"), costs(2), 2, 1)
    [first, second], host = find_occupancy(run, costs(2))
    assert list(zip(first.times_s, first.held, strict=True)) == [(0, 110), (1, 150), (6, 0)]
    assert list(zip(second.times_s, second.held, strict=True)) == [(1, 151), (4, 0)]
    assert (first.peak, second.peak) == (150, 151)
    assert list(zip(host.times_s, host.held, strict=True)) == [(1, 5), (6, 0)]


@pytest.mark.parametrize("rate", [1e12, 300.0, 30.0])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1])
def test_never_more_than_is_set_aside(rate: float, workers: int, staleness: int) -> None:
    model = costs(8)
    plan = greedy_partition(model, 3, 4, stage_bytes=400)
    run = run_steps(plan, model, workers, 4, Rules(1 if staleness else 0, links=Links(rate, rate)), 3)
    held, host = find_occupancy(run, model)
    assert 0 < max(one.peak for one in held) <= device_bytes(plan, model, workers)
    assert all(one.held[-1] == 0 and min(one.held) >= 0 for one in [*held, host] if one.held)
    saved = sum(c.boundary_bytes for c in model.calls[: plan.fused.first])
    assert 2 * saved < host.peak <= (8 if staleness else 4) * saved
