"""A window of Lightning's accumulation beside one batch that is cut: layers that sleep, on emulated devices.

Both have the same microbatches and the same plan: ``DataLoader(batch_size=1)`` with ``accumulate_grad_batches=8``, and
one batch of 8 with ``num_microbatches=8``. What the window takes longer is Lightning's loop, which comes to 8 batches.

    .venv/bin/python benchmarks/bench_window.py [--devices 4] [--steps 5]
"""

from __future__ import annotations

import statistics

import torch
from common import Sleepers, Stopwatch, batches, parser_of, quiet, trainer

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Costs, greedy_partition
from lightning_roundpipe.planning.costs import CallCost

GOAL = 1.05


def measure(
    seconds: list[tuple[float, float]], plan: str, devices: int, microbatches: int, steps: int, *, window: bool
) -> float:
    """Return the median seconds of a step, without the first, which finds the trace."""
    watch = Stopwatch(microbatches if window else 1, gaps=True)
    strategy = RoundPipeStrategy(num_microbatches=None if window else microbatches, plan=plan, layers=["Sleeper"])
    fitter = trainer(strategy, devices, callbacks=watch, accumulate_grad_batches=microbatches if window else 1)
    data = torch.ones((steps + 1) * microbatches, 4)
    fitter.fit(Sleepers(seconds), batches(data, 1 if window else microbatches))
    return statistics.median(watch.seconds[1:])


def compare(devices: int, microbatches: int, layers: int, layer_s: float, steps: int) -> tuple[float, float]:
    """Return the seconds of a step of a window, and of a batch that is cut. A backward takes twice its forward."""
    seconds = [(layer_s, 2 * layer_s)] * layers
    calls = (CallCost(f"layers.{i}", *times, 0, 0, 0, 0, needs_backward=True) for i, times in enumerate(seconds))
    plan = str(greedy_partition(Costs(tuple(calls)), devices, microbatches))
    window, cut = (measure(seconds, plan, devices, microbatches, steps, window=window) for window in (True, False))
    return window, cut


def main() -> None:
    options = parser_of(__doc__, devices=4, microbatches=8, layers=16, layer_s=0.02, steps=5).parse_args()
    quiet()
    torch.set_num_threads(1)
    window, cut = compare(options.devices, options.microbatches, options.layers, options.layer_s, options.steps)
    print(f"a window of {options.microbatches} batches of 1: {window:.3f} s a step")
    print(f"a batch of {options.microbatches} cut into {options.microbatches}: {cut:.3f} s a step")
    print(f"ratio {window / cut:.3f} (goal: at most {GOAL})")


if __name__ == "__main__":
    main()
