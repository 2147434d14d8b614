from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from planning.making import call, even, timed

from lightning_roundpipe.planning import CallCost, Costs, Phase


@pytest.mark.parametrize(
    ("phase", "seconds", "weights", "gradients", "total"),
    [
        ("forward", 3.0, 600, 0, 600 + 30),
        ("fused", 9.0, 600, 90, 600 + 90 + 60),
        ("backward", 9.0, 600, 90, 600 + 90 + 30),
    ],
)
def test_stage_counts_what_its_phase_needs(
    phase: Phase, seconds: float, weights: int, gradients: int, total: int
) -> None:
    costs = Costs(
        (
            call("a", weights=100, gradients=20, activations=10),
            call("b", weights=200, gradients=30, activations=20),
            call("c", weights=300, gradients=40, activations=30),
        )
    )
    need = costs.stage_bytes(0, 2, phase)
    assert costs.stage_time_s(0, 2, phase) == seconds
    assert (need.weights, need.gradients, need.total) == (weights, gradients, total)


def test_layer_called_twice_is_resident_once_and_summed_twice() -> None:
    costs = Costs((call("shared"), call("own"), call("shared")))
    assert costs.stage_bytes(0, 2, "forward").weights == 200
    assert costs.stage_bytes(0, 2, "backward").gradients == 120
    assert costs.stage_bytes(2, 2, "forward").weights == 100
    assert costs.layers == ("shared", "own", "shared")


def test_call_without_backward_costs_nothing_in_a_backward_stage() -> None:
    costs = Costs((call("embedding", activations=500, needs_backward=False), call("block")))
    assert costs.stage_time_s(0, 1, "backward") == costs.stage_time_s(1, 1, "backward") == 3.0
    assert costs.stage_bytes(0, 0, "backward").total == 0
    assert costs.stage_bytes(0, 1, "backward").total == 150


def test_call_without_backward_runs_forward_in_a_fused_stage_and_keeps_nothing() -> None:
    frozen = call("frozen", activations=7, needs_backward=False)
    costs = Costs((frozen, frozen, call("block", activations=10)))
    need = costs.stage_bytes(0, 2, "fused")
    assert costs.stage_time_s(0, 2, "fused") == 5.0
    assert (need.weights, need.gradients, need.activations) == (200, 40, 10)


def test_what_graphs_keep_and_what_comes_beside_it() -> None:
    """The first call's backward takes most, but the graphs of those behind it are gone by then."""
    costs = Costs((call("a", activations=20, kept_bytes=10), call("b", activations=30, kept_bytes=20)))
    assert costs.stage_bytes(0, 1, "fused").activations == 10 + 30
    assert costs.stage_bytes(0, 1, "backward").activations == 30
    assert costs.stage_bytes(0, 1, "backward", ahead=True).activations == 10 + 30
    assert costs.stage_bytes(0, 1, "forward").activations == 30
    lean = Costs(tuple(replace(one, forward_bytes=7 + i) for i, one in enumerate(costs)))
    assert lean.stage_bytes(0, 1, "forward").activations == 8


def test_what_several_calls_take_is_kept_once() -> None:
    """A mask of 4 that all take, and outputs of 6 that are the next one's input."""
    calls = [call(f"{i}", activations=20, shared=((1, 4),), passed=((1, 6),)) for i in range(3)]
    costs = Costs((replace(calls[0], shared=(), passed=()), *calls[1:]))
    assert costs.stage_bytes(0, 2, "fused").activations == 20 + 10 + 10
    assert costs.stage_bytes(1, 2, "fused").activations == 20 + 10
    # What is recomputed ahead starts from copies, not from the output of the call before.
    assert costs.stage_bytes(0, 2, "backward", ahead=True).activations == 20 + 16 + 16
    assert costs.stage_bytes(0, 2, "backward").activations == 20
    first_is_frozen = Costs((replace(calls[0], needs_backward=False), *calls[1:]))
    assert first_is_frozen.stage_bytes(0, 1, "fused").activations == 20


def test_the_next_calls_inputs_come_meanwhile() -> None:
    costs = Costs(tuple(call(f"{i}", activations=20, input_bytes=5 + i, shared=((1, 4),)) for i in range(3)))
    assert costs.stage_bytes(0, 2, "backward").crowded == 20 + 6 - 4
    for phase, ahead in (("backward", True), ("forward", False), ("fused", False)):
        need = costs.stage_bytes(0, 2, phase, ahead)  # type: ignore[arg-type]
        assert need.crowded == need.activations


def test_costs_survive_json() -> None:
    costs = Costs((call("a", 0.1, shared=((1, 2), (3, 4))), call("b", 1 / 3, needs_backward=False, kept_bytes=3)))
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert len(costs) == len(list(costs)) == 2


def _changed(**change: Any) -> dict[str, Any]:
    data: dict[str, Any] = even(2).to_dict()
    data["calls"][1].update(change)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "list under 'calls'"),
        ({"calls": []}, "at least one call"),
        ({"calls": [3]}, r"calls\[0\] must be a mapping"),
        (_changed(forwards=1), r"calls\[1\] has an unknown key 'forwards'; it takes layer, forward_s"),
        ({"calls": [{"layer": "a"}]}, r"calls\[0\] lacks 'forward_s'"),
        (_changed(backward_s=-1), "backward_s=-1 of layer 'layers.1' must be a number of at least 0"),
        (_changed(forward_s=float("nan")), "forward_s=nan"),
        (_changed(weight_bytes="12"), "weight_bytes='12'"),
        (_changed(kept_bytes=-1), "kept_bytes=-1"),
        (_changed(shared=[[0, 5]]), r"calls\[1\]: shared=\[\[0, 5\]\] must be a list of pairs"),
        (_changed(passed=7), r"calls\[1\]: passed=7 must be a list of pairs"),
    ],
)
def test_bad_costs_are_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs.from_dict(data)


def test_call_costs_are_checked_when_made() -> None:
    with pytest.raises(ValueError, match="activation_bytes=inf of layer 'a'"):
        CallCost("a", 1.0, 1.0, 1, 1, 1, float("inf"), True)  # type: ignore[arg-type]


# -- unequal workers -------------------------------------------------------------------------------------------------


def test_unequal_workers_have_their_own_times_and_a_mean() -> None:
    costs = even(2).at_speeds([2, 0.5])
    assert [call.forward_s for call in costs.on(0)] == [0.5, 0.5]
    assert [call.backward_s for call in costs.on(1)] == [4, 4]
    assert costs.calls[0].forward_s == pytest.approx(2 / (2 + 0.5))  # both busy, they do 2.5 forwards a second
    assert costs.on(0).calls[0].weight_bytes == even(2).calls[0].weight_bytes
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_equal_workers_are_no_case_of_their_own() -> None:
    costs = even(2)
    assert costs.at_speeds([1, 1, 1]) == costs
    assert costs.on(7) is costs
    alternate = costs.at_speeds([1, 0.5, 1, 0.5])
    assert alternate.on(0) is alternate.on(2)
    assert not costs.unequal and alternate.unequal


def test_times_of_unequal_workers_that_make_no_sense() -> None:
    data = even(2).to_dict()
    for times, message in (([[[1, 2]]], "2 pairs"), ([3], "a pair of seconds"), ([[[1, 2, 3], [1, 2]]], "2 pairs")):
        with pytest.raises(ValueError, match=message):
            Costs.from_dict(data | {"times": times})
    with pytest.raises(ValueError, match="speeds="):
        even(2).at_speeds([1, 0])
    with pytest.raises(ValueError, match="workers=3 must be 2"):
        even(2).at_speeds([1, 2]).check_workers(3)


def test_times_that_are_hardly_any_have_a_mean() -> None:
    """The sum of their reciprocals is more than a float holds."""
    least = 1.1125369292536007e-308
    costs = Costs.of_workers([timed([least], [0.0]), timed([2 * least], [1.0])])
    assert costs.calls[0].forward_s == pytest.approx(least * 4 / 3, rel=1e-6)
    assert costs.calls[0].backward_s == 0
