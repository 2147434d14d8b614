"""A step of emulated devices, replayed as if each of them computed alone."""

from types import SimpleNamespace

import pytest
import torch
from reports.test_traces import calls, synthetic

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.reports.planned import replay, replay_of

COMPUTE = ("forward", "recompute", "backward")


def report(**changes):
    """What a strategy reports of the step in test_traces, whose 30 calls were slow when they were first measured."""
    return synthetic() | {"profiled": False, "costs": calls(30, seconds=3).to_dict()} | changes


def shared(found, slowdown):
    """The step on shared cores: everything takes longer from its beginning on, so that devices wait for each other."""
    events = [
        event | {"start_s": event["start_s"] * slowdown, "end_s": event["start_s"] * slowdown + length}
        for event in found["events"]
        for length in (event["end_s"] - event["start_s"],)
    ]
    return found | {"events": events, "step_time_s": found["step_time_s"] * slowdown, "bubble_pct": 80.0}


def test_a_replay_is_what_the_simulator_makes_of_the_shortest_times():
    found = replay(shared(report(), slowdown=5))
    assert found is not None
    run = run_steps(Plan.parse(found["plan"]), calls(30), 4, 4)  # the events took less than the first batch's calls
    assert found["step_time_s"] == pytest.approx(run.makespan_s)
    assert found["bubble_pct"] == pytest.approx(100 * (1 - run.busy_s / (4 * run.makespan_s)))
    assert found["bubble_pct"] < 50
    assert (found["workers"], found["microbatches"]) == (4, 4)


def test_devices_and_slots_are_those_of_the_step():
    """The two pictures of a step stand beside each other, and its first slot may be on any worker."""
    given = report()
    for row in (*given["slots"], *given["events"]):
        row["slot"] += 9
        row["worker"] = (row["worker"] + 1) % 4
    found = replay(given)
    assert found is not None
    where = {slot["slot"]: slot["worker"] for slot in given["slots"]}
    assert {(event["slot"], event["worker"]) for event in found["events"]} == set(where.items())
    assert all(event["kind"] in COMPUTE for event in found["events"])
    for event in found["events"]:
        assert 0 <= event["start_s"] < event["end_s"] <= found["step_time_s"] + 1e-9
    fused = [event["kind"] for event in found["events"] if event["phase"] == "fused"]
    assert fused == ["forward", "backward"] * 4


def test_only_emulated_devices_are_replayed():
    """On GPUs the step as it ran is the truth."""
    options = SimpleNamespace(emulation=Emulation())
    for device, expected in (("cpu", True), ("cuda", False)):
        strategy = SimpleNamespace(report=report, root_device=torch.device(device), options=options)
        assert (replay_of(strategy) is not None) == expected
    nothing = SimpleNamespace(report=dict, root_device=torch.device("cpu"), options=options)
    assert replay_of(nothing) is None
    other = SimpleNamespace(root_device=torch.device("cpu"))  # plain Lightning's strategies report nothing
    assert replay_of(other) is None
