"""Losses and key-value caches of evaluation in parts, on devices that are not the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from test_evaluation_losses import Continues, Generates, Ran, Validates, batches, generated, validated
from test_evaluation_losses import ran as ran  # a fixture


def _ours() -> Any:
    return ours(num_microbatches=3)


@pytest.mark.parametrize("kind", [Validates, pytest.param(Continues, marks=pytest.mark.slow)])
def test_models_that_return_losses_and_caches(kind: Any, devices: list[Any], ran: Ran) -> None:
    """A cache that is joined on one device is given to layers of another one."""
    module, data = kind(zoo.make_module("llama").model), batches("llama", 3)
    plain, found = validated(module, "auto", data, 1), validated(module, _ours(), data)
    assert len(devices) == 2
    assert ran and not any(unsplittable for unsplittable, _ in ran)
    assert_tensors_same(plain, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, pytest.param({"num_beams": 3}, marks=pytest.mark.slow)])
def test_generate(options: Any, devices: list[Any], ran: Ran) -> None:
    module, data = Generates(zoo.make_module("llama").model, **options), zoo.make_batches("llama", 2)
    assert all(map(torch.equal, generated(module, "auto", data, 1), generated(module, _ours(), data)))
    assert len(devices) == 2
    assert ran and not any(unsplittable for unsplittable, _ in ran)


class Forces(zoo.PlainClassifier):
    def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            self.log("force", torch.autograd.grad(self.model(x).sum(), x)[0].norm())


def test_gradients_are_computed_on_the_host_which_is_said(devices: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The weights are on the host, and inputs may not be."""
    module, found = Forces(zoo.make_module("mlp").model), []
    for strategy, count in (("auto", 1), (ours(layers=["Linear", "ResidualBlock"]), 2)):
        trainer = trainer_of(strategy, devices=count, inference_mode=False)
        with quiet(), caplog.at_level("INFO"):
            found += trainer.validate(module, loader(zoo.make_batches("mlp", 1)), verbose=False)
    assert devices
    assert found[1]["force"] == pytest.approx(found[0]["force"], rel=1e-5)
    assert "the step's layers run on the CPU" in caplog.text
