"""Predicted over measured: the paper's library (`paper_library`) beside what the paper's system reached.

`measured.json` holds the rows, with the batch and the microbatches that each was measured with. Nothing is fitted for a
model; the numbers of a machine are those of ``conf/hardware``. Devices have no limit of memory here: that these rows
fitted is known, and how the paper's system lays out its memory is not.

    .venv/bin/python benchmarks/bench_validation.py [--markdown]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from common import parser_of, show
from paper_library import PaperShape

from lightning_roundpipe.estimates.hardware import read_machine
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning.pipeline import Staleness
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import paper_plan

ROWS = Path(__file__).with_name("measured.json")
NO_LIMIT = 2**50
LENGTH = 2048
STEPS = 8
"""Number of steps whose mean counts, after as many that fill the pipeline."""
POSITIONS = 40960
"""All models have so many; beyond, they are planned with more."""
MACHINES = {"rtx4090": "rtx4090x8", "a800": "a800x8"}


@dataclass(frozen=True)
class Row:
    """A measurement, and what is predicted for it."""

    name: str
    machine: str
    devices: int
    mode: str
    sequence: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def read_rows() -> list[dict[str, Any]]:
    """The measurements, each with its settings."""
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text())["rows"]
    return rows


def predict(row: dict[str, Any]) -> Row:
    """What is predicted for a row."""
    microbatches = row["microbatches"] * row["passes"]
    staleness: Staleness = 1 if row["mode"] == "async" else 0
    shape = shape_at(
        PlanRequest(
            model=row["model"].removesuffix("-lora").replace("-", "_").replace(".", "_"),
            lora="attention" if row["model"].endswith("-lora") else "none",
            precision="16-true",
            staleness=staleness,
            model_settings=(("max_position_embeddings", str(row["sequence"])),) if row["sequence"] > POSITIONS else (),
        ),
        MACHINES[row["hardware"]],
        row["gpus"],
    )
    size, members = max(1, round(row["batch"] / microbatches)), row["microbatches"]
    rules = replace(shape.rules(staleness), memory=NO_LIMIT)
    problem = Problem.usual(shape.costs(size, row["sequence"]), row["gpus"], microbatches, rules=rules)
    problem = replace(problem, memory=NO_LIMIT, min_round=min(problem.min_round, members), max_round=members)
    if row.get("layers"):
        plan = replace(Plan.per_call(len(problem.costs), members), recompute_ahead=True)
    else:
        plan = paper_plan(problem)
    tokens_per_s = microbatches * size * row["sequence"] / problem.period_s(plan, STEPS)
    return Row(
        row["model"], row["hardware"], row["gpus"], row["mode"], row["sequence"], row["tokens_per_s"], tokens_per_s
    )


@cache
def shape_at(request: PlanRequest, hardware: str, gpus: int) -> PaperShape:
    return PaperShape(request, replace(read_machine(hardware), workers=gpus), NO_LIMIT)


def summary(rows: list[Row]) -> str:
    errors = [abs(row.error) for row in rows]
    return f"median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"


HEADINGS = ("model", "GPUs", "mode", "tokens", "measured", "predicted", "error")


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.name, f"{row.devices} x {row.machine}", row.mode, f"{row.sequence:,}", f"{row.measured:,.0f}",
        f"{row.predicted:,.0f}", f"{100 * row.error:+.1f} %",
    )  # fmt: skip


def markdown(rows: list[Row]) -> str:
    """Predicted / measured: a table of sequences of the usual length by machine and model, and one of the others."""
    usual = [row for row in rows if row.sequence == LENGTH]
    others = [row for row in rows if row.sequence != LENGTH]
    by_model = _crossed(usual, "GPUs, mode", lambda row: row.name)
    return f"{by_model}\n\n{_crossed(others, f'tokens of {others[0].name}', lambda row: f'{row.sequence:,}')}"


def _crossed(rows: list[Row], corner: str, column_of: Callable[[Row], str]) -> str:
    columns = list(dict.fromkeys(map(column_of, rows)))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(f"{row.devices} x {row.machine}, {row.mode}", {})
        line[column_of(row)] = f"{row.predicted:,.0f} / {row.measured:,.0f}"
    table = [[corner, *columns], ["---", *("---:" for _ in columns)]]
    table += [[name, *(line.get(column, "") for column in columns)] for name, line in lines.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/estimates.md")
    options = parser.parse_args()
    rows = [predict(row) for row in read_rows()]
    if options.markdown:
        print(markdown(rows))
    else:
        show("tokens a second, measured by the paper and predicted", HEADINGS, map(cells, rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
