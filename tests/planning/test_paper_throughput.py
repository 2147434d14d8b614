"""Estimates beside what the paper measured on eight RTX 4090; docs/planning-estimates.md has the same table."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_model import ModelShape, look_at
from lightning_roundpipe.planning.cases import read_cases
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.search import baseline_within

ROOT = Path(__file__).parents[2]
WORKERS, LENGTH, SEQUENCES, STEPS = 8, 2048, 4, 3
MEASURED = {  # arXiv 2604.27085, asynchronous: tokens a second, sequences a step, the case, adapters
    "qwen3_1_7b": (65_417, 512, "qwen3-1.7b", "none"),
    "llama3_1_8b": (24_275, 256, "llama3.1-8b", "none"),
    "gpt_oss_20b": (18_122, 128, "gpt-oss-20b", "none"),
    "qwen3_32b": (5_516, 128, "qwen3-32b", "none"),
    "qwen3_235b_a22b": (1_820, 64, "qwen3-235b-a22b-lora", "attention"),
}
DENSE = ("qwen3_1_7b", "llama3_1_8b", "qwen3_32b")


@cache
def shape(model: str) -> ModelShape:
    return ModelShape(model, MEASURED[model][3], "16-mixed", read_machine("rtx4090x8"))


@cache
def estimated_costs(model: str) -> Costs:
    return shape(model).costs(SEQUENCES, LENGTH)


def case_costs(model: str) -> Costs:
    """The case's times with the estimate's sizes. A case has no embedding and no last norm, so they are free."""
    cases = read_cases(ROOT / "conf" / "cases" / "paper.json")
    case = next(c for c in cases if c.model == MEASURED[model][2])
    calls = []
    for call in estimated_costs(model):
        times = {"forward_s": 0.0, "backward_s": 0.0}
        if ".layers." in call.layer:
            times = {"forward_s": case.forward_ms / 1e3, "backward_s": case.backward_ms / 1e3}
        elif call.layer.endswith("lm_head"):
            times = {"forward_s": case.head_forward_ms / 1e3, "backward_s": case.head_backward_ms / 1e3}
        calls.append(replace(call, **times))
    assert sum(".layers." in call.layer for call in calls) == case.layers
    return Costs(tuple(calls))


@cache
def tokens_per_s(model: str, source: str) -> float:
    """Under the plan of the paper's algorithm, as that is what was measured."""
    costs = estimated_costs(model) if source == "profile" else case_costs(model)
    batch = MEASURED[model][1]
    microbatches = batch // SEQUENCES
    plan = baseline_within(costs, WORKERS, microbatches, Limits.usual(costs, WORKERS, microbatches))
    plan = replace(plan, recompute_ahead=True)
    run = run_steps(plan, costs, WORKERS, microbatches, shape(model).rules(1), 2 * STEPS)
    return batch * LENGTH / run.period_s(STEPS)


def error_pct(model: str, source: str) -> float:
    return 100 * (tokens_per_s(model, source) / MEASURED[model][0] - 1)


@pytest.mark.parametrize("model", DENSE)
@pytest.mark.parametrize(("source", "most"), [("case", 15), ("profile", 35)])
def test_dense_models_are_near_what_was_measured(model: str, source: str, most: float) -> None:
    assert abs(error_pct(model, source)) < most


@pytest.mark.parametrize("model", MEASURED)
def test_the_page_says_what_is_estimated(model: str) -> None:
    row = [f"{MEASURED[model][0]:,}"]
    for source in ("case", "profile"):
        row += [f"{tokens_per_s(model, source):,.0f}", f"{error_pct(model, source):+.1f} %"]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs" / "planning-estimates.md").read_text()


# -- docs/large-models.md ----------------------------------------------------------------------------------------------


def large_models() -> Any:
    """The script that writes the page's figures."""
    spec = importlib.util.spec_from_file_location("make_large_models", ROOT / "docs" / "make_large_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_models_are_as_the_page_says() -> None:
    """Every figure under the plans on the page; that the search finds these plans is another test's question."""
    pages = large_models()
    page = pages.PAGE.read_text()
    found = [
        look_at(shape(row.name), replace(row.wish, plan=text))
        for row, text in zip(pages.ROWS, pages.plans(pages.between(page)), strict=True)
    ]
    assert pages.between(page) == pages.figures(found)
    assert {row.name: row.late for row in pages.ROWS} == {model: row[0] for model, row in MEASURED.items()}
    assert all(outlook.fits_device and outlook.fits_host for outlook in found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_search_finds_the_pages_plans() -> None:
    """A machine that is busy may find others, but hardly slower ones."""
    pages = large_models()
    for row, text in zip(pages.ROWS, pages.plans(pages.between(pages.PAGE.read_text())), strict=True):
        there, found = (look_at(shape(row.name), replace(row.wish, plan=plan)) for plan in (text, None))
        assert found.tokens_per_s == pytest.approx(there.tokens_per_s, rel=0.06), row.name
