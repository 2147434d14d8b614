"""CPU seconds of a step, all threads together, over plain Lightning's: a model that computes next to nothing.

A GPU machine's workers share one Python interpreter, so what the interpreter does for a layer call, times the number
of calls, bounds a step from below. The model is a Qwen3 of 28 narrow layers. Plain Lightning accumulates as many
batches as there are microbatches, with Hugging Face's own activation checkpointing, which calls each layer as often.

    .venv/bin/python benchmarks/bench_interpreter.py [--devices 1 8] [--microbatches 16] [--stages 18]
"""

from __future__ import annotations

import argparse
import statistics
import time

import lightning.pytorch as pl
import torch
from common import Stopwatch, batches, quiet, trainer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan

LAYERS, WIDTH, TOKENS, VOCABULARY = 28, 16, 8, 32


class Narrow(pl.LightningModule):
    """A Qwen3 whose layers are calls and nothing else."""

    roundpipe_looks_away = True

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                use_cache=False,
                tie_word_embeddings=False,
            )
        )
        self.model.train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0]
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def equal_stages(stages: int, microbatches: int) -> Plan:
    """Calls of a trace (embedding, layers, norm, head) in ``stages`` stages: one half forward, one half backward."""
    calls = LAYERS + 3
    forward = stages // 2
    edges = [round(i * (calls - 2) / forward) for i in range(forward + 1)]
    ranges = [(edges[i], edges[i + 1] - 1) for i in range(forward)]
    cuts = " ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in ranges)
    back = " ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in reversed(ranges))
    return Plan.parse(f"forward {cuts}; fused {edges[-1]}-{calls - 1}; backward {back}; round {microbatches}")


def measure(options: argparse.Namespace, devices: int, plan: Plan | None) -> float:
    """Median CPU seconds of a step; without a plan, of plain Lightning."""
    microbatches = options.microbatches
    watch = Stopwatch(1 if plan else microbatches, time.process_time)
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=str(plan)) if plan else "auto"
    data = torch.randint(VOCABULARY, ((options.steps + 1) * microbatches, TOKENS))
    fitter = trainer(strategy, devices, callbacks=watch, accumulate_grad_batches=1 if plan else microbatches)
    fitter.fit(Narrow(checkpointing=plan is None), batches(data, microbatches if plan else 1))
    return statistics.median(watch.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("microbatches", 16), ("stages", 18), ("steps", 5), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    table = Table(
        title=f"{LAYERS} layers, {options.microbatches} microbatches: medians of {options.repeat} alternations"
    )
    for heading in ("devices", "plain step (CPU s)", "roundpipe step (CPU s)", "ratio"):
        table.add_column(heading, justify="right")
    plan = equal_stages(options.stages, options.microbatches)
    for devices in options.devices:
        rows = [
            (measure(options, 1, None), measure(options, devices, plan))
            for _ in track(range(options.repeat), f"{devices} devices", console=console, transient=True)
        ]
        plain, ours = (statistics.median(row[i] for row in rows) for i in range(2))
        table.add_row(str(devices), f"{plain:.3f}", f"{ours:.3f}", f"{ours / plain:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
