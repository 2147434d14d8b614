"""Reports of steps as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_roundpipe.engine.events import COMPUTE
from lightning_roundpipe.reports.pictures import bars_of, stage_names


def write_trace(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write steps into one Chrome trace. Each worker is a process, whose name begins with the title of its step.

    Copies of different kinds overlap in time, which one track cannot show, so every kind has its own. ``otherData`` has
    the reports' other values.

    Args:
        reports: by title, what ``RoundPipeStrategy.report()`` or `planned.report_of` returns.
        path: the file to write; its folder must exist.

    Raises:
        ValueError: no training step has finished yet.
    """
    spans: list[dict[str, Any]] = []
    names: dict[tuple[str, str], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    for title, report in reports.items():
        bars_of(report)  # raises if there is no step
        stages, events = stage_names(report), report["events"]
        earliest_s = min(event["start_s"] for event in events)  # a trace has no negative times
        for event in events:
            process = f"{title}: worker {event['worker']}"
            track = "compute" if event["kind"] in COMPUTE else event["kind"].replace("_", " ")
            # Perfetto reads process 0 as the idle process of the kernel.
            pid = processes.setdefault(process, len(processes) + 1)
            _, tid = names.setdefault((process, track), (pid, len(names) + 1))
            # Whole nanoseconds: rounding errors would make events overlap.
            start, end = (round(1e9 * (event[key] - earliest_s)) for key in ("start_s", "end_s"))
            about = {"stage": stages.get(event["slot"], ""), "slot": event["slot"], "microbatch": event["microbatch"]}
            spans.append(
                {"name": f"{event['kind']} {event['layer']}".strip(), "ph": "X", "pid": pid, "tid": tid}
                | {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": about}
            )
    named = [("process_name", process, pid, 0) for process, pid in processes.items()]
    named += [("thread_name", track, pid, tid) for (_, track), (pid, tid) in names.items()]
    spans += [{"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": n}} for what, n, pid, tid in named]
    left_out = ("events", "stalls", "slots", "costs")
    facts = {title: {key: value for key, value in r.items() if key not in left_out} for title, r in reports.items()}
    data = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": spans}
    path.write_text(json.dumps(data))
