"""The tail of a step: from the end of the last backward to the new weights of the layer that the next forward needs.

The gradients of an embedding, above all of one that is the output layer as well, come last, and the next forward
begins with it. ``whole``: download, sum, update and cast follow each other. ``parts``: each part goes through them
while the next ones arrive, which the engine does with layers of 128 MiB and more.

Simulated: steps of a model on a machine, with links and an optimizer that take time. Measured: the engine's own
thread with one layer on an emulated device, whose link takes as long for the gradients as the update takes, or twice or
half as long; the sides take turns.

    .venv/bin/python benchmarks/bench_tail.py [--model qwen3_1_7b] [--hardware rtx4090x8] [--numbers 48000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_roundpipe.commands.machines import read_machine
from lightning_roundpipe.commands.plan_shape import ModelShape, Wish
from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import intraop_threads, make_devices
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums, HostGradBuffers, Reduction
from lightning_roundpipe.memory.host_layer import host_layers, make_buckets
from lightning_roundpipe.planning.memory import partition_within
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.updates.loss_handle import StepGradients

MEMORY_SHARE = 0.9
STEPS = 6


def simulate(model: str, hardware: str) -> Table:
    """Seconds of a step without a tail, with one that goes through all at once, and in parts."""
    machine = read_machine(hardware)
    table = Table(title=f"{model}, {hardware}, {2 * machine.workers} microbatches, bf16-true, simulated")
    for column in ("host memory, GB/s", "tokens a step", "no tail, ms", "whole", "parts"):
        table.add_column(column, justify="right")
    for bandwidth in (machine.host_memory_bandwidth, machine.host_memory_bandwidth / 4):
        shape = ModelShape(Wish(model, precision="bf16-true"), replace(machine, host_memory_bandwidth=bandwidth))
        rules, workers = shape.rules(0), machine.workers
        assert rules.updates is not None
        for size in (1, 4):
            costs = shape.costs(size, 2048)
            budget = None if machine.memory is None else int(MEMORY_SHARE * machine.memory)
            plan = partition_within(costs, workers, 2 * workers, None, budget)
            sides = [
                None,
                replace(rules.updates, piece_bytes=None),
                replace(rules.updates, piece_bytes=grad_buffers.PART),
            ]
            none, whole, parts = (
                1e3 * run_steps(plan, costs, workers, 2 * workers, replace(rules, updates=side), STEPS).period_s(3)
                for side in sides
            )
            tokens = f"{2 * workers * size * 2048:,}"
            tails = [f"+{tail - none:.0f}" for tail in (whole, parts)]
            table.add_row(f"{bandwidth / 1e9:.0f}", tokens, f"{none:,.0f}", *tails)
    return table


TRAVELS_AS_IT_IS = Reduction(None, lambda worker: TaskThread("unused"))


class Tail:
    """One layer, which was stepped once, and the link that its gradients come by."""

    def __init__(self, numbers: int, bandwidth: float) -> None:
        [self.device] = make_devices("cpu", [torch.device("cpu")], Emulation(bandwidth=bandwidth))
        module = nn.ParameterList([nn.Parameter(torch.zeros(numbers))])
        [self.layer] = host_layers({"embed": module}, self.device, Formats(), apart=False, mapped=())
        self._buckets = make_buckets([self.layer], self.layer.masters)
        self.layer.round({0: torch.bfloat16})
        self._updates = AsyncOptimizer(self._buckets, lambda: self._optimizer)
        self._buffers = [
            HostGradBuffers(self.layer, self.device, TRAVELS_AS_IT_IS) for _ in range(2)
        ]  # of the embedding, of the head
        self._arena = torch.ones(self._buffers[0].layout.nbytes, dtype=torch.uint8)
        self._optimizer = torch.optim.AdamW(self.layer.masters)
        self.seconds(whole=True)

    def seconds(self, *, whole: bool) -> float:
        """From the end of backward to the new weights."""
        grad_buffers.STREAMED = 2**60 if whole else 2**27
        head, embedding = (buffers.begin() for buffers in self._buffers)
        head.present = [True]
        readiness = GradReadiness(self._buckets)
        batch = StepGradients([embedding, head], [], 1.0, readiness)
        batch.differentiated(1.0)
        self._updates.offer(batch)
        self._updates.submit(None)
        on_device = DeviceGradSums(embedding, self._arena)
        on_device.present = [True]
        intraop_threads.release_intraop_threads()
        start = time.perf_counter()
        on_device.download(self.device.gradients_down, 0)
        readiness.passed(())
        self._updates.settle()
        return time.perf_counter() - start

    def close(self) -> None:
        self._updates.close()
        self.device.close()


def measure(numbers: int, turns: int) -> Table:
    """Both ways, for links of several speeds."""
    table = Table(title=f"AdamW, {numbers / 1e6:.0f} M parameters tied, measured")
    for column in ("download, ms", "whole, ms", "parts, ms", "parts / whole"):
        table.add_column(column, justify="right")
    fast = Tail(numbers, 1e15)
    alone = statistics.median(fast.seconds(whole=True) for _ in range(turns))
    fast.close()
    for times in (0.5, 1.0, 2.0):
        tail = Tail(numbers, 4 * numbers / (times * alone))
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(turns):
            for whole, seconds in taken.items():
                seconds.append(tail.seconds(whole=whole))
        tail.close()
        whole, parts = (1e3 * statistics.median(seconds) for seconds in taken.values())
        ratio = statistics.median(p / w for w, p in zip(taken[True], taken[False], strict=True))
        table.add_row(f"{1e3 * times * alone:.0f}", f"{whole:.0f}", f"{parts:.0f}", f"{ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_1_7b")
    parser.add_argument("--hardware", default="rtx4090x8")
    parser.add_argument("--numbers", type=int, default=48_000_000, help="parameters of the layer that is measured")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    console = Console()
    console.print(simulate(options.model, options.hardware))
    console.print(measure(options.numbers, options.turns))


if __name__ == "__main__":
    main()
