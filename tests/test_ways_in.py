"""Ways to start training other than a script: LightningCLI, and the cells of a notebook."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import zoo


class Trained(zoo.PlainClassifier):
    """With its own data, as LightningCLI wants it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(zoo.make_module("mlp").model)
        self.lr = lr

    def train_dataloader(self) -> Any:
        return harness.loader(zoo.make_batches("mlp", 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


QUIET = ["max_steps=3", "logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "accelerator=cpu"]


def fitted(*args: str) -> Any:
    from lightning.pytorch.cli import LightningCLI

    given = ["fit", *args, *(f"--trainer.{option}" for option in QUIET), "--model.lr=0.2", "--seed_everything=1"]
    return LightningCLI(Trained, args=given, save_config_callback=None)


def test_lightning_cli(tmp_path: Path) -> None:
    """By name, and by class with options, from a file."""
    pytest.importorskip("jsonargparse")
    plain = fitted("--trainer.strategy=auto", "--trainer.devices=1")
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent("""
            trainer:
              devices: 2
              strategy:
                class_path: lightning_roundpipe.RoundPipeStrategy
                init_args: {num_microbatches: 3, memory_budget: 1MiB, emulation: {memory: 4MiB}}
            """)
    )
    ways: list[list[str]] = [["--trainer.strategy=roundpipe", "--trainer.devices=2"], [f"--config={config}"]]
    for way in ways:
        own = fitted(*way)
        report = own.trainer.strategy.report()
        assert (report["workers"], report["microbatches"]) == (2, 1 if way is ways[0] else 3)
        harness.assert_tensors_same(dict(plain.model.state_dict()), dict(own.model.state_dict()))


CELLS = [
    """
    import lightning.pytorch as pl, torch, zoo, harness
    pl.seed_everything(1)
    module, batches = zoo.make_module("mlp"), zoo.make_batches("mlp", 3)
    trainer = harness.trainer_of(strategy, devices=1 + (strategy != 'auto'), max_epochs=1)
    """,
    """
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("a cell that fails")
    trainer.callbacks.append(Fails())
    trainer.fit(module, harness.loader(batches))
    """,
    "del trainer",
    """
    module = zoo.make_module("mlp")
    trainer = harness.trainer_of(strategy, devices=1 + (strategy != 'auto'), max_epochs=2)
    trainer.fit(module, harness.loader(batches))
    """,
    """
    print(module.model(batches[0]["x"]).shape)  # an ordinary module again
    values = [trainer.validate(module, harness.loader(batches)), trainer.test(module, harness.loader(batches))]
    values.append(trainer.predict(module, harness.loader(batches)))
    """,
    """
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, harness.loader(batches), harness.loader(batches))
    values.append(dict(module.state_dict()))
    """,
]


def run_cells(strategy: str) -> Any:
    """One process runs them all, in one namespace. What they have found, the module's state at the end included."""
    namespace: dict[str, Any] = {"__name__": "__main__", "strategy": strategy}
    for cell in CELLS:
        with pytest.raises(KeyError, match="a cell that fails") if "Fails" in cell else contextlib.nullcontext():
            exec(textwrap.dedent(cell), namespace)
        assert not harness.roundpipe_threads()
    return namespace["values"]


def test_cells_of_a_notebook() -> None:
    """The cell that fails leaves nothing behind that matters."""
    plain, own = (run_cells(strategy) for strategy in ("auto", "roundpipe"))
    harness.assert_tensors_same(plain, own, rtol=1e-4, atol=1e-5)
