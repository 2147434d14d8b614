"""Evaluation on devices that are not the host: losses, key-value caches, and gradients."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn


class Validates(pl.LightningModule):
    """Logs the loss that the model returns, and returns its outputs."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(**batch).loss, on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return tuple(self.model(**batch)[:2])


class Continues(Validates):
    """Computes with the cache that the model returned, and gives it back to the model."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        first = self.model(**given)
        cache = first.past_key_values
        mask = torch.cat([given["attention_mask"], torch.ones(len(cache.layers[0].keys), 1, dtype=torch.long)], 1)
        next_tokens = first.logits[:, -1:].argmax(-1)
        second = self.model(input_ids=next_tokens, attention_mask=mask, past_key_values=cache)
        return first.logits, second.logits, [layer.keys.sum((1, 2, 3)) for layer in second.past_key_values.layers]


class Generates(Validates):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        given = {name: batch[name][:3, :6] for name in ("input_ids", "attention_mask")}
        text: Tensor = self.model.generate(**given, max_new_tokens=4, **self.options)
        return text


def evaluated(module: pl.LightningModule, strategy: Any, data: Any, devices: int) -> Any:
    used = copy.deepcopy(module)
    trainer = trainer_of(strategy, devices=devices)
    with quiet():
        return [trainer.validate(used, loader(data), verbose=False), trainer.predict(used, loader(data))]


@pytest.mark.parametrize("kind", [Validates, Continues])
def test_losses_and_caches(kind: Any, devices: list[Any]) -> None:
    module, data = kind(zoo.make_module("llama").model), zoo.make_batches("llama", 5)
    plain, found = evaluated(module, "auto", data, 1), evaluated(module, ours(), data, 2)
    assert len(devices) == 2
    assert_tensors_same(plain, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, pytest.param({"num_beams": 3}, marks=pytest.mark.slow)])
def test_generate(options: Any, devices: list[Any]) -> None:
    module, data = Generates(zoo.make_module("llama").model, **options), zoo.make_batches("llama", 3)
    plain, found = evaluated(module, "auto", data, 1), evaluated(module, ours(), data, 2)
    assert len(devices) == 2
    assert all(map(torch.equal, plain[1], found[1]))
