"""Optimizers, evaluation and the report: the same numbers as with plain training.

``test_window.py`` has hooks, logs, schedules, clipping and checkpoints.
"""

from __future__ import annotations

import copy
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, loader, ours, run, trainer_of
from zoo_runs import batches as batches_of

LLAMA = zoo.make_module("llama")
MLP = zoo.make_module("mlp")


def both(module: pl.LightningModule, batches: Any, **options: Any) -> Any:
    """The same run in windows of three batches, plainly and with the strategy."""
    options["accumulate_grad_batches"] = 3
    return run("auto", module, batches, **options), run(ours(), module, batches, devices=2, **options)


# ---------------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    # eps is large because gradients that are zero but for rounding would otherwise decide whole updates.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-3, foreach=True, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind: str) -> None:
    module = zoo.make_module("mlp")
    module.make_optimizer = OPTIMIZERS[kind]
    assert_same(*both(module, zoo.make_batches("mlp", 14, samples=2)), rtol=1e-4, atol=1e-5)


def test_parameter_groups() -> None:
    class Groups(zoo.PlainClassifier):
        def configure_optimizers(self) -> Any:
            decayed = [p for name, p in self.named_parameters() if name.endswith("weight")]
            others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
            groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.01}]
            return torch.optim.SGD(groups, lr=0.1)

    assert_same(*both(Groups(MLP.model), batches_of("mlp", window=3)))


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("name", "devices"), [("llama", 2), ("t5", 2), ("bert", 2), ("mlp", 1)])
def test_evaluation_without_training(name: str, devices: int) -> None:
    module, batches = zoo.make_module(name), zoo.make_batches(name)
    found = []
    for strategy in ("auto", ours()):
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else devices)
        used = copy.deepcopy(module)
        found.append(
            [
                trainer.validate(used, loader(batches), verbose=False),
                trainer.test(used, loader(batches), verbose=False),
                trainer.predict(used, loader(batches)),
            ]
        )
        assert not any(p.grad is not None for p in used.parameters())
    (plain_val, plain_test, plain_logits), (val, test, logits) = found
    harness.assert_tensors_same(plain_val, val, what="validate")
    harness.assert_tensors_same(plain_test, test, what="test")
    assert all(logit.device.type == "cpu" and not logit.requires_grad for logit in logits)
    harness.assert_tensors_same(plain_logits, logits, what="predict")


@pytest.mark.slow
def test_everything_with_one_trainer() -> None:
    """fit, validate, test, predict, and fit once more, each with a setup and a teardown of its own."""
    found = []
    for strategy in ("auto", ours()):
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else 2, accumulate_grad_batches=3)
        module, batches = copy.deepcopy(LLAMA), zoo.make_batches("llama")
        trainer.fit(module, loader(batches), loader(batches))
        values: list[Any] = [trainer.validate(module, loader(batches), verbose=False)]
        values.append(trainer.test(module, loader(batches), verbose=False))
        values.append(trainer.predict(module, loader(batches)))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(batches))
        values.append(dict(module.state_dict()))
        found.append(values)
    harness.assert_tensors_same(*found)


def test_generate_in_validation() -> None:
    class Generating(zoo.CausalLM):
        def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
            ids = self.model.generate(batch["input_ids"][:1, :4], max_new_tokens=5, do_sample=False)
            self.log("val/tokens", ids.float().mean())

    batches = batches_of("llama", window=3)
    plain, result = both(Generating(LLAMA.model), batches, val_batches=batches)
    assert "val/tokens" in plain.metrics
    assert_same(plain, result)


# ----------------------------------------------------------------------------------------------------------- the report


REPORT_KEYS = {
    "plan",
    "workers",
    "microbatches",
    "slots",
    "bytes_uploaded",
    "bytes_downloaded",
    "peak_device_bytes",
    "peak_host_bytes",
    "bubble_pct",
}


@pytest.mark.parametrize("devices", [1, 4])
def test_report(devices: int) -> None:
    plan = run(ours(), LLAMA, zoo.make_batches("llama")).report["plan"]  # type: ignore[index]
    cut = harness.per_call(harness.call_count(plan), 2)
    script: dict[str, Any] = {"batches": zoo.make_batches("llama", 12), "accumulate_grad_batches": 4}
    report = run(ours(plan=cut), LLAMA, devices=devices, **script).report
    assert report is not None
    assert report.keys() >= REPORT_KEYS
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


def _total(value: Any) -> float:
    return sum(value.values() if isinstance(value, dict) else value) if not isinstance(value, (int, float)) else value


def test_a_worker_never_holds_the_whole_model() -> None:
    """With a cut at every call, a worker holds two stages at most."""
    module = zoo.make_module("mlp")
    layers = ["Linear", "ResidualBlock"]
    cut, fused = (
        run(
            ours(num_microbatches=2, layers=layers, plan=plan, emulation={"poison": True}),
            module,
            zoo.make_batches("mlp"),
        ).report
        for plan in (harness.per_call(6), harness.single(6))
    )
    assert cut is not None
    assert fused is not None
    block = sum(p.numel() * 4 for p in module.model.blocks[0].parameters())
    assert max(cut["peak_device_bytes"]) < max(fused["peak_device_bytes"]) - block


def test_report_before_any_step() -> None:
    """There is nothing to tell yet: an empty report or an error that says so, but no stale one."""
    strategy = ours()
    try:
        report = strategy.report()
    except Exception as error:
        assert "step" in str(error)
    else:
        assert not report or not report.get("slots")
