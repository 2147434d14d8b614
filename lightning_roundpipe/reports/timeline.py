"""A step that ran, as a picture and as a Chrome trace.

The input is the report of a finished step, so both show what ran, not what was planned. Times in a report are seconds
from the start of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_roundpipe.engine.events import COMPUTE, UPLOADS
from lightning_roundpipe.messages import plural
from lightning_roundpipe.reports.pictures import PAUSE, Block, Chart, CopySpan, draw_charts
from lightning_roundpipe.reports.traces import TraceSpan, write_spans

Events = Sequence[Mapping[str, Any]]


def draw_timeline(report: Mapping[str, Any], path: Path, title: str = "RoundPipe") -> None:
    """Draw the step to ``path``, whose folder must exist. The title shows the step time and the bubble.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        path: the file to write; its suffix is the format (png, pdf, svg).
        title: a few words in bold before that.

    Raises:
        ValueError: no training step has finished yet.
    """
    draw_charts([chart_of(report, title)], path)


def write_trace(report: Mapping[str, Any], path: Path) -> None:
    """Write the step as a Chrome trace, which https://ui.perfetto.dev opens. Each worker is a process.

    Copies of different kinds overlap in time, which one track cannot show, so every kind has its own. ``otherData`` has
    the report's other values.

    Raises:
        ValueError: no training step has finished yet.
    """
    events, stages = events_of(report), stage_names(report)
    earliest_s = min(event["start_s"] for event in events)  # a trace has no negative times
    spans = [
        TraceSpan(
            f"worker {event['worker']}",
            "compute" if event["kind"] in COMPUTE else event["kind"].replace("_", " "),
            f"{event['kind']} {event['layer']}".strip(),
            event["start_s"] - earliest_s,
            event["end_s"] - earliest_s,
            {"stage": stages.get(event["slot"], ""), **{key: event[key] for key in ("slot", "microbatch")}},
        )
        for event in events
    ]
    facts = {key: value for key, value in report.items() if key not in ("events", "stalls", "slots", "costs")}
    write_spans(spans, path, facts)


def events_of(report: Mapping[str, Any]) -> Events:
    """Return the report's events.

    Raises:
        ValueError: it has none.
    """
    if not report.get("events"):
        raise ValueError("The report has no events, as no training step has finished yet: call fit() first.")
    events: Events = report["events"]
    return events


def stage_names(report: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each slot's stage: ``F1``, ``F2``, …, ``fused``, ``B1``, …; empty without slots."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    names = {}
    for slot in sorted(report.get("slots", ()), key=lambda slot: int(slot["slot"])):
        counts[slot["round"], slot["phase"]] += 1
        letter = {"forward": "F", "backward": "B"}.get(slot["phase"])
        if letter or slot["phase"] == "fused":
            names[slot["slot"]] = f"{letter}{counts[slot['round'], slot['phase']]}" if letter else "fused"
    return names


def chart_of(report: Mapping[str, Any], title: str) -> Chart:
    """Return the step as a chart.

    Raises:
        ValueError: no training step has finished yet.
    """
    events = events_of(report)
    computed = [event for event in events if event["kind"] in COMPUTE]
    # Cut off what was uploaded ahead of the step, but show what it computed before the end of the previous step.
    begin_s = min([0.0, *(event["start_s"] for event in computed)])
    end_s = max(report["step_time_s"], *(event["end_s"] for event in events))
    copies = [
        CopySpan(
            event["worker"], event["kind"].rpartition("_")[2], "up" if event["kind"] in UPLOADS else "down",
            1e3 * max(begin_s, event["start_s"]), 1e3 * event["end_s"],
        )
        for event in events
        if event["kind"] not in COMPUTE and event["end_s"] >= begin_s
    ]  # fmt: skip
    facts = f" a step, {plural(report['microbatches'], 'microbatch')}, bubble {report['bubble_pct']:.1f} %"
    return Chart(
        title, 1e3 * report["step_time_s"], facts, "step", report["workers"], 1e3 * end_s,
        _blocks(computed, stage_names(report)), copies=copies, begin_ms=1e3 * begin_s, named=True,
    )  # fmt: skip


def _blocks(computed: Events, stages: Mapping[int, str]) -> list[Block]:
    """Return a block for each microbatch in each direction of each slot. Emulated devices pause between calls."""
    groups: dict[tuple[int, int, int, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(computed, key=lambda event: float(event["start_s"])):
        groups[event["worker"], event["slot"], event["microbatch"], event["kind"] == "forward"].append(event)
    slots: dict[int, dict[int, int]] = defaultdict(dict)
    for worker, slot, *_ in sorted(groups):
        slots[worker].setdefault(slot, len(slots[worker]))
    blocks = []
    for (worker, slot, microbatch, _), members in groups.items():
        parts = [(members[0]["kind"], 1e3 * (members[0]["end_s"] - members[0]["start_s"]))]
        for before, event in pairwise(members):
            if event["start_s"] > before["end_s"]:
                parts.append((PAUSE, 1e3 * (event["start_s"] - before["end_s"])))
            length = 1e3 * (event["end_s"] - max(event["start_s"], before["end_s"]))
            if parts[-1][0] == event["kind"]:
                parts[-1] = event["kind"], parts[-1][1] + length
            else:
                parts.append((event["kind"], length))
        start_ms = 1e3 * members[0]["start_s"]
        blocks.append(Block(worker, microbatch, stages.get(slot, ""), slots[worker][slot], start_ms, tuple(parts)))
    return blocks
