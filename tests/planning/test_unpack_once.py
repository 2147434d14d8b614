"""Plans whose stages unpack packed weights once: what they take in time and memory, and when they are chosen."""

from dataclasses import replace

import pytest

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import device_bytes, fits
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import search_partition, unpacking_plans

MIB = 2**20
PLAN = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 4")


def costs(copies=40 * MIB, calls=4):
    """Of each call's 5 seconds forward and 8 backward, one each is spent on unpacking."""
    return Costs(
        tuple(
            CallCost(
                f"layers.{number}", 5.0, 8.0, 10 * MIB, MIB, MIB, 8 * MIB, True, kept_bytes=4 * MIB,
                unpacked_bytes=copies, unpack_s=1.0, backward_unpack_s=1.0,
            )
            for number in range(calls)
        )
    )  # fmt: skip


@pytest.mark.parametrize(("position", "saved"), [(0, 2 * 3 * 1.0), (2, 4 * 2.0 - 1.0), (4, 2 * (4 * 2.0 - 1.0))])
def test_a_stage_saves_all_but_the_first_unpacking(position, saved):
    """A forward stage has one use a microbatch, the others have two."""
    plan = replace(PLAN, unpack_once=(position,))
    assert run_steps(PLAN, costs(), 1, 4).busy_s - run_steps(plan, costs(), 1, 4).busy_s == pytest.approx(saved)


def test_stages_whose_copies_do_not_fit_unpack_for_each_use():
    need = device_bytes(PLAN, costs(), 1)
    for room, stages in ((0, ()), (50 * MIB, (1, 2, 3)), (100 * MIB, (0, 1, 2, 3, 4))):
        found = Problem.usual(costs(), 1, 4, need + room).unpacking_once(PLAN)
        assert found.unpack_once == stages
        assert fits(found, costs(), 1, need + room)
    assert not Problem.usual(costs(), 1, 4).unpacking_once(PLAN).unpack_once
    assert not Problem.usual(costs(0), 1, 4, 2**40).unpacking_once(PLAN).unpack_once
    # A forward of a single microbatch unpacks once in any case.
    alone = replace(PLAN, round_microbatches=1)
    assert Problem.usual(costs(), 1, 4, 2**40).unpacking_once(alone).unpack_once == (2, 3, 4)


def test_stages_are_cut_for_their_copies_where_that_is_faster():
    """The paper's plan fills the memory with weights; smaller stages with copies take less time."""
    memory, known = 150 * MIB, costs(calls=12)

    def seconds(plan):
        return run_steps(plan, known, 2, 8).makespan_s

    problem, without = (Problem.usual(one, 2, 8, memory) for one in (known, costs(0, 12)))
    per_use = search_partition(without, 0, seconds)
    for search_s in (0, 0.5):
        found = search_partition(problem, search_s, seconds)
        assert found.unpack_once and fits(found, known, 2, memory)
        assert seconds(found) < 0.95 * seconds(per_use)
    assert unpacking_plans([per_use], without) == [per_use]
