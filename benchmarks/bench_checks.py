"""What the engine's checks cost, in a model that computes next to nothing.

``gradients``: that none bypasses the engine: the hooks on masters' accumulators, the mode of user code in backward, and
the look at what layers borrow when they run first. ``recomputations``: that they are their forward, here in every step,
of which the engine checks the first two and one in a hundred. Each is switched off and on in turns. Times are of all
cores, which other work on the machine disturbs less.

    .venv/bin/python benchmarks/bench_checks.py [--layers 30] [--microbatches 4]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from common import batches, quiet, trainer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.layer_calls import recompute_check
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Accumulators
from lightning_roundpipe.runtime.user_code.graph_cuts import _Driven


class CoreTime(pl.Callback):
    """Seconds of all cores until a batch ends, from the end of the one before."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.ends.append(time.process_time())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.process_time())


class TinyLlama(pl.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


@contextlib.contextmanager
def recomputations(checked: bool) -> Iterator[None]:
    """All steps, or none, compare recomputations with their forward."""
    with mock.patch.object(recompute_check, "FIRST", sys.maxsize if checked else 0):
        yield


@contextlib.contextmanager
def gradients(checked: bool) -> Iterator[None]:
    """Whether gradients that bypass the engine are looked for."""
    if checked:
        yield
        return
    own = _Driven.of

    @contextlib.contextmanager
    def without_mode(self: _Driven, root: torch.Tensor) -> Iterator[None]:
        with own(self, root), torch._C.DisableTorchFunction():
            yield

    with (
        mock.patch.object(Accumulators, "watch", lambda self, masters: None),
        mock.patch.object(LayerExecutor, "_borrowing", lambda *_: contextlib.nullcontext()),
        mock.patch.object(_Driven, "of", without_mode),
    ):
        yield


CHECKS = {"gradients": gradients, "recomputations": recomputations}


def measure(options: argparse.Namespace, check: str, checked: bool) -> tuple[float, float]:
    """Seconds of the first step, and of a later one; the second makes arenas for its plan."""
    watch = CoreTime()
    data = torch.randint(0, 64, ((options.steps + 1) * options.microbatches, 8))
    strategy = RoundPipeStrategy(num_microbatches=options.microbatches)
    with CHECKS[check](checked):
        trainer(strategy, options.devices, callbacks=watch).fit(
            TinyLlama(options.layers), batches(data, options.microbatches)
        )
    seconds = [end - start for start, end in pairwise(watch.ends)]
    return seconds[0], statistics.mean(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 30), ("microbatches", 4), ("devices", 2), ("steps", 15), ("repeat", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    measure(options, "gradients", True)
    table = Table(title=f"{options.layers} layers, {options.microbatches} microbatches: medians of {options.repeat}")
    for heading in ("check", "step", "without (ms)", "with (ms)", "ratio"):
        table.add_column(heading, justify="right")
    for check in CHECKS:
        rows = [
            [measure(options, check, checked) for checked in (False, True)]
            for _ in track(range(options.repeat), check, console=console, transient=True)
        ]
        for kind, name in enumerate(("first", "later")):
            off, on = (statistics.median(row[side][kind] for row in rows) for side in (0, 1))
            ratio = statistics.median(row[1][kind] / row[0][kind] for row in rows)
            table.add_row(check, name, f"{1e3 * off:.1f}", f"{1e3 * on:.1f}", f"{ratio:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
