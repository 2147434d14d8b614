"""What recipes of fine-tuning take beside plain Lightning: SFT, DPO, GRPO, distillation, images, fused losses.

The recipes are those of tests/test_recipes.py, which shows that their numbers are plain Lightning's; models are larger.
Plain Lightning computes with one thread, and so does each emulated device. Both sides train the same windows.
The devices share the machine's cores: the ratio of CPU seconds is what the engine and its recomputation cost, and the
ratio of seconds what is left of it when devices work at the same time.

    .venv/bin/python benchmarks/bench_recipes.py [--devices 2] [--windows 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import Steps, parser_of, quiet, show, trainer
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import test_recipes

WINDOW, TIMES, WARM_UP = 4, 16, 2
"""Microbatches of a window; tokens of a row over those of the tests; windows that are not counted."""


def measure(name: str, devices: int, windows: int) -> tuple[float, float, str]:
    """A window's median seconds, CPU seconds, and the forward calls of each device. ``devices`` 0: plain Lightning."""
    make, batch = test_recipes.RECIPES[name]
    torch.manual_seed(0)
    module = make().float()
    given = [
        {k: v.float() if v.is_floating_point() else v for k, v in batch(i, TIMES).items()}
        for i in range(WINDOW * (windows + WARM_UP))
    ]
    strategy: Any = RoundPipeStrategy() if devices else "auto"
    wall, cpu = Steps(WINDOW), Steps(WINDOW, time.process_time)
    loop = trainer(strategy, max(devices, 1), accumulate_grad_batches=WINDOW, callbacks=[wall, cpu])
    loop.fit(module, DataLoader(given, batch_size=None))  # type: ignore[arg-type]
    calls = ""
    if devices:
        found = Counter(e["worker"] for e in strategy.report()["events"] if e["kind"] == "forward")
        calls = ", ".join(str(found[i]) for i in range(devices))
    seconds = [statistics.median(watch.seconds[WARM_UP:]) for watch in (wall, cpu)]
    return seconds[0], seconds[1], calls


def row(name: str, options: argparse.Namespace) -> tuple[str, ...]:
    plain, ours = (measure(name, devices, options.windows) for devices in (0, options.devices))
    ratios = (f"{ours[i] / plain[i]:.2f}" for i in (0, 1))
    return (name, f"{plain[0]:.2f}", f"{ours[0]:.2f}", *ratios, ours[2])


def main() -> None:
    parser = parser_of(__doc__, devices=2, windows=2)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    test_recipes.SIZE.update(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512)
    title = f"windows of {WINDOW} microbatches, {options.devices} emulated devices"
    headings = ("recipe", "plain (s)", "roundpipe (s)", "ratio", "CPU ratio", "forward calls")
    show(title, headings, [row(name, options) for name in test_recipes.RECIPES])


if __name__ == "__main__":
    main()
