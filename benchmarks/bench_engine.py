"""What the engine itself takes for a layer call and for a turn: layers that compute next to nothing.

Two plans of the same calls differ only in their number of turns: everything in the fused stage, and a stage for every
call. A step's time is taken as  step + calls x (cost of a call) + turns x (cost of a turn), where `step` is a plain
Lightning step over as many batches. In the first plan a call's forward and backward are one trip to the worker each.

With ``--functions``, it counts instead how many functions the engine's threads call for each layer call, the layers'
own and torch's included. That is the same on any machine, whatever else runs there.

    .venv/bin/python benchmarks/bench_engine.py [--layers 32] [--microbatches 16] [--functions]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import torch
from common import Sleepers, Stopwatch, batches, parser_of, quiet, show, trainer

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan


def fit(options: argparse.Namespace, watch: Stopwatch, devices: int, plan: Plan | None, steps: int) -> None:
    """Train on ``devices``; without a plan, by plain Lightning that accumulates the microbatches."""
    microbatches = options.microbatches
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=str(plan), layers=["Sleeper"]) if plan else "auto"
    fitter = trainer(strategy, devices, callbacks=watch, accumulate_grad_batches=1 if plan else microbatches)
    data = batches(torch.ones(steps * microbatches, 4), microbatches if plan else 1)
    fitter.fit(Sleepers([(0.0, 0.0)] * options.layers), data)


def measure(options: argparse.Namespace, devices: int, plan: Plan | None) -> float:
    """Median seconds of a step."""
    watch = Stopwatch(1 if plan else options.microbatches)
    fit(options, watch, devices, plan, options.steps + 1)
    return statistics.median(watch.seconds[1:])


class Counting(Stopwatch):
    """Counts the calls of functions on all threads that start while it exists, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self._profiles: list[cProfile.Profile] = []
        threading.setprofile(self._begin)

    def _begin(self, *_: object) -> None:
        profile = cProfile.Profile()
        self._profiles.append(profile)
        profile.enable()  # replaces this function as the thread's profiler

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == 2:
            for profile in self._profiles:
                profile.clear()

    def functions(self) -> float:
        """End counting, and return the calls of functions a step."""
        threading.setprofile(None)
        for profile in self._profiles:
            profile.create_stats()
        stats: Any = pstats.Stats(*(profile for profile in self._profiles if profile.stats))  # some threads only wait
        return float(stats.total_calls) / (len(self.seconds) - 2)


def count(options: argparse.Namespace, plan: Plan) -> float:
    """Functions that are called for each layer call under ``plan``, on one device."""
    counting = Counting()
    fit(options, counting, 1, plan, 5)
    return counting.functions() / (2 * options.layers * options.microbatches)


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
    parser.add_argument("--functions", action="store_true")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    layers, microbatches = options.layers, options.microbatches
    single, cut = Plan.single(layers, microbatches), Plan.per_call(layers, microbatches)
    if options.functions:
        for name, plan in (("one stage", single), ("a stage per call", cut)):
            print(f"{name}: {count(options, plan):.0f} functions for each layer call")
        return
    steps = ("plain step (ms)", "one stage (ms)", "a stage per call (ms)")
    title = f"{layers} layers, {microbatches} microbatches: medians of {options.repeat} alternations"
    show(title, ("devices", *steps, "per call (µs)", "per turn (µs)"), rows(options, single, cut))


if __name__ == "__main__":
    main()
