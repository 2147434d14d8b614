"""Plans that carry products: the bits of those that recompute them, with what is not computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from harness import assert_identical, call_count, ours, per_call, run

from lightning_roundpipe.planning.schedule import Plan

CAREFUL = {"poison": True, "delay_seed": 3}


def plans(n: int, size: int) -> dict[str, str]:
    """Plans of ``n`` calls that carry, and the one that does not."""
    fused = n - 2
    whole = f"forward 0-{fused - 1}; fused {fused}-{n - 1}; backward 0-{fused - 1}; round {size}"
    return {
        "each call": f"{per_call(n, size)}; carry 0-{n - 2}",
        "ahead": f"{whole}; recompute ahead; carry 0-{fused - 1}",
        "rounds": f"{per_call(n, 1)}; carry 0-{n - 2}",
        "some": f"{per_call(n, size)}; carry 1 {n - 2}",
    }


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_no_bit_depends_on_what_is_carried(name: str) -> None:
    module, batches = zoo.make_module(name), zoo.make_batches(name)
    first = run(ours(num_microbatches=3), module, batches)
    assert first.report is not None
    n = call_count(first.report["plan"])
    for devices, (kind, plan) in enumerate(plans(n, 3).items(), 1):
        found = run(ours(num_microbatches=3, plan=plan, emulation=CAREFUL), module, batches, devices=min(devices, 3))
        assert_identical(first, found), kind
        assert found.report is not None and Plan.parse(found.report["plan"]).carry
