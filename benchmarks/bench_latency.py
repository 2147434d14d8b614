"""How long devices have nothing to do because the interpreter is late, without a GPU.

Layers launch hundreds of small operations on devices that take time and no core (`timed_cuda`). A launch costs the host
what a small operation of torch costs, some 5 µs. A device *starves* while the inputs of its next kernel are there and
the host has not launched it. The table shows the share of all devices' time. Its first row is how it was: threads that
switch every 5 ms, weights that a thread gives to the driver two chunks at a time, and two calls in flight at most. Each
row adds one mend to the row above. Each is measured alone, and beside a thread that computes in pure Python. All of
them take turns, forwards and backwards.

    .venv/bin/python benchmarks/bench_latency.py [--workers 8] [--launches 200] [--kernel-us 100]
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from common import batches, quiet, trainer
from rich.console import Console
from rich.table import Table
from timed_cuda import TimedCuda
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import copy_priority, cuda, interpreter
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream
from lightning_roundpipe.planning import Plan

BANDWIDTH = 2.5e8
"""Bytes a second of a link: a hundredth of PCIe 4.0 x16, as sizes are a hundredth of a real layer's."""
WEIGHTS = 10**6
"""Bytes of a layer: 4 ms on the link."""
_SCRATCH = 2048
"""Numbers that a launch adds to: what takes the host about 5 µs."""


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, launch: Any) -> Tensor:
        ctx.launch = launch
        launch(1)
        return x + weight[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.launch(2)
        return grad, grad.new_zeros(WEIGHTS // 4), None


class Launcher(nn.Module):
    """A layer of many small kernels, and twice as many in its backward."""

    def __init__(self, launch: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WEIGHTS // 4))
        self._launch = lambda: launch  # not an attribute that copies of the layer would have a copy of

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Launch.apply(x, self.weight, self._launch())  # type: ignore[no-untyped-call]
        return result


class Launchers(pl.LightningModule):
    roundpipe_looks_away = True

    def __init__(self, gpus: TimedCuda, layers: int, launches: int, kernel_s: float) -> None:
        super().__init__()
        self.pace = 0.0
        """0 in the first step, which finds the trace."""

        def launch(times: int) -> None:
            scratch, seconds = torch.empty(_SCRATCH), self.pace * kernel_s
            with torch.inference_mode():
                for _ in range(times * launches if self.pace else 1):
                    scratch.fill_(1.0)
                    gpus.launch(seconds)

        self.layers = nn.ModuleList(Launcher(launch) for _ in range(layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Watch(pl.Callback):
    """Seconds from one step's end to the next one's, and those in which devices starved. Without the first two."""

    roundpipe_looks_away = True

    def __init__(self, gpus: TimedCuda) -> None:
        self._gpus = gpus
        self._before = 0.0, 0.0
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._gpus.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, before = (time.perf_counter(), self._gpus.starved_s), self._before
        if batch_idx > 1:  # the backward pass of a step runs on when the next one begins
            self.steps.append((now[0] - before[0], now[1] - before[1]))
        self._before, module.pace = now, 1.0


class ByThread(ChunkedCopyStream):
    """As it was: a thread gives the driver two chunks at most, and the next one when the first of them is done."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_thread = True
        self._given: deque[Any] = deque()

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        for to, of in copy_priority.chunks(dst, src, self.chunk_bytes):
            while len(self._given) >= 2:
                self._given.popleft().wait()
            self._last.move(to, of)
            self._given.append(self._last.record())
        self._last.keep(dst, src)


@dataclass(frozen=True)
class Way:
    name: str
    interval_s: float
    by_thread: bool
    lead: int

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        stream = ByThread if self.by_thread else ChunkedCopyStream
        with (
            patch.object(interpreter, "SWITCH_INTERVAL_S", self.interval_s),
            patch.object(cuda, "ChunkedCopyStream", stream),
            patch.object(cuda, "LEAD_BYTES", self.lead),
        ):
            yield


SHORT, LEAD = interpreter.SWITCH_INTERVAL_S, cuda.LEAD_BYTES
WAYS = (
    Way("as it was", 5e-3, True, 0),
    Way("+ switches every 0.1 ms", SHORT, True, 0),
    Way("+ all chunks at once", SHORT, False, 0),
    Way("+ bytes in flight", SHORT, False, LEAD),
)


@contextlib.contextmanager
def pure_python(wanted: bool) -> Iterator[None]:
    """Beside a thread that keeps the interpreter for as long as it is let."""
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            for _ in range(1000):
                number += 1

    thread = threading.Thread(target=count, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def measure(options: argparse.Namespace, way: Way, *, python: bool) -> list[tuple[float, float]]:
    """Seconds of each step, and the share of all devices' time in which they starved."""
    layers, microbatches, workers = options.layers, options.microbatches, options.workers
    with way.entered(), TimedCuda(BANDWIDTH).played() as gpus:
        module = Launchers(gpus, layers, options.launches, 1e-6 * options.kernel_us)
        watch, plan = Watch(gpus), str(Plan.per_call(layers, microbatches))
        strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=plan, layers=["Launcher"])
        data = batches(torch.ones((options.steps + 2) * microbatches, 1000), microbatches)
        with pure_python(python):
            trainer(strategy, workers, callbacks=watch).fit(module, data)
    return [(took, starved / took / workers) for took, starved in watch.steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("workers", 8),
        ("microbatches", 16),
        ("layers", 5),
        ("launches", 200),
        ("steps", 2),
        ("turns", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernel-us", type=float, default=100.0, help="of each operation on its device")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    work = 4 * options.layers * options.microbatches * options.launches * 1e-6 * options.kernel_us / options.workers
    table = Table(
        title=f"{options.workers} workers, {options.microbatches} microbatches, {options.launches} launches a forward, "
        f"{options.kernel_us:g} µs each: {work:.2f} s of each device a step",
    )
    for heading in ("", "starved", "step (s)", "beside Python", "step (s)"):
        table.add_column(heading, justify="right" if heading else "left")
    cases = [(way, python) for way in WAYS for python in (False, True)]
    found: dict[tuple[Way, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(options.turns):
        for way, python in cases if turn % 2 == 0 else reversed(cases):
            with console.status(f"{way.name}{', beside a thread of pure Python' if python else ''}"):
                found[way, python] += measure(options, way, python=python)
    for way in WAYS:
        row = []
        for steps in (found[way, False], found[way, True]):
            row += [f"{100 * median(share for _, share in steps):.1f} %", f"{median(took for took, _ in steps):.2f}"]
        table.add_row(way.name, *row)
    console.print(table)


if __name__ == "__main__":
    main()
