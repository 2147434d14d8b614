"""The paper's schedules side by side: how long a step takes, and where its workers idle.

    .venv/bin/python benchmarks/simulate.py [llama3.1-8b | FILE.json] [--json] [--trace schedules.json] [--picture FILE]

Without a name, all cases of the paper are simulated. A file has cases of its own (`paper_cases`). The trace is for
ui.perfetto.dev; the picture has a row for each worker, and colours for forward, backward and the LM head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paper_bubble import Bubble, find_bubble
from paper_cases import FIGURES, Case, read_cases
from paper_schedules import PaperRun, run_case
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COLOURS = {
    "forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#f58518", "head forward": "#54a24b",
    "head backward": "#88d27a",
}  # fmt: skip


def chosen_cases(name: str | None) -> list[Case]:
    """Return the cases of a file, or those of the paper with a model's name; None: all of the paper.

    Raises:
        ValueError: the paper has no such model, or the file is wrong.
    """
    if name is not None and name.endswith(".json"):
        return read_cases(Path(name))
    cases = read_cases()
    found = [case for case in cases if name in (None, case.model)]
    if not found:
        models = ", ".join(dict.fromkeys(case.model for case in cases))
        raise ValueError(f"{name} is none of the paper's models, {models}, and no file that ends in .json.")
    return found


def as_row(case: Case, bubble: Bubble) -> dict[str, Any]:
    """Return the figures of a case. Percentages are of makespan x workers."""
    row = {name: getattr(case, name) for name in ("model", "schedule", "workers", "microbatches")}
    row |= {name: round(getattr(bubble, name), 9) for name in FIGURES}
    return row | ({"asynchronous_pct": round(bubble.asynchronous_pct, 9)} if case.schedule == "roundpipe" else {})


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures of all cases as a table. ``async``: without fill and drain, if steps follow each other."""
    table = Table(title="Idle time in % of makespan x workers", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("model", "schedule"):
        table.add_column(heading)
    for heading in ("N", "M", "ms", "bubble", "fill", "switch", "drain", "intra", "async"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (row[name] for name in (*FIGURES[1:], "asynchronous_pct") if name in row)
        counts = str(row["workers"]), str(row["microbatches"])
        times = f"{row['makespan_ms']:,.0f}", *(f"{share:.2f}" for share in shares)
        table.add_row(row["model"], row["schedule"], *counts, *times)
    return table


def as_trace(runs: Sequence[PaperRun]) -> list[dict[str, Any]]:
    """Return events of a Chrome trace: a process for each run, and a thread for each worker."""
    events: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        title = {"name": f"{run.case.model}, {run.case.schedule}"}
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": title})
        for op in run.operations:
            start, length = (1e3 * ticks / run.ticks_per_ms for ticks in (op.start, op.end - op.start))
            name = f"{op.direction}{op.stage} microbatch {op.microbatch}"
            events.append({"ph": "X", "pid": number, "tid": op.worker, "ts": start, "dur": length, "name": name})
    return events


def draw(runs: Sequence[PaperRun], path: Path) -> None:
    """Draw the runs below each other, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.8 * len(runs)), layout="constrained")
    plots = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    for run, plot in zip(runs, plots, strict=True):
        for op in run.operations:
            at = op.start
            for kind, length in run.parts[op.direction, op.stage]:
                block = [(at / run.ticks_per_ms, length / run.ticks_per_ms)]
                plot.broken_barh(block, (op.worker - 0.45, 0.9), color=COLOURS[kind])
                at += length
        bubble = find_bubble(run)
        title = f"{bubble.makespan_ms:,.0f} ms, bubble {bubble.bubble_pct:.1f} %"
        plot.set_title(f"{run.case.model}, {run.case.schedule}: {title}")
        plot.set_yticks(range(run.case.workers))
        plot.invert_yaxis()
        plot.set_ylabel("worker")
    plots[-1].set_xlabel("ms")
    colours = [plots[-1].barh([0], [0], color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=colours, loc="outside lower center", ncols=len(COLOURS))
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", help="a model of the paper, or a JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace")
    parser.add_argument("--picture", type=Path, help="draw the schedules: .png, .pdf or .svg")
    options = parser.parse_args(arguments)
    try:
        runs = [run_case(case) for case in chosen_cases(options.case)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = [as_row(run.case, find_bubble(run)) for run in runs]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(as_table(rows))
    if options.trace:
        options.trace.write_text(json.dumps(as_trace(runs)))
    if options.picture:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
