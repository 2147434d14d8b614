"""How long training takes to start: until the first step begins, and the first step itself, over plain Lightning.

A tiny Llama of 32 layers with LoRA adapters computes next to nothing, so what the strategy does once shows. Each run
has a process of its own, with one thread for torch's operations; seconds are medians of several runs.

    .venv/bin/python benchmarks/bench_start.py [--layers 32] [--devices 2] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from common import Stopwatch, quiet, trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

TOKENS, WORDS = 32, 256
AIM_RATIO, AIM_START_S = 3.0, 2.0
"""What the first step may take of a later one, and the start beyond plain Lightning's."""


class Model(pl.LightningModule):
    """A causal language model whose base weights are frozen.

    Args:
        layers: number of its blocks.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=WORDS, num_hidden_layers=layers
        )
        self.model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))  # type: ignore[arg-type]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


class Start(Stopwatch):
    """Also takes the time at which the first step begins."""

    began = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.began = self.began or time.perf_counter()
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds until the first step begins, of that step, and of a later one, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, watch = Model(options.layers), Start()
    data = DataLoader(list(torch.randint(WORDS, (options.steps, 4, TOKENS))), batch_size=None)  # type: ignore[arg-type]
    begun = time.perf_counter()
    trainer(options.one, 1 if options.one == "auto" else options.devices, callbacks=watch).fit(model, data)
    return {"start": watch.began - begun, "first": watch.seconds[0], "later": statistics.median(watch.seconds[3:])}


def measured(options: argparse.Namespace, strategy: str) -> dict[str, float]:
    """The same, as the median of several processes."""
    arguments = ["--layers", str(options.layers), "--devices", str(options.devices), "--steps", str(options.steps)]
    command = [sys.executable, __file__, *arguments, "--one", strategy]
    found = [json.loads(subprocess.check_output(command).splitlines()[-1]) for _ in range(options.repeat)]
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", type=int, default=2, help="emulated ones")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3, help="processes for each strategy")
    parser.add_argument("--one", default="", help="measure this strategy in this process, and print JSON")
    options = parser.parse_args()
    quiet()
    if options.one:
        print(json.dumps(measure(options)))
        return
    table = Table("seconds", "start", "first step", "later step", "first / later")
    found = {strategy: measured(options, strategy) for strategy in ("auto", "roundpipe")}
    for name, one in zip(("plain Lightning", "roundpipe"), found.values(), strict=True):
        times = [f"{one[key]:.3f}" for key in ("start", "first", "later")]
        table.add_row(name, *times, f"{one['first'] / one['later']:.2f}")
    console = Console()
    console.print(table)
    ours, plain = found["roundpipe"], found["auto"]
    console.print(f"first step over a later one: {ours['first'] / ours['later']:.2f} (aim: at most {AIM_RATIO:g})")
    console.print(f"start beyond plain: {ours['start'] - plain['start']:.2f} s (aim: at most {AIM_START_S:g} s)")


if __name__ == "__main__":
    main()
