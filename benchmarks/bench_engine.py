"""What the engine itself takes for a layer call and for a turn: layers that compute next to nothing.

Two plans of the same calls differ only in their number of turns: everything in the fused stage, and a stage for every
call. A step's time is taken as  step + calls x (cost of a call) + turns x (cost of a turn), where `step` is a plain
Lightning step over as many batches. In the first plan a call's forward and backward are one trip to the worker each.

    .venv/bin/python benchmarks/bench_engine.py [--layers 32] [--microbatches 16]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from common import Sleepers, Steps, batches, parser_of, quiet, show, trainer

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan


def measure(options: argparse.Namespace, devices: int, plan: Plan | None) -> float:
    """Median seconds of a step on ``devices``; without a plan, of plain Lightning that accumulates the microbatches."""
    microbatches = options.microbatches
    watch = Steps(1 if plan else microbatches)
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=str(plan), layers=["Sleeper"]) if plan else "auto"
    fitter = trainer(strategy, devices, callbacks=watch, accumulate_grad_batches=1 if plan else microbatches)
    data = batches(torch.ones((options.steps + 1) * microbatches, 4), microbatches if plan else 1)
    fitter.fit(Sleepers([(0.0, 0.0)] * options.layers), data)
    return statistics.median(watch.seconds[1:])


def rows(options: argparse.Namespace, single: Plan, cut: Plan) -> Iterator[tuple[str, ...]]:
    turns = (len(cut.stages()) - 1) * options.microbatches
    calls = 2 * options.layers * options.microbatches
    for devices in (1, 4, 8):
        found = [
            [measure(options, 1, None), measure(options, devices, single), measure(options, devices, cut)]
            for _ in range(options.repeat)
        ]
        plain, one, many = (statistics.median(times) for times in zip(*found, strict=True))
        each = (1e6 * (one - plain) / calls, 1e6 * (many - one) / turns)
        yield str(devices), *(f"{1e3 * s:.1f}" for s in (plain, one, many)), *(f"{micros:.0f}" for micros in each)


def main() -> None:
    parser = parser_of(__doc__, layers=32, microbatches=16, steps=7, repeat=3)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    layers, microbatches = options.layers, options.microbatches
    single, cut = Plan.single(layers, microbatches), Plan.per_call(layers, microbatches)
    steps = ("plain step (ms)", "one stage (ms)", "a stage per call (ms)")
    title = f"{layers} layers, {microbatches} microbatches: medians of {options.repeat} alternations"
    show(title, ("devices", *steps, "per call (µs)", "per turn (µs)"), rows(options, single, cut))


if __name__ == "__main__":
    main()
