"""One Trainer that does everything, and the report of a step."""

import copy
import re
from pathlib import Path

import harness
import pytest
import zoo
from harness import loader, ours, run, trainer_of

LLAMA = zoo.make_module("llama")


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.slow
def test_everything_with_one_trainer():
    """fit, validate, test, predict, and fit once more, each with a setup and a teardown of its own."""
    found = []
    for strategy in ("auto", ours()):
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else 2, accumulate_grad_batches=3)
        module, batches = copy.deepcopy(LLAMA), zoo.make_batches("llama")
        trainer.fit(module, loader(batches), loader(batches))
        values = [trainer.validate(module, loader(batches), verbose=False)]
        values.append(trainer.test(module, loader(batches), verbose=False))
        values.append(trainer.predict(module, loader(batches)))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(batches))
        values.append(dict(module.state_dict()))
        found.append(values)
    harness.assert_tensors_same(*found)


# ----------------------------------------------------------------------------------------------------------- the report


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

    slots = report["slots"]
    stages = 2 * harness.call_count(cut) - 1
    assert len(slots) == 2 * stages  # two rounds of two microbatches
    numbers = [slot["slot"] for slot in slots]
    assert numbers == list(range(numbers[0], numbers[0] + len(slots)))
    assert all(slot["worker"] == slot["slot"] % devices for slot in slots)
    assert [slot["round"] for slot in slots] == [0] * stages + [1] * stages
    phases = [slot["phase"] for slot in slots[:stages]]
    assert phases == ["forward"] * (stages // 2) + ["fused"] + ["backward"] * (stages // 2)
    assert all(slot["layers"] for slot in slots)
    ahead = [list(slot["layers"]) for slot in slots[: stages // 2]]
    assert [list(slot["layers"]) for slot in slots[stages - 1 : stages // 2 : -1]] == ahead

    weights = sum(p.numel() * 4 for p in LLAMA.parameters())
    uploaded, downloaded = _total(report["bytes_uploaded"]), _total(report["bytes_downloaded"])
    assert uploaded >= 2 * weights, "every round uploads every layer once forward and once backward"
    assert downloaded >= weights, "gradients come down"
    peaks = report["peak_device_bytes"]
    peaks = list(peaks.values()) if isinstance(peaks, dict) else list(peaks)
    assert len(peaks) == devices
    assert max(peaks) > 0
    assert report["peak_host_bytes"] > 0
    assert 0 <= report["bubble_pct"] <= 100


def _total(value):
    return sum(value.values() if isinstance(value, dict) else value) if not isinstance(value, (int, float)) else value
