"""The table in README.md says what the planner says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planning.test_paper_throughput import ROOT, script


def fits() -> Any:
    """The script that writes the table."""
    return script("docs/make_what_fits.py")


def lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if re.match(r"\| [A-Z]", line)]


def test_the_table_has_every_row() -> None:
    made = fits()
    shown = lines(made.between(made.PAGE.read_text()))
    heads = [made.line(row, [""]).split("|")[1:4] for row in made.ROWS]
    assert [line.split("|")[1:4] for line in shown] == heads
    cells = [line.strip("| ").split(" | ")[3:] for line in shown]
    assert all(len(row) == len(made.KINDS) * len(made.GPUS) for row in cells)
    assert all(re.fullmatch(r"[\d,]+|–", cell) for row in cells for cell in row)


def test_figures_in_the_text_are_those_of_their_pages() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    docs = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("large-models", "estimates", "gpu")}
    [(planned, measured)] = re.findall(r"\[([\d,]+) tokens/s\]\(docs/large-models.*?library measured ([\d,]+)\.", text)
    assert f"| {planned} | {measured} |" in docs["large-models"]
    assert text.count(planned) == 2, "the comparison has the same figure"
    [(median, worst)] = re.findall(r"\[([\d.]+) %, its worst ([\d.]+) %\]", text)
    assert f"median error {median} %, worst {worst} %" in docs["estimates"]
    [(planned, low, high)] = re.findall(r"planned ([\d,]+), and ([\d,]+) to ([\d,]+) were measured", text)
    assert f"at {planned} tokens/s" in docs["gpu"] and f"({low} to {high} tokens/s" in docs["gpu"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "kind", "gpus"), [(2, "rtx4090", 1), (5, "rtx3090", 2)])
def test_cells_are_what_is_planned(number: int, kind: str, gpus: int) -> None:
    made = fits()
    row = made.ROWS[number]
    cells = lines(made.between(made.PAGE.read_text()))[number].strip("| ").split(" | ")[3:]
    at = list(made.KINDS).index(kind) * len(made.GPUS) + made.GPUS.index(gpus)
    assert cells[at] == made.cell(made.best(row, kind, gpus, made.shape(row, kind)))
