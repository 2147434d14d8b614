"""docs/quantization.md says what the planner says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planning.test_paper_throughput import script


def plans() -> Any:
    """The script that writes the page's figures."""
    return script("docs/make_quantization_plans.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_rows_are_what_is_planned(number: int) -> None:
    """Of the dense models, all hosts of one GPU: what fits a smaller host is a plan of the larger ones."""
    pages = plans()
    row, page = pages.ROWS[number], pages.between(pages.PAGE.read_text())
    pages.GPUS = (1,)
    for gpus, host, found in pages.machines(row, pages.shapes(row)):
        assert f"| {' | '.join(pages.cells(row, gpus, host, found))} |\n" in page


def test_the_page_has_every_machine() -> None:
    pages = plans()
    page = pages.between(pages.PAGE.read_text())
    for row in pages.ROWS:
        heads = re.findall(rf"^\| {row.title} \| (\d+) \| (\d+) \|", page, flags=re.MULTILINE)
        assert heads == [(str(gpus), str(host)) for gpus in pages.GPUS for host in pages.HOSTS]
    assert pages.ROWS[0].command in page
