"""Plans of forwards alone: stages that take about equally long, and rounds that keep all workers busy."""

import pytest

from lightning_roundpipe.planning.forward_plan import ForwardPlan, plan_forward
from lightning_roundpipe.planning.schedule import Span

NBYTES = 1000


def plan_of(seconds, workers, stage_bytes=None):
    layers = range(len(seconds))
    return plan_forward(seconds, layers, dict.fromkeys(layers, NBYTES), workers, stage_bytes)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("seconds", [[1.0], [0.5, 4.0] * 20], ids=len)
def test_stages_cover_all_calls_in_order(seconds, workers):
    plan = plan_of(seconds, workers)
    assert [call for span in plan.forward for call in span.calls()] == list(range(len(seconds)))
    assert [plan.stage_of_forward[span.first] for span in plan.forward] == list(range(len(plan.forward)))


def test_equal_layers_make_a_stage_for_each_worker():
    assert plan_of([1.0] * 12, 4).forward == (Span(0, 2), Span(3, 5), Span(6, 8), Span(9, 11))


def test_stages_fit():
    plan = plan_of([1.0] * 12, 3, stage_bytes=2 * NBYTES)
    assert max(map(len, plan.forward)) == 2
    assert max(map(len, plan_of([1.0] * 12, 3, stage_bytes=1).forward)) == 1


def test_rounds():
    """A round has all batches in flight, if its stages can keep the workers busy."""
    plans = {stages: ForwardPlan(tuple(Span(i, i) for i in range(stages))) for stages in (1, 2, 3, 8)}
    assert {stages: plan.round_batches(4, 8) for stages, plan in plans.items()} == {1: 2, 2: 4, 3: 4, 8: 8}
    assert plans[1].round_batches(4, 2) == 1
