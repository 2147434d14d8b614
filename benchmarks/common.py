"""What the benchmarks share: the Trainer they use, a stopwatch, tables, and a model whose layers only take time."""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.devices import emulated_work


class Steps(pl.Callback):
    """When steps of ``batches`` batches end, by ``clock``, and the batches' losses.

    Steps overlap: devices may still work on one when the next one starts. So the time between two ends is what a step
    takes. ``time.process_time`` counts the CPU seconds of all threads.

    Attributes:
        ends: the start of the first batch, and the ends of steps.
        losses: of each batch.
    """

    roundpipe_passive_hooks = True

    def __init__(self, batches: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._batches, self.clock = batches, clock
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.ends:
            self.ends.append(self.clock())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if (batch_idx + 1) % self._batches == 0:
            self.ends.append(self.clock())

    @property
    def seconds(self) -> list[float]:
        """Those of each step."""
        return [end - start for start, end in pairwise(self.ends)]


def quiet() -> None:
    """Only the benchmark's own output."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_roundpipe", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def trainer(strategy: Any, devices: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer, on the CPU unless ``options`` say otherwise, that neither writes nor draws."""
    return pl.Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", **options},
    )


def show(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], width: int = 150) -> None:
    """Print a table. Its first column names the rows."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def parser_of(description: str | None, **defaults: int | float) -> argparse.ArgumentParser:
    """A parser with the first line of a module's docstring, and options of these names and defaults."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def batches(data: Tensor, size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data), batch_size=size)


class Pace:
    """How long layers that only take time wait.

    Attributes:
        longest: most seconds of a wait. In the step that learns the trace, just enough that other layers run meanwhile.
    """

    def __init__(self) -> None:
        self.longest = 5e-3

    def take(self, seconds: float) -> None:
        if seconds:
            emulated_work(min(seconds, self.longest))


class _TakeTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float, pace: Pace) -> Tensor:
        ctx.backward_s, ctx.pace = backward_s, pace
        ctx.save_for_backward(weight)
        pace.take(forward_s)
        return x * weight[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        ctx.pace.take(ctx.backward_s)
        of_weight = torch.zeros_like(weight)
        of_weight[0] = grad.sum()
        return grad * weight[:1], of_weight, None, None, None


class Sleeper(nn.Module):
    """A layer of known duration: it sleeps in its forward and in its backward, and uses no core meanwhile."""

    def __init__(self, forward_s: float, backward_s: float, pace: Pace, elements: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))
        self.times = forward_s, backward_s
        # Not an attribute that copies of the layer would have a copy of.
        self.pace = lambda: pace

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _TakeTime.apply(x, self.weight, *self.times, self.pace())  # type: ignore[no-untyped-call]
        return result


class Sleepers(pl.LightningModule):
    """Layers of known durations, one after another.

    Args:
        seconds: (forward, backward) of each.
        elements: weights of each; None: one.
    """

    roundpipe_passive_hooks = True

    def __init__(self, seconds: list[tuple[float, float]], elements: list[int] | None = None) -> None:
        super().__init__()
        self.pace = Pace()
        self.layers = nn.ModuleList(
            Sleeper(forward, backward, self.pace, size)
            for (forward, backward), size in zip(seconds, elements or [1] * len(seconds), strict=True)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = batch[0]
        for layer in self.layers:
            h = layer(h)
        return h.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pace.longest = math.inf  # the first step has found the trace

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
