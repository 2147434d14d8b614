"""Writes Chrome traces, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_roundpipe.reports.pictures import PAUSE, Chart, TimeUnit, draw_charts


class TraceSpan(NamedTuple):
    """Something that takes time. Spans of one track must not overlap, unless one contains the other.

    Args:
        process: group of tracks.
        track: name of the track.
        name: shown in the span.
        start_s, end_s: seconds from the start of the trace.
        args: shown for a selected span.
    """

    process: str
    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = {}


def write_spans(spans: Iterable[TraceSpan], path: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write the spans in the Trace Event Format. ``facts`` become its ``otherData``."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    records: list[dict[str, Any]] = []
    for span in spans:
        # Perfetto reads process 0 as the idle process of the kernel.
        process = processes.setdefault(span.process, len(processes) + 1)
        track = tracks.setdefault((span.process, span.track), len(tracks) + 1)
        # Whole nanoseconds: rounding errors would make parts exceed what contains them.
        start, end = round(1e9 * span.start_s), round(1e9 * span.end_s)
        where = {"pid": process, "tid": track, "ts": start / 1e3, "dur": (end - start) / 1e3}
        records.append({"name": span.name, "ph": "X", **where, "args": dict(span.args)})
    names = [("process_name", process, 0, name) for name, process in processes.items()]
    names += [("thread_name", processes[process], track, name) for (process, name), track in tracks.items()]
    records += [
        {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}} for what, pid, tid, name in names
    ]
    found = {"displayTimeUnit": "ms", "otherData": dict(facts or {}), "traceEvents": records}
    path.write_text(json.dumps(found))


def write_charts(charts: Sequence[Chart], picture: Path | None, trace: Path | None) -> None:
    """Write the picture and the trace of the charts, unless their paths are None."""
    if picture:
        draw_charts(charts, picture)
    if trace:
        write_spans([span for chart in charts for span in _spans_of(chart)], trace)


def _spans_of(chart: Chart) -> list[TraceSpan]:
    """Return a span for each block, those of its parts within it, and those of waits."""
    process = f"{chart.title}: {chart.described(TimeUnit('ms', 1e-3))}"
    spans = [
        TraceSpan(process, f"worker {wait.worker}", wait.why, wait.start_ms / 1e3, wait.end_ms / 1e3)
        for wait in chart.waits
    ]
    for block in chart.blocks:
        whole = [(f"{block.stage} m{block.microbatch}", block.start_ms, block.end_ms)] if block.parts else []
        parts = [part for part in block.spread() if part[0] != PAUSE]
        spans += [
            TraceSpan(process, f"worker {block.worker}", name, start / 1e3, end / 1e3, {"microbatch": block.microbatch})
            for name, start, end in (*whole, *(parts if len(parts) > 1 else ()))
        ]
    return sorted(spans, key=lambda span: int(span.track.removeprefix("worker ")))
