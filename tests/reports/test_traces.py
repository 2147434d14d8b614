import json
from itertools import pairwise

import pytest

from lightning_roundpipe.planning import Plan
from lightning_roundpipe.reports.pictures import draw_steps
from lightning_roundpipe.reports.traces import write_trace

PLAN = "forward 0-9 10-19; fused 20-29; backward 16-19 12-15 8-11 4-7 0-3; round 4"
FORWARD_S, BACKWARD_S = 0.010, 0.020


def synthetic(workers=4, microbatches=4, text=PLAN):
    """A report as an engine with slow copies would write it; each call takes 10 ms forward and 20 ms backward."""
    plan = Plan.parse(text)
    events = []
    slots = []
    free = [0.0] * workers  # per worker
    ready = [0.0] * microbatches  # per microbatch, on the host
    copied = {}  # per kind of copy and worker: each has a stream of its own

    def add(kind, phase, slot, call, microbatch, start, length):
        worker = slot % workers
        if "load" in kind:
            start = max(start, copied.get((kind, worker), 0.0))
            copied[kind, worker] = start + length
        events.append(
            {"worker": worker, "kind": kind, "phase": phase, "slot": slot, "call": call, "layer": f"layers.{call}"}
            | {"microbatch": microbatch, "start_s": start, "end_s": start + length}
        )
        return start + length

    for stage in plan.stages():
        slot, worker, phase = stage.position, stage.position % workers, stage.phase
        calls = range(stage.first, stage.last + 1)
        slots.append(
            {"slot": slot, "worker": worker, "round": 0, "phase": phase, "layers": [f"layers.{c}" for c in calls]}
        )
        upload = max(0.0, free[worker] - 0.12)
        for call in calls:
            upload = add("upload_weights", phase, slot, call, -1, upload, 0.008)
        free[worker] = max(free[worker], upload)
        for microbatch in range(microbatches):
            kind = "upload_gradients" if phase == "backward" else "upload_activations"
            arrived = add(kind, phase, slot, calls[0], microbatch, ready[microbatch], 0.004)
            now = max(free[worker], arrived)
            if phase != "backward":
                for call in calls:
                    now = add("forward", phase, slot, call, microbatch, now, FORWARD_S)
                    add("download_activations", phase, slot, call, microbatch, now, 0.002)
            for call in reversed(calls) if phase != "forward" else ():
                if phase == "backward":
                    add("upload_activations", phase, slot, call, microbatch, now - 0.01, 0.002)
                    now = add("recompute", phase, slot, call, microbatch, now, FORWARD_S)
                now = add("backward", phase, slot, call, microbatch, now, BACKWARD_S)
            free[worker] = now
            ready[microbatch] = add("download_activations", phase, slot, calls[-1], microbatch, now, 0.004)
        if phase != "forward":
            add("download_gradients", phase, slot, calls[0], -1, free[worker], 0.02)
    step = max(event["end_s"] for event in events)
    busy = sum(e["end_s"] - e["start_s"] for e in events if e["kind"] in ("forward", "recompute", "backward"))
    return {
        "plan": text,
        "workers": workers,
        "microbatches": microbatches,
        "bubble_pct": 100 * (1 - busy / (workers * step)),
        "step_time_s": step,
        "slots": slots,
        "events": events,
    }


TINY = {"workers": 1, "microbatches": 1, "text": "forward none; fused 0; backward none; round 1"}


def is_picture(path, least_width=1000):
    head = path.read_bytes()[:24]
    return head.startswith(b"\x89PNG") and int.from_bytes(head[16:20], "big") >= least_width


@pytest.mark.parametrize("size", [{}, TINY], ids=["a step", "very little"])
def test_picture_of_a_step(size, tmp_path):
    draw_steps({"A step": synthetic(**size)}, tmp_path / "step.png")
    assert is_picture(tmp_path / "step.png")


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
