import json
from dataclasses import replace

import pytest
from planning.making import call, even

from lightning_roundpipe.planning import Costs


def test_layer_called_twice_is_resident_once_and_summed_twice():
    costs = Costs((call("shared"), call("own"), call("shared")))
    assert costs.stage_bytes(0, 2, "forward").weights == 200
    assert costs.stage_bytes(0, 2, "backward").gradients == 120
    assert costs.stage_bytes(2, 2, "forward").weights == 100
    assert costs.layers == ("shared", "own", "shared")


def test_what_graphs_keep_and_what_comes_beside_it():
    """The first call's backward takes most, but the graphs of those behind it are gone by then."""
    costs = Costs((call("a", activations=20, kept_bytes=10), call("b", activations=30, kept_bytes=20)))
    assert costs.stage_bytes(0, 1, "fused").activations == 10 + 30
    assert costs.stage_bytes(0, 1, "backward").activations == 30
    assert costs.stage_bytes(0, 1, "backward", ahead=True).activations == 10 + 30
    assert costs.stage_bytes(0, 1, "forward").activations == 30
    lean = Costs(tuple(replace(one, forward_bytes=7 + i) for i, one in enumerate(costs)))
    assert lean.stage_bytes(0, 1, "forward").activations == 8


def test_costs_survive_json():
    costs = Costs((call("a", 0.1, shared=((1, 2), (3, 4))), call("b", 1 / 3, needs_backward=False, kept_bytes=3)))
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert len(costs) == len(list(costs)) == 2


def _changed(**change):
    data = even(2).to_dict()
    data["calls"][1].update(change)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"as Costs.to_dict\(\) writes them: KeyError: 'calls'"),
        (_changed(forwards=1), "unexpected keyword argument 'forwards'"),
        ({"calls": [{"layer": "a"}]}, "missing .* 'forward_s'"),
        (_changed(backward_s=-1), "backward_s=-1 of layer 'layers.1' must be a number of at least 0"),
    ],
)
def test_bad_costs_are_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        Costs.from_dict(data)


def test_unequal_workers_have_their_own_times_and_a_mean():
    costs = even(2).at_speeds([2, 0.5])
    assert [call.forward_s for call in costs.on(0)] == [0.5, 0.5]
    assert [call.backward_s for call in costs.on(1)] == [4, 4]
    assert costs.calls[0].forward_s == pytest.approx(2 / (2 + 0.5))  # both busy, they do 2.5 forwards a second
    assert costs.on(0).calls[0].weight_bytes == even(2).calls[0].weight_bytes
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
