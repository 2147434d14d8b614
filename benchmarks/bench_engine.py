"""What the engine itself takes for a layer call and for a turn: layers that compute next to nothing.

Two plans of the same calls differ only in their number of turns: everything in the fused stage, and a stage for every
call. A step's time is taken as  step + calls x (cost of a call) + turns x (cost of a turn), where `step` is a plain
Lightning step over as many batches. In the first plan a call's forward and backward are one trip to the worker each.

    .venv/bin/python benchmarks/bench_engine.py [--layers 32] [--microbatches 16]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import Sleepers, Stopwatch, batches, quiet, trainer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan


def measure(options: argparse.Namespace, devices: int, plan: Plan | None) -> float:
    """Median seconds of a step; without a plan, of plain Lightning accumulating the microbatches."""
    microbatches = options.microbatches
    watch = Stopwatch(1 if plan else microbatches)
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=str(plan), layers=["Sleeper"]) if plan else "auto"
    data = torch.ones((options.steps + 1) * microbatches, 4)
    fitter = trainer(strategy, devices, callbacks=watch, accumulate_grad_batches=1 if plan else microbatches)
    fitter.fit(Sleepers([(0.0, 0.0)] * options.layers), batches(data, microbatches if plan else 1))
    return statistics.median(watch.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 32), ("microbatches", 16), ("steps", 7), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    layers, microbatches = options.layers, options.microbatches
    single, cut = Plan.single(layers, microbatches), Plan.per_call(layers, microbatches)
    turns = (len(cut.stages()) - 1) * microbatches
    calls = 2 * layers * microbatches
    table = Table(title=f"{layers} layers, {microbatches} microbatches: medians of {options.repeat} alternations")
    headings = (
        "devices",
        "plain step (ms)",
        "one stage (ms)",
        "a stage per call (ms)",
        "per call (µs)",
        "per turn (µs)",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for devices in (1, 4, 8):
        rows = [
            [measure(options, 1, None), measure(options, devices, single), measure(options, devices, cut)]
            for _ in track(range(options.repeat), f"{devices} devices", console=console, transient=True)
        ]
        plain, one, many = (statistics.median(row[i] for row in rows) for i in range(3))
        table.add_row(
            str(devices),
            *(f"{1e3 * seconds:.1f}" for seconds in (plain, one, many)),
            f"{1e6 * (one - plain) / calls:.0f}",
            f"{1e6 * (many - one) / turns:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
