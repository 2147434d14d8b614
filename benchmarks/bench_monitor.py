"""What ``RoundPipeMonitor`` costs: its share of the steps of a run, by the clock around its own hooks.

The share is measured within one run: steps of two runs differ by more than the monitor takes. It logs into a CSV file,
at every step and at every tenth; the default is every fiftieth. The goal is 1 %.

    .venv/bin/python benchmarks/bench_monitor.py [--layers 32] [--seconds 0.01] [--steps 20]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from typing import Any

import torch
from common import Sleepers, Stopwatch, batches, quiet, trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_roundpipe import RoundPipeMonitor, RoundPipeStrategy

GOAL = 1.0
"""Percent of a step."""
_HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_start")


class Timed(RoundPipeMonitor):
    """A monitor that adds up the seconds of its hooks, by batch."""

    def __init__(self, every: int | None) -> None:
        super().__init__(every)
        self.roundpipe_passive_hooks = True  # the hooks below are the instance's
        self.seconds: list[float] = [0.0]
        for name in _HOOKS:
            setattr(self, name, functools.partial(self._timed, getattr(self, name), name == _HOOKS[2]))

    def _timed(self, hook: Any, ends: bool, *args: Any) -> None:
        start = time.perf_counter()
        hook(*args)
        self.seconds[-1] += time.perf_counter() - start
        if ends:
            self.seconds.append(0.0)


def measure(layers: int, seconds: float, steps: int, every: int) -> tuple[float, float]:
    """Return the monitor's percentage of the steps from the fourth on, and the mean step in seconds."""
    module = Sleepers([(seconds, 2 * seconds)] * layers)
    monitor, watch = Timed(every), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(RoundPipeStrategy(num_microbatches=8), devices=4, callbacks=[watch, monitor])
        run.loggers = [CSVLogger(folder)]
        run.fit(module, batches(torch.randn(8 * steps, 4), 8))
    own, taken = sum(monitor.seconds[3:steps]), sum(watch.seconds[3:])
    return 100 * own / (own + taken), taken / len(watch.seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.01, help="forward of a layer; backward takes twice as long")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    quiet()
    for every in (1, 10):
        share, step = measure(given.layers, given.seconds, given.steps, every)
        verdict = "reached" if share < GOAL else "missed"
        print(f"every_n_steps={every}: {share:.2f} % of a step of {step:.2f} s (goal: {GOAL:g} %, {verdict})")


if __name__ == "__main__":
    main()
