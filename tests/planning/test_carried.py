"""Plans that carry products: their times and memory by hand, and that the search takes them only where they pay."""

import math
from dataclasses import replace

import pytest
import torch
from planning.making import call

from lightning_roundpipe.estimates.meter import Meter
from lightning_roundpipe.estimates.nominal import GPU
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.carried import carrying_within, kinds, spread
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.memory import carried_bytes, device_bytes, fits
from lightning_roundpipe.planning.pipeline import Rules, run_steps, step_ends
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.search import baseline_within, search_partition

TEN = Rules(links=Links(10.0, 10.0))


def carried(n, nbytes, **others):
    """Calls of 1 s and 2 s, of which products take 0.75 s, whose weights and inputs take no time to travel."""
    made = call("", weights=0, gradients=0, products=((8, nbytes, 0.75),), **others)
    return Costs(tuple(replace(made, layer=f"layers.{number}", boundary_bytes=0) for number in range(n)))


def test_products_leave_behind_the_forward_and_come_before_the_recomputation():
    plan = Plan.parse("forward 0-1; fused 2; backward 0-1; round 1; carry 0-1")
    run = run_steps(plan, carried(3, 20), 1, 1, TEN)
    assert [(event.kind, event.start_s, event.end_s) for event in run.events] == [
        ("download_boundary", 1, 3),
        ("download_boundary", 3, 5),
        ("forward", 0, 2),
        ("fused", 2, 5),
        ("upload_boundary", 5, 7),  # of the second call, which runs first
        ("upload_boundary", 7, 9),  # of the first call, while the second one runs
        ("recompute", 7, 7.5),
        ("backward", 7.5, 11.5),
    ]


def test_products_of_two_calls_at_most_are_on_their_way_to_the_host():
    """Products take 3 s. The third call waits until 4 for those of the first, the fourth until 7."""
    plan = Plan.parse("forward 0-3; fused 4; backward 0-3; round 1; carry 0-3")
    [forward] = [e for e in run_steps(plan, carried(5, 30), 1, 1, TEN).events if e.kind == "forward"]
    assert forward.end_s == 8


def test_what_a_stage_gives_out_goes_before_products():
    """It takes the second behind the forward, in which products of 3 s wait."""
    costs = Costs(tuple(replace(one, boundary_bytes=10) for one in carried(2, 30)))
    plan = Plan.parse("forward 0; fused 1; backward 0; round 1; carry 0")
    down = [e for e in run_steps(plan, costs, 2, 1, TEN).events if e.kind == "download_boundary" and not e.slot]
    assert [(event.start_s, event.end_s) for event in down] == [(2, 3), (2, 6)]


def test_products_with_few_flops_are_computed_again():
    made = ((8, 20, 0.25), (100, 10, 0.5))
    costs = Costs(tuple(replace(one, products=made) for one in carried(3, 0)))
    assert kinds(costs) == [0, 28]
    plan = Plan.parse("forward 0-1; fused 2; backward 0-1; round 1; carry 0-1 from 28")
    assert Plan.parse(str(plan)) == plan == spread(replace(plan, carry=(), carry_least=0), costs, 1.0, 28)
    assert carried_bytes(plan, costs, 1) == 2 * 10
    assert run_steps(plan, costs, 1, 1).makespan_s == 11 - 2 * 0.5
    assert replace(plan, carry_least=0) == Plan.parse(str(plan).removesuffix(" from 28"))


def test_unequal_workers_leave_out_products_at_their_own_speed():
    slow = carried(2, 0).at_speeds([1.0, 0.5]).on(1).carrying([0])
    assert (slow.calls[0].forward_s, slow.calls[1].forward_s) == (0.5, 2.0)


def test_memory_by_hand():
    """Two workers: one still has the last stage of a round when the other has begun the next round."""
    costs = carried(3, 1, waiting=0)
    costs = Costs((replace(costs.calls[0], products=((8, 10, 0.75),)), *costs.calls[1:]))
    none = Plan.parse("forward 0 1; fused 2; backward 1 0; round 3")
    plan = replace(none, carry=(0, 1))
    assert carried_bytes(plan, costs, 1) == 3 * 11
    assert carried_bytes(plan, costs, 2) == 3 * 20
    assert carried_bytes(none, costs, 2) == 0
    assert device_bytes(plan, costs, 2) == device_bytes(none, costs, 2) + 20
    assert not fits(plan, costs, 2, device_bytes(plan, costs, 2) - 1)


def test_carried_calls_are_spread():
    costs = carried(9, 20)
    costs = Costs((replace(costs.calls[0], products=()), *costs.calls[1:]))
    plan = Plan.parse("forward 0-6; fused 7-8; backward 0-6; round 2; recompute ahead")
    assert spread(plan, costs, 1.0).carry == (1, 2, 3, 4, 5, 6)
    assert spread(plan, costs, 0.5).carry == (2, 4, 6)
    assert not spread(plan, costs, 0.5).recompute_ahead
    assert spread(plan, costs, 0.0) == plan


def _judge(costs, rate, host, microbatches):
    def seconds(plan):
        if carried_bytes(plan, costs, 2) > host:
            return math.inf
        return step_ends(plan, costs, 2, microbatches, Rules(links=Links(rate, rate)), 4)[-1]

    return seconds


@pytest.mark.parametrize("search_seconds", [0.0, 0.5])
@pytest.mark.parametrize(
    ("rate", "host", "carries"),
    [(100.0, math.inf, True), (100.0, 500, True), (100.0, 20, False), (1.0, math.inf, False)],
)
def test_a_plan_carries_only_where_it_is_faster(rate, host, carries, search_seconds):
    costs, microbatches = carried(12, 20), 8
    problem, judge = Problem(costs, 2, microbatches, 2, 2), _judge(costs, rate, host, microbatches)
    best = search_partition(problem, search_seconds, judge)
    found = carrying_within(best, problem, judge, search_seconds=search_seconds)
    assert bool(found.carry) is carries
    found.validate(costs.layers)
    assert judge(found) < judge(best) if carries else found == best
    assert carried_bytes(found, costs, 2) <= host


def test_stages_stay_as_they_are_if_asked():
    costs = carried(12, 20)
    problem, judge = Problem.usual(costs, 2, 8), _judge(costs, 100.0, math.inf, 8)
    plan = baseline_within(problem)
    found = carrying_within(plan, problem, judge, cuts=False)
    assert found.carry
    assert replace(found, carry=()) == replace(plan, recompute_ahead=False)


def test_products_are_counted_from_shapes():
    """Those that torch's FLOP counter counts: of 4 x 32 and of 4 x 8 in fp32, and no element-wise operation."""
    x, first, second = (torch.empty(size, device="meta") for size in ((4, 16), (16, 32), (32, 8)))
    with Meter(GPU) as meter:
        torch.tanh(x @ first) @ second
    assert {flops: nbytes for flops, (nbytes, _) in meter.work.products.items()} == {8: 4 * 4 * 32, 16: 4 * 4 * 8}
    product_s = sum(seconds for _, seconds in meter.work.products.values())
    assert product_s == pytest.approx(2 / 3 * meter.work.seconds, rel=1e-3)  # `kernel_s` each
