"""Several machines, a process each, give what one machine gives on their batches together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import several_jobs
import several_machines
import torch
from harness import assert_tensors_same
from patience import PATIENCE_S

pytestmark = pytest.mark.timeout(10 * PATIENCE_S)

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "one microbatch each": {"microbatches": 2, "optimizer": "sgd"},
    "looked at, and accumulated": {"blocking": True, "accumulate_grad_batches": 2, "steps": 5},
    "clipped and accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "steps": 5},
    "stale": {"options": {"staleness": 1}},
    "dropout": {"dropout": 0.2},
}
NEEDS_OURS = ("stale", "dropout")
"""Plain training has nothing like it; one machine with our strategy has."""


def assert_one(case: dict[str, Any], found: list[dict[str, Any]], *, ours: bool, rtol: float = 2e-5) -> None:
    """All machines have the same weights, to the bit, and those of one machine with all samples."""
    first, *others = found
    for other in others:
        assert all(torch.equal(first["state"][name], other["state"][name]) for name in first["state"])
    given = {"strategy": None if ours else "auto", "devices": 2 if ours else 1}
    one = several_jobs.train(**{**case, **given}, rank=0, machines=1)
    assert first["steps"] == one["steps"] > 0
    assert_tensors_same(one["state"], first["state"], rtol=rtol)
    start = several_jobs.zoo.make_module(case.get("model", "llama"), case.get("lora", False)).state_dict()
    assert any(not torch.equal(start[name], one["state"][name]) for name in start), "nothing was trained"


def compare(folder: Path, names: list[str]) -> None:
    found = several_machines.results("cases", folder, cases=[CASES[name] for name in names])
    for name, ones in zip(names, zip(*found, strict=True), strict=True):
        print(name)
        assert_one(CASES[name], list(ones), ours=name in NEEDS_OURS)


def test_two_machines_are_one_with_all_samples(tmp_path: Path) -> None:
    """Targets are spread unevenly, so the machines' losses have to be weighed by them."""
    compare(tmp_path, ["adamw", "clipped and accumulated"])


@pytest.mark.slow
def test_in_other_ways(tmp_path: Path) -> None:
    compare(tmp_path, [name for name in CASES if name not in ("adamw", "clipped and accumulated")])
