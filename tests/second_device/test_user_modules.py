"""Training and validation of LightningModules as users write them, with metrics and logging: losses, what is logged and
metrics are those of plain training on the CPU. The modules are the packaged task's, the examples', and one with metrics
of all kinds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import zoo
from harness import assert_tensors_same, ours, run
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples import preference_dpo
from lightning_roundpipe.tasks.causal_lm import CausalLM

Made = tuple[pl.LightningModule, list[Any], list[Any]]
"""A module, batches for training and for validation."""
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def _tokens(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Batches of four sequences, of other lengths each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        words = torch.randint(1, 64, (4, 12 - i), generator=generator)
        kept = torch.arange(12 - i) < torch.tensor([[12], [9], [5], [7]])
        labels = torch.where(kept, words, -100)
        batches.append({"input_ids": words, "labels": labels, "attention_mask": kept.long()})
    return batches


def _packaged() -> Made:
    task = CausalLM(LlamaForCausalLM(LLAMA), functools.partial(torch.optim.SGD, lr=0.1))
    return task, _tokens(3, 1), _tokens(2, 2)


def _preferences() -> Made:
    data = [DataLoader(preference_dpo.pairs(24, seed), batch_size=8) for seed in (1, 2)]
    return preference_dpo.PreferenceTuning(), list(data[0]), list(data[1])[:2]


class Measured(pl.LightningModule):
    """Logs values, and metrics: those that add up, and those that keep all they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.MLP()
        self.losses, self.seen = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=5)
        self.ranking = torchmetrics.classification.MulticlassAUROC(num_classes=5)
        self.register_buffer("average", torch.zeros(5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.accuracy(logits, batch["y"])
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/largest", logits.max(), on_step=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"], reduction="none")
        self.losses.update(loss)
        self.seen.update(loss)
        self.ranking.update(logits.softmax(-1), batch["y"])
        self.log_dict({"val/loss": self.losses, "val/ranking": self.ranking, "val/plain": loss.mean()})

    def on_validation_epoch_end(self) -> None:
        self.log("val/seen", self.seen.compute().std())
        self.seen.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Averaged(Measured):
    """Keeps averages of its own on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["x"])
        self.average += 0.1 * (logits.detach().mean(0) - self.average)
        self.log("train/average", self.average.sum())
        return F.cross_entropy(logits, batch["y"])


def _measured(kind: type[Measured]) -> Made:
    return kind(), zoo.make_batches("mlp", 3), zoo.make_batches("mlp", 2, seed=5)


MODULES: dict[str, Callable[[], Made]] = {
    "packaged task": _packaged,
    "preference_dpo": _preferences,
    "metrics": functools.partial(_measured, Measured),
    "averages": functools.partial(_measured, Averaged),
}


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("name", [n if n == "metrics" else pytest.param(n, marks=pytest.mark.slow) for n in MODULES])
def test_training(name: str, validated: bool, devices: list[Any]) -> None:
    torch.manual_seed(0)
    module, batches, others = MODULES[name]()
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    options |= {"val_batches": others, "num_sanity_val_steps": 1} if validated else {}
    expected = run("auto", copy.deepcopy(module), batches, **options)
    result = run(ours(), module, batches, devices=2, **options)
    assert_tensors_same(expected.losses, result.losses, 1e-3, 1e-5)
    assert_tensors_same(expected.metrics, result.metrics, 1e-3, 1e-5)
    assert len(expected.logged or []) == len(result.logged or [])
