"""Several machines in the planner: what they exchange, when it is there, and what each host holds."""

import json
import math
from itertools import pairwise

import pytest

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import Parameters, host_items
from lightning_roundpipe.planning.network import Exchange, Network, parse_rate
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.updates import UpdateModel

MB = 10**6


def costs_of(*gradients):
    return Costs(
        tuple(
            CallCost(f"layers.{number}", 1.0, 2.0, size // 2, size, 0, 0, True) for number, size in enumerate(gradients)
        )
    )


def test_a_step_of_two_layers_by_hand():
    """Two machines with 10 MB/s: half of all bytes crosses. Each layer has 20 MB of gradients and 10 MB of weights."""
    network = Network(2, 10 * MB, weight_share=0.5)
    exchange = Exchange(network, costs_of(20 * MB, 20 * MB), updates=UpdateModel(10 * MB))
    published = exchange.step({"layers.1": 3.0, "layers.0": 3.5})
    # layers.1 is reduced 3.0 to 4.0 and updated until 6.0; layers.0 4.0 to 5.0, updated by the other machine until 7.0.
    assert published == {"layers.1": 6.5, "layers.0": 7.5}
    assert exchange.busy_s == 3.0 == network.wire_bytes(40 * MB) / network.bytes_per_s


def test_a_slower_network_takes_longer_and_staleness_hides_more():
    costs, plan = costs_of(*[20 * MB] * 8), Plan.per_call(8, 4)
    updates = UpdateModel(1e9)

    def period(rate, staleness):
        rules = Rules(staleness=staleness, updates=updates, network=Network(2, rate, 0.5))
        return run_steps(plan, costs, 2, 8, rules, 16).period_s(8)

    for staleness in (0, 1):
        times = [period(rate, staleness) for rate in (math.inf, 40 * MB, 10 * MB, MB)]
        assert all(fast <= slow for fast, slow in pairwise(times))
        assert times[-1] >= 0.5 * (160 + 80)  # what is on the network of each step, all of it
    assert period(2 * MB, 1) < period(2 * MB, 0)
    assert period(10 * MB, 1) == pytest.approx(period(math.inf, 1), rel=0.01)


@pytest.mark.parametrize(("text", "rate"), [("25Gbit", 3.125e9), ("100 Gbit/s", 12.5e9), ("1.25GB", 1.25e9)])
def test_rates(text, rate):
    assert parse_rate(text, "network") == rate


def test_moments_are_the_owners():
    costs, plan = costs_of(4000, 4000), Plan.per_call(2, 4)
    alone, shared = (
        {item.name.partition(", 1/")[0]: item.nbytes for item in host_items(plan, costs, parameters)}
        for parameters in (Parameters(2000, 100, 2), Parameters(2000, 100, 2, machines=4))
    )
    assert 4 * shared.pop("AdamW's two moments, fp32") == alone.pop("AdamW's two moments, fp32")
    assert shared == alone


TINY = ("model=tiny_llama", "hardware=rtx4090x2", "sequence_length=64", "microbatch_size=2", "search_seconds=0")


def test_the_command_says_what_communication_costs(plan_command):
    one = json.loads(plan_command(*TINY, "format=json")[1])
    same = (*TINY[:-1], "format=json", f"plan={one['plan']}", "machines=2")
    two = json.loads(plan_command(*same, "network=100Gbit")[1])
    slow = json.loads(plan_command(*same, "network=10Mbit")[1])
    assert (one["machines"], one["communication"]) == (1, None)
    sent = 0.5 * one["trained_parameters"] * (4 + 4)
    for found, rate in ((two, 12.5e9), (slow, 1.25e6)):
        exchanged = found["communication"]
        assert exchanged["bytes_per_s"] == pytest.approx(0.7 * rate)
        assert exchanged["sent_bytes"] == pytest.approx(sent, rel=0.01)  # gradients' places are aligned
        assert exchanged["busy_ms"] == pytest.approx(1e3 * exchanged["sent_bytes"] / exchanged["bytes_per_s"], rel=1e-3)
        assert found["tokens_per_s"] == pytest.approx(2 * 4 * 2 * 64 / (found["period_ms"] / 1e3))
    assert not slow["communication"]["is_hidden"]
    assert slow["communication"]["cost_ms"] >= 0.5 * slow["communication"]["busy_ms"]
    assert two["period_ms"] < slow["period_ms"]
    code, out, _ = plan_command(*TINY, "machines=2", "network=10Mbit")
    said = " ".join(out.split())
    assert code == 0
    assert "2 machines: each sends and receives" in said
    assert "are not hidden" in said
    assert "AdamW's two moments, fp32, 1/2 of them" in said
