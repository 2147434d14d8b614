"""The paper's five schedules give the figures of the paper's simulator."""

import pytest
from paper_bubble import find_bubble
from paper_cases import FIGURES, read_cases
from paper_schedules import run_case


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: f"{case.model}-{case.schedule}")
def test_the_papers_figures(case):
    """To the last digit that the paper's simulator prints; cases without figures must run all the same."""
    run = run_case(case)
    bubble = find_bubble(run)
    assert len(run.operations) == len({operation[1:4] for operation in run.operations}) > 0
    for name, value in (case.expected or {}).items():
        unit = 0.0005 if name.endswith("_ms") else 0.00005
        assert getattr(bubble, name) == pytest.approx(value, abs=1.001 * unit), name
    assert case.expected is None or set(case.expected) == set(FIGURES)
