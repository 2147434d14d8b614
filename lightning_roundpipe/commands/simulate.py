"""``roundpipe-simulate``: how long the paper's schedules take, and where their workers idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.conf_files import find_cases
from lightning_roundpipe.commands.console import console_command
from lightning_roundpipe.commands.options import Reply, as_json, option, run
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.planning.bubble import Bubble, find_bubble
from lightning_roundpipe.planning.cases import FIGURES, Case, read_cases
from lightning_roundpipe.planning.paper_schedules import run_case

_PERCENTAGES = FIGURES[1:]
_WIDE = 108
"""Least width in columns at which the table has all digits."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulates pipeline schedules from the times of a layer: 1f1b, interleaved-1f1b,
    gpipe, looped-bfs, and roundpipe as the paper (arXiv 2604.27085) models it.
    Prints the makespan, and the idle time in percent of makespan x workers."""

    examples: ClassVar = (
        "case=paper",
        "case=llama3.1-8b picture=schedules.png",
        "case=my-cases.json format=json",
    )

    case: str = option("JSON file, paper, or a model of the paper's", shown="FILE")
    format: Literal["table", "json"] = option("how to print it", default="table")
    picture: Path | None = option("draw the schedules: .png, .pdf or .svg", default=None)
    trace: Path | None = option("write them for ui.perfetto.dev", default=None)


@console_command
def main() -> int:
    return run("roundpipe-simulate", SimulateOptions, simulate)


def simulate(options: SimulateOptions) -> Reply:
    """Simulate all cases, write the picture and the trace if the options name them, and return the answer."""
    path, model = find_cases(options.case, "case")
    check_targets({"case": path}, {"picture": options.picture, "trace": options.trace})
    runs = []
    for number, case in enumerate(read_cases(path)):
        if model not in (None, case.model):
            continue
        try:
            runs.append(run_case(case))
        except ValueError as error:
            raise ValueError(f"{path}, case {number}: {error}") from None
    found = [find_bubble(item) for item in runs]
    if options.picture or options.trace:
        from lightning_roundpipe.commands.charts import draw  # matplotlib takes longer to import than a simulation

        draw(runs, found, options.picture, options.trace)
    if options.format == "json":
        return Reply(as_json([_row(item.case, bubble) for item, bubble in zip(runs, found, strict=True)]))
    return Reply(CaseTable([item.case for item in runs], found))


def _row(case: Case, bubble: Bubble) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": case.model,
        "schedule": case.schedule,
        "workers": case.workers,
        "microbatches": case.microbatches,
    }
    # Nine digits are what a double carries through such sums; more would only be noise.
    row |= {name: round(getattr(bubble, name), 9) for name in FIGURES}
    if case.schedule == "roundpipe":
        row["asynchronous_pct"] = round(bubble.asynchronous_pct, 9)
    return row


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseTable:
    """Table of the figures of all cases. Narrow terminals show fewer digits."""

    cases: Sequence[Case]
    bubbles: Sequence[Bubble]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        sized = len(self._sizes()) > 1
        steady = wide and any(case.schedule == "roundpipe" for case in self.cases)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0, 0, 0), caption_justify="left")
        table.add_column("model", overflow="fold")
        table.add_column("schedule", no_wrap=True)
        numbers = [*(["N", "M"] if sized else []), "makespan ms" if wide else "ms"]
        numbers += [name.removesuffix("_pct") for name in _PERCENTAGES] + (["async"] if steady else [])
        for heading in numbers:
            table.add_column(heading, justify="right", no_wrap=True)
        digits = 4 if wide else 2
        for case, bubble in zip(self.cases, self.bubbles, strict=True):
            row = [str(case.workers), str(case.microbatches)] if sized else []
            row.append(f"{bubble.makespan_ms:,.{digits - 1}f}")
            row += [f"{getattr(bubble, name):.{digits}f}" for name in _PERCENTAGES]
            if steady:
                row.append(f"{bubble.asynchronous_pct:.{digits}f}" if case.schedule == "roundpipe" else "")
            table.add_row(Text(case.model), case.schedule, *row)
        yield table
        yield from map(Text, self._notes(steady))

    def _sizes(self) -> set[tuple[int, int]]:
        return {(case.workers, case.microbatches) for case in self.cases}

    def _notes(self, steady: bool) -> Iterator[str]:
        counts = "N workers, M microbatches"
        if len(self._sizes()) == 1:
            [(workers, microbatches)] = self._sizes()
            counts = f"{workers} workers, {microbatches} microbatches"
        yield f"{counts}; idle time in % of makespan x workers."
        if steady:
            yield "async: what stays idle when RoundPipe's steps follow each other without a flush (switch + intra)."
        compared = [(c.expected, b) for c, b in zip(self.cases, self.bubbles, strict=True) if c.expected]
        if compared:
            off = {"ms": 0.0, "pct": 0.0}
            for expected, bubble in compared:
                for name, value in expected.items():
                    unit = name.rsplit("_", 1)[1]
                    off[unit] = max(off[unit], abs(getattr(bubble, name) - value))
            cases = "1 case has" if len(compared) == 1 else f"{len(compared)} cases have"
            yield f"{cases} expected figures; largest difference: {off['ms']:.1g} ms, {off['pct']:.1g} %."
