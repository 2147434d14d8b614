"""docs/quantization-plans.md says what the planner says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from planning.test_paper_throughput import script


def plans() -> Any:
    """The script that writes the page's figures."""
    return script("docs/make_quantization_plans.py")


def rows_of(page: str, title: str) -> dict[tuple[int, int], str]:
    """Lines of a model's table, by GPUs and GiB of the host."""
    section = page.split(f"### {title}\n")[1].split("```")[0]
    lines = re.findall(r"^\| (\d+) \| (\d+) \|.*$\n?", section, flags=re.MULTILINE)
    whole = re.findall(r"^\| \d+ \| \d+ \|.*$", section, flags=re.MULTILINE)
    return {(int(gpus), int(host)): line for (gpus, host), line in zip(lines, whole, strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "gpus"), [(0, 2), (1, 4)])
def test_the_pages_rows_are_what_is_planned(number: int, gpus: int) -> None:
    """Of the dense models, all hosts of a number of GPUs: what fits a smaller host is a plan of the larger ones."""
    pages = plans()
    row, page = pages.ROWS[number], pages.between(pages.PAGE.read_text())
    shapes = pages.shapes(row)
    assert pages.weights(row, shapes) in page
    pages.GPUS = (gpus,)
    lines = rows_of(page, row.title)
    for _, host, found in pages.machines(row, shapes):
        assert lines[gpus, host] == f"| {' | '.join(pages.cells(gpus, host, found))} |"


def test_the_page_has_every_machine() -> None:
    pages = plans()
    page = pages.between(Path(pages.PAGE).read_text())
    for row in pages.ROWS:
        assert set(rows_of(page, row.title)) == {(gpus, host) for gpus in pages.GPUS for host in pages.HOSTS}
        assert row.command in page
