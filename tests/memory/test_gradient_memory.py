"""Memory for gradients is made before the first batch, which is measured; what no call needs is given back."""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import loader, ours, run, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.devices.emulated import EmulatedDevice

SIZE = 8


class Module(pl.LightningModule):
    """Four layers, of which one is never called and one is frozen at first."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        self.layers[0].requires_grad_(requires_grad=False)
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for layer in self.layers[:3]:
            batch = torch.tanh(layer(batch))
        loss = batch.square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers[1](batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Asked(pl.Callback):
    """When host memory was asked for: the batch, or -1 before the first; and which of it still lives."""

    roundpipe_looks_away = True

    def __init__(self, patch: pytest.MonkeyPatch, unfreeze: int = -1) -> None:
        self.when: list[int] = []
        self.living: list[int] = []
        self._batch, self._unfreeze = -1, unfreeze
        self._storages: list[weakref.ref[Any]] = []
        real = EmulatedDevice.host_buffer

        def host_buffer(device: EmulatedDevice, nbytes: int) -> Tensor:
            made = real(device, nbytes)
            self.when.append(self._batch)
            self._storages.append(weakref.ref(made.untyped_storage()))
            return made

        patch.setattr(EmulatedDevice, "host_buffer", host_buffer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.when.clear()  # weights

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch_idx
        self.living.append(sum(storage() is not None for storage in self._storages))
        if batch_idx == self._unfreeze:
            pl_module.layers.requires_grad_(requires_grad=True)


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 4, SIZE, generator=torch.Generator().manual_seed(1)))


def fit(asked: Asked, module: Module, **options: Any) -> None:
    used = ours(num_microbatches=2 if module.automatic_optimization else 1, layers=["Linear"], **options)
    run(used, module, batches(), callbacks=[asked], watch=False)


def test_none_is_made_within_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    fit(asked, Module())
    assert asked.when == [-1, -1, -1], "one for each trained layer"
    assert asked.living[0] == 7, "weights, and gradients"
    assert asked.living[1:] == [6, 6], "gradients of the layer that was never called are kept"


def test_what_begins_to_be_trained_has_its_memory_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, unfreeze=1)
    before: list[int] = []
    step = Module.training_step

    def training_step(module: Module, batch: Tensor, batch_idx: int) -> Any:
        before.append(len(asked.when))
        return step(module, batch, batch_idx)

    monkeypatch.setattr(Module, "training_step", training_step)
    fit(asked, Module())
    assert asked.when.count(1) == 4
    assert before[2:] == [len(asked.when)] * 4


@pytest.mark.parametrize("how", ["validate", "manual"])
def test_where_none_is_needed_before_none_is_made(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    module = Module(manual=how == "manual")
    if how == "manual":
        fit(asked, module)
        assert -1 not in asked.when
    else:
        trainer_of(ours(layers=["Linear"]), devices=1).validate(module, loader(batches()), verbose=False)
        assert len(asked.when) == 4, "weights"


def test_frozen_layers_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page would be locked for nothing."""
    sizes: list[int] = []
    real = EmulatedDevice.host_buffer

    def host_buffer(device: EmulatedDevice, nbytes: int) -> Tensor:
        sizes.append(nbytes)
        return real(device, nbytes)

    monkeypatch.setattr(EmulatedDevice, "host_buffer", host_buffer)
    fit(Asked(monkeypatch), Module())
    assert sizes and 0 not in sizes
