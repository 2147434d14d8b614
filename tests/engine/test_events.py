"""What is kept of a step's events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, Event, make_devices
from lightning_roundpipe.engine.events import UPLOADS, EventSource, Recorder, bubble_percent


class At(Event):
    """A moment that has been."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True

    def time(self) -> float:
        return self.seconds


@pytest.fixture
def slow() -> Iterator[Device]:
    [made] = make_devices("cpu", [torch.device("cpu")], Emulation(latency=0.1))
    yield made
    made.close()


def test_rows_are_sorted_and_count_from_the_origin() -> None:
    recorder = Recorder()
    where = EventSource(slot=4, phase="fused", call=2, layer="head")
    recorder.add("backward", 1, At(12.0), At(13.5), 3, 0, where)
    recorder.add("upload_weights", 0, At(10.0), At(11.0), nbytes=64)
    first, second = recorder.rows(11.0)
    assert (first["kind"], first["start_s"], first["end_s"], first["nbytes"]) == ("upload_weights", -1.0, 0.0, 64)
    assert (first["slot"], first["call"], first["microbatch"]) == (-1, -1, -1)
    assert second == {
        "kind": "backward", "phase": "fused", "worker": 1, "slot": 4, "call": 2, "layer": "head", "microbatch": 3,
        "nbytes": 0, "start_s": 1.0, "end_s": 2.5,
    }  # fmt: skip


def test_no_events_are_no_rows() -> None:
    assert Recorder().rows(0.0) == [] and bubble_percent([], 2) == 0.0


def test_rows_wait_for_what_is_on_its_way(slow: Device) -> None:
    """A report may be asked for before anybody has asked for the gradients."""
    recorder, stream = Recorder(), slow.gradients_down
    start = stream.record(timed=True)
    stream.copy(torch.zeros(2), torch.ones(2))
    recorder.add("download_gradients", 0, start, stream.record(timed=True))
    [row] = recorder.rows(0.0)
    assert row["end_s"] >= 0.1


def test_bytes_are_summed_by_kind_and_worker() -> None:
    recorder = Recorder()
    for kind, worker, nbytes in (("upload_weights", 0, 1), ("upload_activations", 1, 2), ("download_gradients", 1, 4)):
        recorder.add(kind, worker, At(0), At(1), nbytes=nbytes)
    recorder.add("upload_weights", 0, At(0), At(1), nbytes=8)
    assert recorder.nbytes(UPLOADS, 3) == [9, 2, 0]
    assert recorder.nbytes(("download_gradients",), 2) == [0, 4]


def test_durations_of_calls_leave_out_copies() -> None:
    recorder = Recorder()
    recorder.add("forward", 0, At(1), At(3), 0, 0, EventSource(call=5))
    recorder.add("forward", 1, At(1), At(2), 1, 0, EventSource(call=5))
    recorder.add("upload_weights", 0, At(0), At(9))
    assert recorder.call_seconds() == {("forward", 0, 5): [2.0], ("forward", 1, 5): [1.0]}


def test_the_bubble_is_what_workers_do_not_compute() -> None:
    def row(kind: str, start: float, end: float) -> dict[str, object]:
        return {"kind": kind, "start_s": start, "end_s": end}

    rows = [row("upload_weights", 0, 100), row("forward", 10, 14), row("recompute", 12, 14), row("backward", 18, 20)]
    assert bubble_percent(rows, 2) == pytest.approx(100 * (1 - 8 / 20))
    assert bubble_percent([row("forward", 1, 1)], 1) == 0.0


def test_the_report_counts_waits_for_copies() -> None:
    strategy = ours(num_microbatches=2, emulation={"bandwidth": "100KB"})
    run(strategy, zoo.make_module("mlp"), zoo.make_batches("mlp", 3), devices=2)
    assert strategy.report()["stall_pct"] > 10
