"""The report of a step."""

import re
from pathlib import Path

import harness
import turns
import zoo
from harness import ours, run

LLAMA = zoo.make_module("llama")


def test_report():
    devices = 4
    plan = run(ours(), LLAMA, zoo.make_batches("llama")).report["plan"]
    cut = harness.per_call(harness.call_count(plan), 2)
    script = {"batches": zoo.make_batches("llama", 12), "accumulate_grad_batches": 4}
    report = run(ours(plan=cut), LLAMA, devices=devices, **script).report
    assert report is not None
    guide = (Path(__file__).parent.parent / "docs" / "debugging.md").read_text().split("## What a step did")[1]
    assert report.keys() <= set(re.findall(r"`(\w+)`", guide)), "a key that docs/debugging.md does not explain"
    assert report["plan"] == cut
    assert report["workers"] == devices
    assert report["microbatches"] == 4

    assert turns.faults(report) == []
    rounds = [slot["round"] for slot in report["slots"]]
    assert rounds == sorted([0, 1] * (2 * harness.call_count(cut) - 1)), "two rounds of two microbatches"
    assert all(slot["layers"] for slot in report["slots"])

    weights = sum(p.numel() * 4 for p in LLAMA.parameters())
    assert sum(report["bytes_uploaded"]) >= 2 * weights, "every round uploads every layer forward and backward"
    assert sum(report["bytes_downloaded"]) >= weights, "gradients come down"
    assert len(report["peak_device_bytes"]) == devices and max(report["peak_device_bytes"]) > 0
    assert report["peak_host_bytes"] > 0
    assert 0 <= report["bubble_pct"] <= 100
