import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_roundpipe.planning import Plan, Span

GOLDENS = [
    (
        "forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4",
        Plan((Span(0, 3), Span(4, 7)), Span(8, 11), (Span(4, 7), Span(0, 3)), 4),
    ),
    (
        "forward 0-4; fused 5; backward 4 2-3 0-1; round 16",
        Plan((Span(0, 4),), Span(5, 5), (Span(4, 4), Span(2, 3), Span(0, 1)), 16),
    ),
    ("forward none; fused 0-2; backward none; round 1", Plan.single(3)),
    ("forward 0 1 2; fused 3; backward 2 1 0; round 2", Plan.per_call(4, round_microbatches=2)),
]


@st.composite
def plans(draw):
    """Any valid plan of up to 40 calls."""
    fused = draw(st.integers(0, 39))
    last = draw(st.integers(fused, 39))

    def spans():
        if fused == 0:
            return ()
        cuts = sorted(draw(st.sets(st.integers(1, fused - 1)))) if fused > 1 else []
        return tuple(Span(a, b - 1) for a, b in zip([0, *cuts], [*cuts, fused], strict=True))

    return Plan(spans(), Span(fused, last), spans()[::-1], draw(st.integers(1, 99)))


@pytest.mark.parametrize(("text", "plan"), GOLDENS)
def test_text_golden(text, plan):
    assert str(plan) == text
    assert Plan.parse(text) == plan
    plan.validate([f"layers.{number}" for number in range(plan.fused.last + 1)])


@given(plans())
def test_text_round_trips(plan):
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(str(plan).replace("; ", "\n")) == plan


@given(plans())
def test_valid_plan_runs_every_call_once_each_way(plan):
    calls = range(plan.fused.last + 1)
    plan.validate([str(number) for number in calls])
    stages = plan.stages()
    assert [stage.position for stage in stages] == list(range(len(stages)))
    assert [Span(stage.first, stage.last) for stage in stages] == [*plan.forward, plan.fused, *plan.backward]
    assert len(plan.stage_of_forward) == len(calls)
    assert list(plan.stage_of_forward) == sorted(plan.stage_of_forward)
    for number in calls:
        ahead = stages[plan.stage_of_forward[number]]
        assert ahead.first <= number <= ahead.last
        [back] = [stage for stage in stages if stage.phase != "forward" and stage.first <= number <= stage.last]
        assert (ahead == back) == (ahead.phase == "fused") == (back.phase == "fused") == (number >= plan.fused.first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan: expected text like 'forward 0-3"),
        ("forward 0; fused 1; round 2", "is no plan"),
        ("forward; fused 0; backward none; round 2", "is no plan"),
        ("forward 0; fused 1; backward 0; round two", "is no plan"),
        (f"forward 0; fused 1; backward 0; round {10**20}", "is no plan"),
        ("forward 0; fused 1; backward 0; round 2; round 3", "is no plan"),
        ("forward 0; fused 1 2; backward 0; round 2", "is no plan"),
        ("forward 0; fused none; backward 0; round 2", "is no plan"),
        ("forward 0; fused 1; backward 0; round 2; unpack 0", "is no plan"),
        ("forward 0; fused 1; backward 0; round 2; unpack once 0-1 1", "must name stages, each once, from 0 to 2"),
        ("forward 0; fused 1; backward 0; round 2; unpack once 1-99", "must name stages, each once, from 0 to 2"),
        ("forward 3-0; fused 4; backward 0-3; round 2", "plan: 3-0 is not a span of calls: write the lower call first"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.parse(text)


def test_calls_that_are_carried_and_stages_that_unpack_once_print_and_parse():
    text = "forward 0-1 2-4; fused 5; backward 4 0-3; round 2; recompute ahead; unpack once 1; carry 0-2 4"
    plan = Plan.parse(text.replace("carry 0-2 4", "carry 4 1-2 0"))
    assert str(plan) == text and Plan.parse(text) == plan and plan.carry == (0, 1, 2, 4)
    plan.validate()
    text = "forward 0-1 2; fused 3; backward 2 0-1; round 2; unpack once 0-2 4"
    plan = Plan.parse(text.replace("0-2 4", "4 1-2 0"))
    assert str(plan) == text and Plan.parse(text) == plan
    assert [stage.unpacks_once for stage in plan.stages()] == [True, True, True, False, True]


CALLS = ["embed", *(f"layers.{number}" for number in range(6)), "head"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward 0-3; fused 4-9; backward 0-3; round 4", "the forward pass .* of the 8 calls .* where call 8 is due"),
        ("forward 0-3; fused 4-6; backward 0-3; round 4", "of the 8 calls"),  # it ends before the trace does
        ("forward 0-3 3-4; fused 5-7; backward 0-4; round 4", r"the forward pass .* call 4 \('layers.3'\) is due"),
        ("forward 0-3; fused 4-7; backward 2-4 0-1; round 4", r"the backward pass .* call 5 \('layers.4'\) is due"),
        ("forward 1-3; fused 4-7; backward 0-3; round 4", r"the forward pass .* call 0 \('embed'\) is due"),
        ("forward 2-3 0-1; fused 4-7; backward 0-3; round 4", r"call 0 \('embed'\) is due. Forward stages ascend"),
        ("forward 0-3; fused 4-7; backward 0-3; round 4; carry 3-5", "carry 3-5 names call 4, which no backward stage"),
        ("forward 0-3; fused 4-7; backward 0-1 2-3; round 4", r"the backward pass .* call 0 \('embed'\) is due"),
    ],
)
def test_a_plan_that_does_not_run_the_trace(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.parse(text).validate(CALLS)
