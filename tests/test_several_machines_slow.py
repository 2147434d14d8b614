"""More ways in which several machines are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import several_jobs
import several_machines
import torch
from harness import assert_tensors_same
from patience import PATIENCE_S
from test_several_machines import assert_one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(20 * PATIENCE_S)]


def check(folder: Path, cases: list[tuple[dict[str, Any], bool]], *, machines: int = 2, rtol: float = 2e-5) -> None:
    """Each case, with whether it is compared with ours on one machine, or else with plain training."""
    found = several_machines.results("cases", folder, machines=machines, cases=[case for case, _ in cases], limit=500)
    for (case, ours), ones in zip(cases, zip(*found, strict=True), strict=True):
        print(case)
        assert_one(case, list(ones), ours=ours, rtol=rtol)


def test_causal_models_and_adapters(tmp_path: Path) -> None:
    """Tied embeddings; experts that get tokens on one machine only; adapters over a frozen base."""
    models = ["gpt2", "gpt_oss"]
    check(tmp_path, [({"model": name}, False) for name in models] + [({"model": "llama", "lora": True}, False)])


def test_losses_and_batches(tmp_path: Path) -> None:
    cases = [
        ({"nothing_on": 0, "microbatches": 2}, False),
        ({"microbatches": 8, "blocking": True, "gradient_clip_val": 0.1}, False),
        ({"options": {"loss_weight": "sum"}, "optimizer": "sgd", "gradient_clip_val": 0.5}, True),
        ({"devices": 1, "microbatches": 4}, False),
    ]
    check(tmp_path, cases)


def test_precisions(tmp_path: Path) -> None:
    """The same microbatches on one machine round alike, so both are near."""
    cases = [
        ({"precision": "bf16-mixed"}, True),
        ({"precision": "bf16-true"}, True),
        ({"scaled": True, "gradient_clip_val": 0.1}, True),
        ({"scaled": True, "options": {"shard_optimizer": False}}, True),
    ]
    check(tmp_path, cases, rtol=5e-3)


def test_gradients_in_bf16_are_near(tmp_path: Path) -> None:
    case = {"options": {"network_dtype": "bfloat16"}, "optimizer": "sgd"}
    first, second = several_machines.results("cases", tmp_path, cases=[case])
    assert all(torch.equal(first[0]["state"][name], second[0]["state"][name]) for name in first[0]["state"])
    one = several_jobs.train(**{**case, "options": {}}, rank=0, machines=1)
    assert any(not torch.equal(first[0]["state"][name], one["state"][name]) for name in one["state"])
    assert_tensors_same(one["state"], first[0]["state"], rtol=1e-2, atol=1e-2)


def test_torchrun_starts_a_job_again_that_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """torchrun's store outlives the processes, and had the addresses of those that had ended."""
    processes = several_machines.torchrun("dies_once", 2, tmp_path, {"epochs": 3})
    ended = several_machines.collect(processes, tmp_path, 2 * PATIENCE_S)
    assert [one.status for one in ended] == [0, 0], "\n\n".join(one.output for one in ended)
    assert "machine 1 (" in ended[0].output and "Restored all states" in ended[0].output
    found = [torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2)]
    assert len(found[0]["losses"]) == 6, "two epochs after the checkpoint of the first one"
    assert_one({"max_epochs": 3}, found, ours=False)
