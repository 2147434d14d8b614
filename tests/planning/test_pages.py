"""docs/long-sequences.md and docs/several-machines.md say what the planner says."""

from __future__ import annotations

from typing import Any

import pytest
from planning.test_paper_throughput import script


def several() -> Any:
    """The script that writes the page's figures."""
    return script("docs/make_several_machines_plans.py")


def long() -> Any:
    return script("docs/make_long_sequences.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_of_several_machines_are_what_is_planned() -> None:
    """Of one model, one and four machines."""
    pages = several()
    row, page = pages.ROWS[0], pages.between(pages.PAGE.read_text())
    pages.MACHINES = (1, 4)
    for machines, network, found in pages.outlooks(row, pages.shape_for(row, 1, 0)):
        assert f"| {' | '.join(pages.cells(machines, network, found))} |\n" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_of_long_sequences_are_what_is_planned() -> None:
    pages = long()
    page = pages.between(pages.PAGE.read_text())
    for number, gpus in ((0, 1), (1, 8)):
        row = pages.ROWS[number]
        assert f"| {' | '.join(pages.cells(row, pages.find(row, gpus)))} |\n" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_row_of_what_to_set_is_what_is_planned() -> None:
    pages = long()
    assert f"| {' | '.join(pages.setting(pages.ROWS[1], 2**17))} |\n" in pages.PAGE.read_text()


def test_the_pages_have_every_row() -> None:
    pages = several()
    page = pages.between(pages.PAGE.read_text())
    for row in pages.ROWS:
        assert f"### {row.title}\n" in page
        assert row.command in page
    assert page.count("Gbit/s") == len(pages.ROWS) * (len(pages.MACHINES) - 1) * len(pages.NETWORKS)
    pages = long()
    page = pages.between(pages.PAGE.read_text())
    for row in pages.ROWS:
        assert [line.split(" | ")[1] for line in page.splitlines() if line.startswith(f"| {row.title} |")] == ["1", "8"]
    assert pages.ROWS[1].command in page
