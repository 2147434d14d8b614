"""What the engine costs: a step through it against plain Lightning with activation checkpointing.

Both train the same random Llama with the same threads, and both compute every layer's forward twice.
Plain Lightning accumulates the microbatches of a batch one after another; the engine runs them on one emulated device.
What is left between the two is interception, turns, threads, and the copies of weights and boundary tensors.

    .venv/bin/python benchmarks/bench_overhead.py [--layers 8] [--hidden 512] [--tokens 256] [--microbatches 4]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy

VOCABULARY = 8192


class Model(pl.LightningModule):
    def __init__(self, options: argparse.Namespace, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=options.hidden,
                intermediate_size=3 * options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=8,
                num_key_value_heads=8,
                use_cache=False,
            )
        ).train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """Seconds of each optimizer step."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.batches == 0:
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.batches == 0:
            self.seconds.append(time.perf_counter() - self._start)


def measure(options: argparse.Namespace, ours: bool) -> list[float]:
    """Step times of a few steps after two warm-up steps (the engine's first one makes its plan)."""
    accumulate = 1 if ours else options.microbatches
    size = options.microbatches if ours else 1
    steps = options.steps + 2
    tokens = torch.randint(VOCABULARY, (steps * options.microbatches, options.tokens))
    times = StepTimes(accumulate)
    trainer = pl.Trainer(
        strategy=RoundPipeStrategy(num_microbatches=options.microbatches) if ours else "auto",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=times,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(options, checkpointing=not ours), DataLoader(TensorDataset(tokens), batch_size=size))
    return times.seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 512), ("tokens", 256), ("microbatches", 4), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeat", type=int, default=3, help="alternations of the two sides")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    console = Console()
    plain: list[float] = []
    engine: list[float] = []
    ratios: list[float] = []
    for _ in track(range(options.repeat), "measuring", console=console, transient=True):
        a, b = measure(options, ours=False), measure(options, ours=True)
        plain, engine = plain + a, engine + b
        ratios.append(statistics.median(b) / statistics.median(a))
    table = Table(
        title=f"{options.layers} layers, width {options.hidden}, {options.microbatches} microbatches of "
        f"{options.tokens} tokens, {torch.get_num_threads()} threads"
    )
    for heading in ("", "step time, median (s)", "fastest (s)"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, seconds in (("plain, activation checkpointing", plain), ("roundpipe, 1 emulated device", engine)):
        table.add_row(name, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}")
    console.print(table)
    console.print(
        f"ratio of medians: {statistics.median(ratios):.3f} (of each alternation: "
        + ", ".join(f"{r:.3f}" for r in ratios)
        + ")"
    )


if __name__ == "__main__":
    main()
