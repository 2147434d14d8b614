"""Planned times follow what an update touches, and what it waits for."""

from dataclasses import replace

from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.outlook import look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest

SLOW = replace(read_machine("rtx4090x8"), optimizer_bandwidth=1e5)
"""Steps last as long as their updates."""


def planned(**options):
    request = PlanRequest(
        model="tiny_llama", workers=2, sequence_length=64, microbatch_size=1, microbatches=4, search_seconds=0,
        **options,
    )  # fmt: skip
    return look_at(shape_of(request, SLOW), request, longest=False)


def test_fewer_bytes_take_less_time():
    plain, bf16, int8, copied = (
        planned(**options).period_s
        for options in ({}, {"optimizer_state": "bf16"}, {"optimizer_state": "int8"}, {"precision": "16-true"})
    )
    assert int8 < bf16 < plain < copied
    assert 16 / 28 < int8 / plain < 20 / 28  # a step also computes


def test_clipping_waits_for_all_gradients_and_multiplies_them():
    plain, clipped = planned(), planned(gradient_clip_val=1.0)
    assert clipped.period_s > plain.period_s
    first = [run.run.events for run in (plain, clipped)]
    ready, begun = (
        [event.start_s for event in events if event.kind == "update" and not event.step] for events in first
    )
    ends = [event.end_s for event in first[1] if event.kind == "download_gradients" and not event.step]
    assert min(ready) < max(ends) <= min(begun)
