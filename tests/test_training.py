"""What Lightning adds around a training step keeps working: the same numbers, files and hooks as with plain training.

Everything is compared with ``strategy="auto"`` on the same batches. Where nothing plain exists to compare with (loss
weights, dropout, the report), the test says what must hold instead.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, loader, ours, run, trainer_of
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeWarning

LLAMA = zoo.make_module("llama")
MLP = zoo.make_module("mlp")


def both(module: pl.LightningModule, batches: Any, devices: int = 2, microbatches: int = 3, **options: Any) -> Any:
    """The same run, plainly and with the strategy."""
    strategy_options = options.pop("strategy_options", {})
    make_callbacks = options.pop("make_callbacks", list)
    plain = run("auto", module, batches, callbacks=make_callbacks(), **options)
    strategy = ours(num_microbatches=microbatches, **strategy_options)
    return plain, run(strategy, module, batches, devices=devices, callbacks=make_callbacks(), **options)


def with_optimizer(name: str, make: Any) -> zoo.ZooModule:
    module = zoo.make_module(name)
    module.make_optimizer = make
    return module


# ----------------------------------------------------------------------------------- accumulation, clipping, optimizers


@pytest.mark.parametrize(("name", "accumulate"), [("llama", 2), ("mlp", 3)])
def test_gradient_accumulation(name: str, accumulate: int) -> None:
    """Five batches: the last group is not full."""
    module, batches = zoo.make_module(name), zoo.make_batches(name, 5)
    plain, result = both(module, batches, accumulate_grad_batches=accumulate)
    assert len(plain.grads) == math.ceil(5 / accumulate)
    assert_same(plain, result)


def test_gradient_accumulation_that_changes() -> None:
    plain, result = both(
        MLP,
        zoo.make_batches("mlp", 4),
        max_epochs=3,
        make_callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})],
    )
    assert len(plain.grads) == 4 + 1 + 2
    assert_same(plain, result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "value", "accumulate"),
    [("norm", 0.05, 1), ("norm", 0.05, 2), ("value", 0.002, 2), ("norm", 1e6, 1)],
)
def test_gradient_clipping(algorithm: str, value: float, accumulate: int) -> None:
    batches = zoo.make_batches("llama", 4)
    clip = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": accumulate}
    plain, result = both(LLAMA, batches, **clip)
    assert_same(plain, result)
    if value < 1:
        free = run("auto", LLAMA, batches, accumulate_grad_batches=accumulate)
        with pytest.raises(AssertionError):
            assert_same(free, result, rtol=1e-2, atol=1e-2)


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
    plain, result = both(with_optimizer("mlp", OPTIMIZERS[kind]), zoo.make_batches("mlp", 5))
    assert_same(plain, result, rtol=1e-4, atol=1e-5)


def test_parameter_groups() -> None:
    class Groups(zoo.PlainClassifier):
        def configure_optimizers(self) -> Any:
            decayed = [p for name, p in self.named_parameters() if name.endswith("weight")]
            others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
            groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.01}]
            return torch.optim.SGD(groups, lr=0.1)

    assert_same(*both(Groups(MLP.model), zoo.make_batches("mlp", 4)))


class Scheduled(zoo.PlainClassifier):
    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__(model)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "step":
            scheduler: Any = {"scheduler": schedulers.OneCycleLR(optimizer, 0.5, total_steps=9), "interval": "step"}
        elif self.kind == "epoch":
            scheduler = schedulers.StepLR(optimizer, 1, gamma=0.1)
        else:
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.1)
            scheduler = {"scheduler": plateau, "monitor": "train/loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("kind", ["step", "epoch", "plateau"])
def test_learning_rate_schedulers(kind: str) -> None:
    """The monitor logs the rate of every step, so the schedule itself is compared as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        plain, result = both(
            Scheduled(MLP.model, kind),
            zoo.make_batches("mlp", 3),
            max_epochs=3,
            make_callbacks=lambda: [LearningRateMonitor()],
        )
    rates = {line["lr-SGD"] for _, line in plain.logged if "lr-SGD" in line}
    assert len(rates) > 2
    assert_same(plain, result)


# --------------------------------------------------------------------------------------------------------------- hooks


class Recorder(pl.Callback):
    """The order of everything that Lightning calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename  # others look what it has, and call nothing
        hook = name.startswith(("on_", "setup", "teardown")) and not name.endswith("_checkpoint")
        if hook and caller.endswith("trainer/call.py"):
            object.__getattribute__(self, "seen").append(name)
        return object.__getattribute__(self, name)


def test_hooks_come_once_a_batch_and_in_order() -> None:
    """However many microbatches there are."""
    recorders: list[Recorder] = []

    def make() -> list[pl.Callback]:
        recorders.append(Recorder())
        return [recorders[-1]]

    both(MLP, zoo.make_batches("mlp", 3), make_callbacks=make, val_batches=zoo.make_batches("mlp", 1))
    plain, result = (recorder.seen for recorder in recorders)
    interesting = [name for name in plain if "batch" in name or "backward" in name or "optimizer" in name]
    assert [name for name in result if "batch" in name or "backward" in name or "optimizer" in name] == interesting
    assert interesting.count("on_train_batch_end") == 3


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("name", "devices"), [("llama", 2), ("t5", 2), ("bert", 2), ("mlp", 1)])
def test_evaluation_without_training(name: str, devices: int) -> None:
    module, batches = zoo.make_module(name), zoo.make_batches(name)
    found = []
    for strategy in ("auto", ours(num_microbatches=3)):
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


def test_validation_between_training_steps() -> None:
    """Twice an epoch: what validation uses must be the weights after the last step, and training goes on unharmed."""
    plain, result = both(
        LLAMA,
        zoo.make_batches("llama", 4),
        val_batches=zoo.make_batches("llama", 2, seed=50),
        val_check_interval=2,
        max_epochs=2,
        num_sanity_val_steps=1,
    )
    assert sum("val/loss" in line for _, line in plain.logged) == 4
    assert_same(plain, result)


@pytest.mark.slow
def test_everything_with_one_trainer() -> None:
    """fit, validate, test, predict, and fit once more, each with a setup and a teardown of its own."""
    found = []
    for strategy in ("auto", ours(num_microbatches=3)):
        trainer = trainer_of(strategy, devices=1 if strategy == "auto" else 2)
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

    batches = zoo.make_batches("llama")
    plain, result = both(Generating(LLAMA.model), batches, val_batches=batches)
    assert "val/tokens" in plain.metrics
    assert_same(plain, result)


# ----------------------------------------------------------------------------------- what training_step takes and gives


class Outputs(zoo.PlainClassifier):
    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Any:
        loss, logits = self.loss_and_logits(batch)
        per_sample = F.cross_entropy(logits, batch["y"], reduction="none")
        return {
            "loss": loss,
            "logits": logits.detach(),
            "per_sample": per_sample.detach(),
            "mean": batch["x"].mean(),
            "nested": {"largest": logits.detach().amax(1), "pair": (batch["y"], batch["x"])},
        }


@pytest.mark.parametrize("samples", [6, 5])
def test_outputs_are_merged(samples: int) -> None:
    """Tensors with a sample dimension are put together again, scalars are averaged; hooks see the whole batch."""
    plain, result = both(Outputs(MLP.model), zoo.make_batches("mlp", 3, samples))
    assert plain.outputs[0]["logits"].shape == (samples, 5)
    assert_same(plain, result, outputs=True)


class Structured(zoo.PlainClassifier):
    """Takes a nested batch with lists, text and values that belong to all samples; no ``batch_idx``."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        (x, extra), y, names = batch["inputs"], batch["y"], batch["names"]
        assert len(x) == len(y) == len(names) == len(extra["scale"])
        assert [int(name.removeprefix("class ")) for name in names] == y.tolist()
        assert batch["kind"] == "training"
        assert extra["shift"].shape == (8,)
        logits = self.model(x * extra["scale"][:, None] + extra["shift"]) * batch["gain"]
        return F.cross_entropy(logits, y)


@pytest.mark.parametrize("samples", [6, 5])
def test_batches_of_any_structure(samples: int) -> None:
    batches = [
        {
            "inputs": (batch["x"], {"scale": torch.linspace(0.5, 1.5, samples), "shift": torch.arange(8.0)}),
            "y": batch["y"],
            "names": [f"class {int(y)}" for y in batch["y"]],
            "kind": "training",
            "gain": 0.7,
        }
        for batch in zoo.make_batches("mlp", 3, samples)
    ]
    assert_same(*both(Structured(MLP.model), batches))


class Pair(zoo.PlainClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx == 1:
            return None
        return {"loss": F.cross_entropy(self.model(x), y)}


def test_a_step_without_a_loss_is_skipped() -> None:
    batches = [(batch["x"], batch["y"]) for batch in zoo.make_batches("mlp", 4)]
    plain, result = (
        run(strategy, Pair(MLP.model), batches, devices=devices, watch=False)
        for strategy, devices in (("auto", 1), (ours(num_microbatches=3), 2))
    )
    assert_same(plain, result)


# --------------------------------------------------------------------------------------------------------- loss weights


class TokenMean(zoo.CausalLM):
    """Computes its own mean over targets, in a way that nobody can count from outside."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        labels = batch["labels"][:, 1:]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = -(chosen * (labels != -100)).sum() / (labels != -100).sum()
        self.log("loss", loss)
        return loss


class TokenMeanThatSaysSo(TokenMean):
    def loss_weight(self, batch: zoo.Batch) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("as_number", [False, True])
def test_given_loss_weight(as_number: bool) -> None:
    def count(batch: zoo.Batch) -> Any:
        found = (batch["labels"][:, 1:] != -100).sum()
        return int(found) if as_number else found

    module, batches = TokenMean(LLAMA.model), zoo.make_batches("llama")
    assert_same(*both(module, batches, strategy_options={"loss_weight": count}))


def test_loss_weight_method() -> None:
    assert_same(*both(TokenMeanThatSaysSo(LLAMA.model), zoo.make_batches("llama")))


def test_given_loss_weight_wins_over_counting() -> None:
    """The Hugging Face model's targets could be counted, but someone wants samples; it is said what that means."""
    batches = zoo.make_batches("llama")
    hand = harness.by_hand(LLAMA, batches, 3, weight=lambda batch: len(batch["labels"]))
    with pytest.warns(RoundPipeWarning, match="with the given loss_weight, .* the loss is .* instead of"):
        result = run(ours(num_microbatches=3, loss_weight=samples_of), LLAMA, batches, devices=2)
    assert_same(hand, result)


def samples_of(batch: zoo.Batch) -> int:
    return len(batch["labels"])


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
    plan = run(ours(num_microbatches=1), LLAMA, zoo.make_batches("llama")).report["plan"]  # type: ignore[index]
    cut = harness.per_call(harness.call_count(plan), 2)
    strategy = ours(num_microbatches=4, plan=cut)
    report = run(strategy, LLAMA, zoo.make_batches("llama"), devices=devices).report
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
