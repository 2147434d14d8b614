import json
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.reports.pictures import draw_steps
from lightning_roundpipe.reports.planned import report_of
from lightning_roundpipe.reports.traces import write_trace

PLAN = "forward 0-9 10-19; fused 20-29; backward 16-19 12-15 8-11 4-7 0-3; round 4"
FORWARD_S, BACKWARD_S = 0.010, 0.020


def calls(number, seconds=1.0):
    sizes = {"weight_bytes": 1000, "gradient_bytes": 1000, "boundary_bytes": 500, "activation_bytes": 500}
    call = CallCost("", FORWARD_S * seconds, BACKWARD_S * seconds, needs_backward=True, **sizes)
    return Costs(tuple(replace(call, layer=f"layers.{n}") for n in range(number)))


def synthetic(workers=4, microbatches=4, text=PLAN):
    """The report of a simulated step with slow copies, in which each call has events of its own."""
    plan = Plan.parse(text)
    costs, stages = calls(plan.fused.last + 1), plan.stages()
    run = run_steps(plan, costs, workers, microbatches, Rules(links=Links(1e5, 1e5)))
    found = report_of(run, costs, microbatches, run.makespan_s)
    events = [each for event in found["events"] for each in by_call(event, stages[event["slot"]])]
    return found | {"events": events}


def by_call(event, stage):
    numbers = range(stage.first, stage.last + 1) if "load" not in event["kind"] else [stage.first]
    length = (event["end_s"] - event["start_s"]) / len(numbers)
    for place, number in enumerate(reversed(numbers) if event["kind"] == "backward" else numbers):
        start_s = event["start_s"] + place * length
        yield event | {"call": number, "layer": f"layers.{number}", "start_s": start_s, "end_s": start_s + length}


def test_trace_holds_every_event(tmp_path):
    """Times begin with the earliest event, which may be an upload ahead of the step."""
    report = synthetic()
    report["events"].append(report["events"][0] | {"start_s": -0.5, "end_s": -0.4})
    write_trace({"A step": report}, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    assert len(complete) == len(report["events"])
    given, written = report["events"][-2], complete[-2]
    names = {
        record["pid"]: record["args"]["name"] for record in trace["traceEvents"] if record["name"] == "process_name"
    }
    assert names[written["pid"]] == f"A step: worker {given['worker']}"
    assert written["ts"] == pytest.approx(1e6 * (given["start_s"] + 0.5))
    assert written["dur"] == pytest.approx(1e6 * (given["end_s"] - given["start_s"]))
    assert written["args"]["stage"] == "B5"
    assert trace["otherData"]["A step"]["plan"] == PLAN


def test_nothing_overlaps_on_a_track_of_the_trace(tmp_path):
    """Perfetto drops or misplaces events that overlap on one track without being nested."""
    write_trace({"A step": synthetic()}, tmp_path / "trace.json")
    tracks = {}
    for record in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if record["ph"] == "X":
            tracks.setdefault((record["pid"], record["tid"]), []).append((record["ts"], record["ts"] + record["dur"]))
    for spans in tracks.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-3


def test_without_a_step_nothing_is_written(tmp_path):
    for write in (draw_steps, write_trace):
        with pytest.raises(ValueError, match="no training step has finished yet"):
            write({"A step": {}}, tmp_path / "step")
    assert not [*tmp_path.iterdir()]
