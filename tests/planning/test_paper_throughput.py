"""Predictions beside what the paper measured; docs/estimates.md has the same tables."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_model import ModelShape, look_at
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.planning.costs import Costs

ROOT = Path(__file__).parents[2]
MODELS = {  # the paper's, with adapters
    "qwen3_1_7b": "none",
    "llama3_1_8b": "none",
    "gpt_oss_20b": "none",
    "qwen3_32b": "none",
    "qwen3_235b_a22b": "attention",
}


def script(path: str) -> Any:
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def shape(model: str) -> ModelShape:
    return ModelShape(Wish(model, lora=MODELS[model], precision="16-mixed"), read_machine("rtx4090x8"))


@cache
def estimated_costs(model: str) -> Costs:
    return shape(model).costs(4, 2048)


# -- benchmarks/bench_validation.py ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_has_the_table_of_the_benchmark() -> None:
    bench = script("benchmarks/bench_validation.py")
    rows = [bench.predict(row) for row in bench.read_rows()]
    page = (ROOT / "docs" / "estimates.md").read_text()
    assert bench.markdown(rows) in page and f"{bench.summary(rows)}." in page
    errors = [abs(row.error) for row in rows]
    assert median(errors) <= 0.04 and max(errors) <= 0.20


# -- docs/large-models.md ----------------------------------------------------------------------------------------------


def large_models() -> Any:
    """The script that writes the page's figures."""
    return script("docs/make_large_models.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_models_are_as_the_page_says() -> None:
    """Every figure under the plans on the page; that the search finds these plans is another test's question."""
    pages = large_models()
    page = pages.PAGE.read_text()
    found = [
        look_at(shape(row.name), replace(row.wish, plan=text))
        for row, text in zip(pages.ROWS, pages.plans(), strict=True)
    ]
    assert pages.between(page) == pages.figures(found)
    assert {row.name for row in pages.ROWS} == set(MODELS)
    assert all(outlook.fits_device and outlook.fits_host for outlook in found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_search_finds_the_pages_plans() -> None:
    """A machine that is busy may find others, but hardly slower ones."""
    pages = large_models()
    for row, text in zip(pages.ROWS, pages.plans(), strict=True):
        there, found = (look_at(shape(row.name), replace(row.wish, plan=plan)) for plan in (text, None))
        assert found.tokens_per_s == pytest.approx(there.tokens_per_s, rel=0.06), row.name
