from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_roundpipe.pictures import MOST_PIXELS
from lightning_roundpipe.planning import Plan
from lightning_roundpipe.timeline import TimelineEvent, draw_timeline, read_events, stage_names, write_trace

PLAN = "forward 0-9 10-19; fused 20-29; backward 16-19 12-15 8-11 4-7 0-3; round 4"
FORWARD_S, BACKWARD_S = 0.010, 0.020


def synthetic(workers: int = 4, microbatches: int = 4, text: str = PLAN) -> dict[str, Any]:
    """A report as an engine with slow copies would write it; each call takes 10 ms forward and 20 ms backward."""
    plan = Plan.parse(text)
    events: list[dict[str, Any]] = []
    slots: list[dict[str, Any]] = []
    free = [0.0] * workers  # per worker
    ready = [0.0] * microbatches  # per microbatch, on the host
    copied: dict[tuple[str, int], float] = {}  # per kind of copy and worker: each has a stream of its own

    def add(kind: str, phase: str, slot: int, call: int, microbatch: int, start: float, length: float) -> float:
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


TINY: dict[str, Any] = {"workers": 1, "microbatches": 1, "text": "forward none; fused 0; backward none; round 1"}


def is_picture(path: Path, least_width: int = 1000) -> bool:
    head = path.read_bytes()[:24]
    return head.startswith(b"\x89PNG") and int.from_bytes(head[16:20], "big") >= least_width


def changed(**change: Any) -> dict[str, Any]:
    """A report with one thing changed in its first event."""
    report = synthetic(**TINY)
    report["events"][0].update(change)
    return report


def without(key: str) -> dict[str, Any]:
    report = synthetic(**TINY)
    del report[key]
    return report


# -- the picture -----------------------------------------------------------------------------------------------------


def test_picture_of_a_step(tmp_path: Path) -> None:
    draw_timeline(synthetic(), tmp_path / "step.png", title="A step")
    assert is_picture(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 30_000


def test_picture_of_very_little(tmp_path: Path) -> None:
    draw_timeline(synthetic(**TINY), tmp_path / "step.png")
    assert is_picture(tmp_path / "step.png")


def test_picture_of_a_step_in_which_no_time_passed(tmp_path: Path) -> None:
    report = synthetic(**TINY) | {"step_time_s": 0.0}
    for event in report["events"]:
        event.update(start_s=0.0, end_s=0.0)
    draw_timeline(report, tmp_path / "step.png")
    assert is_picture(tmp_path / "step.png")


def test_picture_of_a_profiled_step_without_slots(tmp_path: Path) -> None:
    report = synthetic(**TINY) | {"slots": []}
    for event in report["events"]:
        event.update(phase="profile")
    draw_timeline(report, tmp_path / "step.png")
    assert is_picture(tmp_path / "step.png")


@pytest.mark.parametrize(("shift", "left"), [(-0.2, None), (0.0, 0.0), (0.1, 0.0)])
def test_the_axis_begins_with_the_step_or_with_what_it_computed_before(
    shift: float, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with weights that were uploaded ahead, which in a step beside another can be long before."""
    report = synthetic()
    end = max(event["end_s"] for event in report["events"])
    for event in report["events"]:
        event.update(start_s=event["start_s"] + shift, end_s=event["end_s"] + shift)
    first = min(event["start_s"] for event in report["events"] if event["kind"] == "forward")
    report["events"].append(report["events"][0] | {"start_s": -3.0, "end_s": -2.9})
    [axes] = drawn(report | {"step_time_s": end + shift}, monkeypatch).axes
    assert axes.get_xlim() == pytest.approx((first if left is None else left, end + shift))


def test_title_legend_and_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the picture, read from the figure before it becomes pixels."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    fast = synthetic()
    for event in fast["events"]:
        event.update(start_s=event["start_s"] / 10, end_s=event["end_s"] / 10)
    draw_timeline(fast | {"step_time_s": 0.2345, "bubble_pct": 12.34}, tmp_path / "ms.png", title="Run 7")
    draw_timeline(synthetic() | {"step_time_s": 2.345, "bubble_pct": 12.34}, tmp_path / "s.png")

    first, second = (figure.axes[0] for figure in figures)
    assert first.get_title(loc="left") == "Run 7\n4 workers, 4 microbatches, step 234.5 ms, bubble 12.3 %"
    assert second.get_title(loc="left") == "RoundPipe: 4 workers, 4 microbatches, step 2.345 s, bubble 12.3 %"
    assert (first.get_xlabel(), second.get_xlabel()) == ("time in the step (ms)", "time in the step (s)")
    texts = [text.get_text() for text in first.texts]
    assert {"F1", "F2", "fused", "B1", "B5"} <= set(texts)
    assert texts.count("3") == 9  # eight stages, and the fused one has a forward and a backward
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "forward", "fused forward", "recompute", "backward", "weight upload", "activation copy", "gradient copy"
    ]  # fmt: skip


def drawn(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw_timeline(report, Path("unused.png"))
    return figures[0]


def busy(workers: int) -> dict[str, Any]:
    """A step in which every worker has a stage."""
    spans = " ".join(f"{n}-{n}" for n in range(workers))
    text = f"forward {spans}; fused {workers}-{workers}; backward {' '.join(reversed(spans.split()))}; round 1"
    return synthetic(workers, 1, str(Plan.parse(text)))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 8, 40, 200])
def test_no_picture_is_too_large(workers: int, tmp_path: Path) -> None:
    draw_timeline(busy(workers), tmp_path / "step.png")
    height, width = imread(tmp_path / "step.png").shape[:2]
    assert max(width, height) <= MOST_PIXELS
    assert workers > 8 or width == 2080


def test_workers_without_a_stage_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(synthetic(workers=64), monkeypatch).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"worker {n}" for n in range(8)]
    assert axes.get_title(loc="left").endswith("; 56 of 64 workers have nothing to do and no row")


def test_a_step_without_copies_has_no_lanes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    report = synthetic()
    with_copies = drawn(report, monkeypatch)
    report["events"] = [event for event in report["events"] if "load" not in event["kind"]]
    without = drawn(report, monkeypatch)
    lanes = [[label.get_text() for label in f.axes[0].get_yticklabels(minor=True)] for f in (with_copies, without)]
    assert lanes == [["up", "down"] * 4, []]
    assert without.get_figheight() < with_copies.get_figheight()


def test_numbers_stand_on_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the pause between a call and the next, where emulated devices wait for each other."""
    report = synthetic(1, 2, "forward none; fused 0-3; backward none; round 2")
    for event in report["events"]:
        first = event["kind"] == "forward" and event["call"] == 0
        event.update(start_s=event["start_s"] + (0 if first else 9), end_s=event["end_s"] + (0 if first else 9))
    axes = drawn(report, monkeypatch).axes[0]
    spans = [(e["start_s"], e["end_s"]) for e in report["events"] if e["kind"] in ("forward", "backward")]
    places = [text.get_position()[0] for text in axes.texts if text.get_text() in "01"]
    assert len(places) == 4
    assert all(any(start <= place <= end for start, end in spans) for place in places)


def test_backend_of_the_program_is_left_alone(tmp_path: Path) -> None:
    """No pyplot: a training script's own figures and backend must not change under it."""
    script = (
        "import sys, json; from pathlib import Path; from lightning_roundpipe.timeline import draw_timeline;"
        "draw_timeline(json.loads(sys.stdin.read()), Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    report = json.dumps(synthetic(**TINY))
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "step.png")], input=report, text=True, check=True)
    assert is_picture(tmp_path / "step.png")


# -- the trace -------------------------------------------------------------------------------------------------------


def test_trace_holds_every_event(tmp_path: Path) -> None:
    """Times begin with the earliest event, which may be an upload ahead of the step."""
    report = synthetic()
    report["events"].append(report["events"][0] | {"start_s": -0.5, "end_s": -0.4})
    write_trace(report, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    assert len(complete) == len(report["events"])
    given, written = report["events"][-2], complete[-2]
    assert written["pid"] == given["worker"]
    assert written["ts"] == pytest.approx(1e6 * (given["start_s"] + 0.5))
    assert written["dur"] == pytest.approx(1e6 * (given["end_s"] - given["start_s"]))
    assert written["args"]["stage"] == "B5"
    assert trace["otherData"]["plan"] == PLAN


def test_nothing_overlaps_on_a_track_of_the_trace(tmp_path: Path) -> None:
    """Perfetto drops or misplaces events that overlap on one track without being nested."""
    write_trace(synthetic(), tmp_path / "trace.json")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for record in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if record["ph"] == "X":
            tracks.setdefault((record["pid"], record["tid"]), []).append((record["ts"], record["ts"] + record["dur"]))
    for spans in tracks.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-3


# -- reading ---------------------------------------------------------------------------------------------------------


def test_stage_names_count_anew_each_round() -> None:
    phases = ["forward", "forward", "fused", "backward"]
    slots = [{"slot": n, "worker": 0, "round": n // 4, "phase": phases[n % 4], "layers": []} for n in range(8)]
    names = stage_names({"slots": slots})
    assert [names[n] for n in range(8)] == ["F1", "F2", "fused", "B1"] * 2
    assert stage_names({}) == {}


def test_events_of_a_call_are_read_with_what_they_are_called() -> None:
    labels = {(event.kind, event.phase): event.label for event in read_events(synthetic())}
    assert labels["forward", "forward"] == "forward"
    assert labels["forward", "fused"] == "fused forward"
    assert labels["upload_gradients", "backward"] == "gradient copy"
    assert TimelineEvent(0, "forward", "profile", 0, "a", 0, 0.0, 1.0).label == "forward"


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, "The report lacks 'workers': pass what RoundPipeStrategy.report"),
        (without("events"), "The report lacks 'events'"),
        (without("bubble_pct"), "The report lacks 'bubble_pct'"),
        (without("step_time_s"), "The report lacks 'step_time_s'"),
        (synthetic(**TINY) | {"events": []}, "no events.*has a training step finished"),
        (changed(kind="thinking"), "Event 0 of the report is of kind 'thinking'; known are forward, recompute"),
        (changed(worker=1), "Event 0 of the report ran on worker 1, of workers=1"),
        (changed(start_s=5.0, end_s=4.0), "Event 0 of the report ends at 4.0 s, before its start at 5.0 s"),
        (changed(end_s=float("nan")), "Event 0 of the report ends at nan s"),
        (synthetic(**TINY) | {"events": [{"worker": 0}]}, "Event 0 of the report lacks 'kind'; it needs worker"),
    ],
)
def test_bad_report_is_refused_by_name(report: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        draw_timeline(report, tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()
