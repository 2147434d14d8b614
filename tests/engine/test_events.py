"""What is kept of a step's events."""

import pytest
import zoo
from harness import ours, run
from patience import longer_each_try

from lightning_roundpipe.devices import Event
from lightning_roundpipe.engine.events import Recorder, bubble_percent


class At(Event):
    """A moment that has been."""

    def __init__(self, seconds):
        self.seconds = seconds

    def wait(self): ...

    def done(self):
        return True

    def time(self):
        return self.seconds


def test_what_a_worker_waited_before_the_step_began_is_no_stall_of_it():
    """It was counted, so that a step behind a slow update waited for more than 100 % of its time."""
    recorder = Recorder()
    for start, end in ((8.0, 9.0), (9.5, 10.5), (11.0, 12.0)):
        recorder.waited(0, At(start), At(end))
    assert [(row["start_s"], row["end_s"]) for row in recorder.stalls(10.0)] == [(0.0, 0.5), (1.0, 2.0)]


def test_the_bubble_is_what_workers_do_not_compute():
    def row(kind, start, end):
        return {"kind": kind, "start_s": start, "end_s": end}

    rows = [row("upload_weights", 0, 100), row("forward", 10, 14), row("recompute", 12, 14), row("backward", 18, 20)]
    assert bubble_percent(rows, 2) == pytest.approx(100 * (1 - 8 / 20))


@longer_each_try
def test_the_report_counts_waits_for_copies(times):
    strategy = ours(num_microbatches=2, emulation={"bandwidth": 400_000 / times})
    run(strategy, zoo.make_module("mlp"), zoo.make_batches("mlp", 3), devices=2)
    assert strategy.report()["stall_pct"] > 10


def test_the_rate_of_a_link_is_that_of_the_largest_copy():
    recorder = Recorder()
    assert recorder.bytes_per_s(("upload_weights",)) == float("inf")
    recorder.add("upload_weights", 0, At(10.0), At(10.1), nbytes=50)
    recorder.add("upload_weights", 0, At(11.0), At(13.0), nbytes=400)
    recorder.add("download_gradients", 0, At(11.0), At(12.0), nbytes=900)
    assert recorder.bytes_per_s(("upload_weights",)) == 200
