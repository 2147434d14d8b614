from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.making import call, even, timed

from lightning_roundpipe.planning import Costs, Plan, pipeline
from lightning_roundpipe.planning.batch import PlanShape, plan_of
from lightning_roundpipe.planning.costs import CallCost
from lightning_roundpipe.planning.links import HostTime, Links
from lightning_roundpipe.planning.memory import WorkerNeeds, device_bytes
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import COMPUTE, Rules, run_steps
from lightning_roundpipe.planning.updates import UpdateModel, Updating, adamw_bytes

TWO = Plan.parse("forward 0; fused 1; backward 0; round 2; recompute ahead")


def rows(run, *kinds):
    return [(e.kind, e.worker, e.microbatch, e.start_s, e.end_s) for e in run.events if e.kind in (kinds or COMPUTE)]


def test_counted_by_hand():
    """Forward 1, fused 1 + 2, recomputation 1 and backward 2; two microbatches on two workers."""
    assert rows(run_steps(TWO, even(2), 2, 2)) == [
        ("forward", 0, 0, 0, 1),
        ("forward", 0, 1, 1, 2),
        ("fused", 1, 0, 1, 4),
        ("fused", 1, 1, 4, 7),
        ("recompute", 0, 0, 2, 3),  # while the gradient is still being made
        ("backward", 0, 0, 4, 6),
        ("recompute", 0, 1, 6, 7),
        ("backward", 0, 1, 7, 9),
    ]
    late = run_steps(replace(TWO, recompute_ahead=False), even(2), 2, 2)
    assert rows(late)[4:] == [
        ("recompute", 0, 0, 4, 5),
        ("backward", 0, 0, 5, 7),
        ("recompute", 0, 1, 7, 8),
        ("backward", 0, 1, 8, 10),
    ]


def test_host_time():
    """Two seconds a call, one a turn: the interpreter takes 3, 5 (a fused call and its backward), and 3."""
    host = HostTime(call_s=2.0, turn_s=1.0)
    run = run_steps(Plan.parse("forward 0; fused 1; backward 0; round 1"), even(2), 1, 1, Rules(host=host))
    assert run.makespan_s == 3 + 5 + 3 + 2, "and the last backward follows"
    with pytest.raises(ValueError, match="hop_s=-1"):
        HostTime(hop_s=-1)


class Times(NamedTuple):
    """Of layers that are alike, and of the head."""

    layers: int
    forward: float
    backward: float
    head_forward: float
    head_backward: float


COMPOSITIONS = st.lists(st.integers(1, 4), max_size=5)
Case = tuple[Times, dict[str, object], int, int, list[float]]
"""Times of layers, a plan, workers, microbatches, and speeds of unequal workers."""


@st.composite
def plans(draw):
    forward, fused = draw(COMPOSITIONS), draw(st.integers(0, 3))
    layers = sum(forward) + fused
    backward, left = [], sum(forward)
    while left:
        backward.append(draw(st.integers(1, left)))
        left -= backward[-1]
    times = Times(max(layers, 0), *(draw(st.floats(0, 4)) for _ in range(4)))
    microbatches = draw(st.integers(1, 12))
    workers = draw(st.integers(1, 6))
    lowest = 2 if workers > 1 and microbatches > 1 else 1  # rounds of one run side by side
    members = draw(st.integers(lowest, microbatches))
    plan = {"forward": forward, "fused": fused, "backward": backward, "round_microbatches": members}
    speeds = draw(
        st.one_of(st.just([]), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=workers, max_size=workers))
    )
    return times, plan, workers, microbatches, speeds


def ours(times, plan, speeds):
    forward, backward = plan["forward"], plan["backward"]
    assert isinstance(forward, list) and isinstance(backward, list) and isinstance(plan["fused"], int)
    shape = PlanShape(len(forward), len(backward), int(str(plan["round_microbatches"])))
    costs = timed(
        [times.forward] * times.layers + [times.head_forward], [times.backward] * times.layers + [times.head_backward]
    )
    return plan_of(shape, [*forward, plan["fused"] + 1, *backward]), costs.at_speeds(speeds) if speeds else costs


# -- steps that repeat -----------------------------------------------------------------------------------------------


@st.composite
def machines(draw, workers):
    """Rules with anything that may take time."""
    rate, stale = st.sampled_from([2.0, 7.0, 40.0, 1e3]), draw(st.sampled_from([0, 1]))
    times = st.sampled_from([0.0, 0.1, 1.5])
    host = HostTime(draw(times), draw(times), draw(times), draw(st.booleans()))
    link = st.builds(Links, rate, rate)
    links = draw(st.one_of(st.none(), link, st.tuples(*[link] * workers)))
    updates = draw(st.one_of(st.none(), st.builds(UpdateModel, rate, st.booleans())))
    network = draw(st.one_of(st.none(), st.builds(Network, st.integers(2, 3), rate, st.sampled_from([0.5, 1.0]))))
    sums_per_s = draw(st.one_of(st.none(), rate))
    return Rules(1 if stale else 0, host, links, updates, sums_per_s, network)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.data())
def test_ends_of_steps_that_repeat_are_those_of_the_whole_simulation(case, data):
    times, plan, workers, microbatches, speeds = case
    made, costs = ours(times, plan, speeds)
    beside = data.draw(st.sampled_from([made.round_microbatches, 1]))
    made = replace(made, round_microbatches=beside, recompute_ahead=data.draw(st.booleans()))
    issue = data.draw(st.sampled_from([0.0, 0.2, 2.0]))
    costs = replace(costs, calls=tuple(replace(one, issue_s=issue, backward_issue_s=issue / 2) for one in costs))
    rules = replace(data.draw(machines(workers)), memory=data.draw(st.none() | st.integers(1, 40)))
    whole = run_steps(made, costs, workers, microbatches, rules, 8).ends_s
    assert pipeline.step_ends(made, costs, workers, microbatches, rules, 8) == pytest.approx(whole, rel=1e-9)


def test_steps_repeat_only_when_the_optimizer_does():
    """It is slower than the workers here, whose first steps are alike until they wait for it."""
    plan = Plan.parse("forward 0 1; fused 2; backward 1 0; round 8; recompute ahead")
    rules = Rules(1, links=Links(10.0, 10.0), updates=UpdateModel(0.1))
    whole = run_steps(plan, sized(3), 3, 8, rules, 10).ends_s
    assert pipeline.step_ends(plan, sized(3), 3, 8, rules, 10) == pytest.approx(whole, rel=1e-9)


def test_a_simulation_is_over_when_steps_repeat(monkeypatch):
    """Also where the slots of a step begin on another one of equal workers each time. Without that it took 16 steps."""
    steps, step = [0], pipeline._Pipeline.step

    def counted(self):
        steps[0] += 1
        step(self)

    monkeypatch.setattr(pipeline._Pipeline, "step", counted)
    plan = Plan.parse("forward 0 1; fused 2; backward 1 0; round 8; recompute ahead")
    rules = Rules(1, links=Links(10.0, 10.0), updates=UpdateModel(2.0))
    pipeline.step_ends(plan, sized(3), 4, 8, rules, 16)
    assert steps[0] <= 5


# -- copies and updates ----------------------------------------------------------------------------------------------


def sized(n):
    return Costs(tuple(call(f"layers.{i}", weights=4, gradients=2) for i in range(n)))


def heavy(weights, gradients):
    """Two layers of a second forward and two backward, and nothing between them."""
    return Costs(tuple(CallCost(f"{i}", 1.0, 2.0, weights, gradients, 0, 0, needs_backward=True) for i in range(2)))


def test_weights_that_do_not_fit_beside_the_slot_before_come_when_it_is_over():
    """Stages of 1, 3 and 3 seconds on one worker, with 2 bytes of weights each, at a byte a second.

    In the largest arena, weights come while the stage before runs. In the smallest one, the fused stage's come beside
    the forward stage, which has no gradients. The backward stage's come when the fused one's gradients have left.
    """
    plan = Plan.parse("forward 0; fused 1; backward 0; round 1")

    def run(gradients, more):
        costs = heavy(2, gradients)
        memory = None if more is None else device_bytes(plan, costs, 1) + more
        return run_steps(plan, costs, 1, 1, Rules(links=Links(1.0, 1.0), memory=memory))

    def loads(gradients, more):
        return [(e.start_s, e.end_s) for e in run(gradients, more).events if e.kind == "upload_weights"]

    assert WorkerNeeds(plan, heavy(2, 2), 1).arena == (4, 8)
    assert loads(2, None) == loads(2, 4) == [(0, 2), (2, 4), (4, 6)]
    assert loads(2, 0) == [(0, 2), (2, 4), (9, 11)], "the fused stage's gradients leave from 7 to 9"
    assert loads(2, 2) == loads(2, None), "there is room for weights beside weights and gradients"
    # The fused stage runs from 4 to 7. The backward stage recomputes until 8, and may sum when gradients have left.
    assert run(9, None).makespan_s == run(1, None).makespan_s == 10
    assert run(1, 2).makespan_s == 10, "the recomputation hides a second of the download"
    assert run(9, 2).makespan_s == 10 + 8


def test_an_update_holds_the_next_step_up():
    plan = Plan.parse("forward 0; fused 1; backward 0; round 1; recompute ahead")
    costs = sized(2)
    free = run_steps(plan, costs, 2, 1, Rules(), 2)
    eager = run_steps(plan, costs, 2, 1, Rules(updates=UpdateModel(1.0)), 2)
    clipped = run_steps(plan, costs, 2, 1, Rules(updates=UpdateModel(1.0, at_once=True)), 2)
    assert free.ends_s[0] == eager.ends_s[0] == clipped.ends_s[0] == 6
    # The head's update (2 s) runs during the last backward; layer 0's, 6 to 8, holds the next forward up.
    assert [(e.position, e.start_s, e.end_s) for e in eager.events if e.kind == "update"][:2] == [(1, 4, 6), (2, 6, 8)]
    assert eager.ends_s[1] == free.ends_s[1] + 2
    # If all go at once, nothing starts before 6; layer 0 goes first, and the head's chases the next forward.
    assert [(e.position, e.start_s, e.end_s) for e in clipped.events if e.kind == "update"][:2] == [
        (2, 6, 8),
        (1, 8, 10),
    ]
    assert clipped.ends_s[1] == eager.ends_s[1] + 1
    stale = run_steps(plan, costs, 2, 1, Rules(staleness=1, updates=UpdateModel(1.0)), 6)
    assert stale.period_s(4) < eager.ends_s[1] - eager.ends_s[0]


def test_of_the_layers_that_are_there_the_first_is_updated_first():
    """A slow update of the head keeps layers 2, 1 and 0 waiting, which arrive in this order."""
    costs = Costs((*(call(f"layers.{i}", gradients=2) for i in range(3)), call("head", gradients=20)))
    updating = Updating(UpdateModel(1.0), costs)
    rows = updating.step({"head": 0.0, "layers.2": 5.0, "layers.1": 6.0, "layers.0": 7.0})
    assert rows == [("head", 0, 20), ("layers.0", 20, 22), ("layers.1", 22, 24), ("layers.2", 24, 26)]
    assert updating.published(rows)["layers.1"] == 24
    rows = updating.step({"head": 20.0, "layers.1": 30.0, "layers.0": 31.0})  # which does not begin what is not there
    assert rows == [("head", 26, 46), ("layers.0", 46, 48), ("layers.1", 48, 50)]
    assert updating.step({"layers.0": 60.0, "head": 55.0})[0] == ("head", 55, 75)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    plans(),
    st.floats(1, 50),
    st.floats(1, 50),
    st.sampled_from([{}, {"at_once": True}, {"blocking": True}]),
    st.sampled_from([0, 1]),
)
def test_the_rules_hold(case, rate, speed, kind, staleness):
    times, plan, workers, microbatches, speeds = case
    made, costs = ours(times, plan, speeds)
    rules = Rules(1 if staleness else 0, links=Links(rate, 2 * rate), updates=UpdateModel(speed, **kind))
    run = run_steps(made, costs, workers, microbatches, rules, 3)
    begins = [0.0, *run.losses_s]
    assert all(event.start_s >= begins[event.step] for event in run.events if event.kind != "update")
    assert all(later >= end for later, end in zip(run.losses_s[1:], run.ends_s, strict=False))  # two on their way
    free = run_steps(made, costs, workers, microbatches, Rules(1 if staleness else 0), 3)
    assert all(a >= b - 1e-9 for a, b in zip(run.ends_s, free.ends_s, strict=True))
    for kinds in (COMPUTE, ("upload_weights",), ("download_gradients",), ("update",), ("upload_boundary",)):
        of_worker = {}
        for event in run.events:
            if event.kind in kinds:  # one thing of a kind at a time
                assert event.start_s >= of_worker.get(event.worker, 0.0) - 1e-9
                of_worker[event.worker] = event.end_s


@pytest.mark.parametrize(
    ("moments", "copy_bytes", "reduced_bytes", "scales", "nbytes"),
    [
        ("fp32", 0, None, False, 28),
        ("fp32", 2, None, False, 30),
        ("bf16", 0, None, False, 20),
        ("bf16", 2, None, False, 22),
        ("int8", 0, None, False, 16 + 1 / 16),
        ("fp32", 0, 2, False, 28 - 2),
        ("fp32", 0, 2, True, 28 - 2),
        ("fp32", 0, None, True, 28 + 8),
    ],
)
def test_bytes_of_an_update(moments, copy_bytes, reduced_bytes, scales, nbytes):
    assert adamw_bytes(moments, copy_bytes, reduced_bytes, scales=scales) == nbytes
