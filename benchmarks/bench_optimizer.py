"""The optimizer's rate: AdamW layer by layer on a background thread, against one fused step of all parameters.

A step through the engine hands the optimizer one layer after another, and each is stepped by itself
(``lightning_roundpipe.optim``), which should not cost anything: a goal of 1.0. But each layer costs a fixed time in
Python, most of it torch's own, and the more because everything else has left the caches meanwhile; so there are layers
of three sizes, and a side where layers that are ready together share a call. What users write is mostly ``AdamW(...)``
without ``fused``, which is shown too. The sides take turns in changing order and have parameters, gradients and state
in common: where memory lies alone makes a tenth.

    .venv/bin/python benchmarks/bench_optimizer.py [--repeat 21]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.optim import AdamW

from lightning_roundpipe.optim import Hyperparameters, Shadow

SHAPES = {
    "Qwen3-1.7B": {"hidden": 2048, "inner": 6144, "layers": 2, "vocabulary": 8_000},
    "Qwen3-0.6B": {"hidden": 1024, "inner": 3072, "layers": 4, "vocabulary": 8_000},
    "SmolLM2-135M": {"hidden": 576, "inner": 1536, "layers": 8, "vocabulary": 16_000},
}
"""Few layers, of about these models' size."""
TOGETHER = 4
"""Layers of a call, on the side where they share one."""


def parameters(hidden: int, inner: int, layers: int, vocabulary: int) -> list[list[nn.Parameter]]:
    """Those of each layer, with gradients: an embedding, decoder blocks, the last norm."""
    mlp = [(inner, hidden), (inner, hidden), (hidden, inner)]
    block = [*[(hidden, hidden)] * 4, *mlp, (hidden,), (hidden,)]
    made = [[nn.Parameter(torch.zeros(s)) for s in layer] for layer in ([(vocabulary, hidden)], *[block] * layers)]
    made.append([nn.Parameter(torch.zeros(hidden))])
    for parameter in (p for layer in made for p in layer):
        parameter.grad = torch.randn(parameter.shape)
    return made


def sides_of(layers: list[list[nn.Parameter]], thread: ThreadPoolExecutor) -> dict[str, Callable[[], object]]:
    """A function for each side that makes a step."""
    everything = [p for layer in layers for p in layer]
    plain, fused = (AdamW(everything, weight_decay=0.1, fused=choice) for choice in (None, True))
    fused.state = plain.state
    shadow = Shadow(plain, everything)

    def by(size: int) -> Callable[[], None]:
        calls = [layers[start : start + size] for start in range(0, len(layers), size)]
        work = [{id(p): p.grad for layer in call for p in layer if p.grad is not None} for call in calls]

        def step() -> None:
            hyperparameters = Hyperparameters.of(plain)
            for task in [thread.submit(shadow.step, hyperparameters, gradients) for gradients in work]:
                task.result()

        return step

    return {
        "layer by layer": by(1),
        f"{TOGETHER} layers at a time": by(TOGETHER),
        "AdamW(fused=True).step()": fused.step,
        "AdamW().step()": plain.step,
    }


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(name: str, shape: dict[str, int], repeat: int, console: Console) -> Table:
    layers = parameters(**shape)
    sizes = [sum(p.numel() for p in layer) for layer in layers]
    with ThreadPoolExecutor(max_workers=1) as thread:
        sides = sides_of(layers, thread)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        names = list(sides)
        for turn in track(range(repeat + 2), name, console=console, transient=True):
            for side in names:
                took = seconds(sides[side])
                if turn >= 2:  # the first ones make the state and touch its memory
                    taken[side].append(took)
            names = [*names[1:], names[0]]
    title = f"{name}: {sizes[1] / 1e6:.1f} M parameters a layer, {sum(sizes) / 1e6:.1f} M in all"
    table = Table(title=f"{title}, fp32, {torch.get_num_threads()} threads")
    for column in ("", "s", "parameters/s", "ratio", "quartiles"):
        table.add_column(column, justify="right" if column else "left")
    fused = taken["AdamW(fused=True).step()"]
    for side, times in taken.items():
        median = statistics.median(times)
        low, ratio, high = statistics.quantiles([mine / theirs for mine, theirs in zip(times, fused, strict=True)], n=4)
        table.add_row(side, f"{median:.3f}", f"{sum(sizes) / median:.2e}", f"{ratio:.3f}", f"{low:.2f} to {high:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=21)
    options = parser.parse_args()
    console = Console()
    for name, shape in SHAPES.items():
        console.print(measure(name, shape, options.repeat, console))
    console.print("ratio: this side over AdamW(fused=True).step(), median of the turns")


if __name__ == "__main__":
    main()
