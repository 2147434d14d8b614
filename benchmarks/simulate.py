"""The paper's schedules side by side: how long a step takes, and where its workers idle.

    .venv/bin/python benchmarks/simulate.py [llama3.1-8b] [--picture FILE]

Without a model, all cases of the paper are simulated. The picture has a row for each worker, and colours for forward,
backward and the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from common import parser_of, show
from paper_bubble import find_bubble
from paper_cases import FIGURES, read_cases
from paper_schedules import PaperRun, run_case

COLOURS = {
    "forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#f58518", "head forward": "#54a24b",
    "head backward": "#88d27a",
}  # fmt: skip


def rows(runs: Sequence[PaperRun]) -> Iterator[tuple[str, ...]]:
    """The figures of all cases. The last one: without fill and drain, if steps follow each other."""
    for run in runs:
        case, bubble = run.case, find_bubble(run)
        shares = [getattr(bubble, name) for name in FIGURES[1:]]
        shares += [bubble.asynchronous_pct] if case.schedule == "roundpipe" else []
        counts = str(case.workers), str(case.microbatches), f"{bubble.makespan_ms:,.0f}"
        yield f"{case.model}, {case.schedule}", *counts, *(f"{share:.2f}" for share in shares)


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


def main() -> None:
    cases = read_cases()
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", choices=list(dict.fromkeys(case.model for case in cases)))
    parser.add_argument("--picture", type=Path, help="draw the schedules: .png, .pdf or .svg")
    options = parser.parse_args()
    runs = [run_case(case) for case in cases if options.model in (None, case.model)]
    headings = ("schedule", "N", "M", "ms", "bubble", "fill", "switch", "drain", "intra", "async")
    show("Idle time in % of makespan x workers", headings, rows(runs))
    if options.picture:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
