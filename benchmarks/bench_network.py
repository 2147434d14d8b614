"""How long a step of two machines takes over a network of a stated rate, beside what the planner simulates.

Two processes in network namespaces of this machine train a stack of layers that sleep, so that other work on the
machine hardly shows. Needs root, ``ip`` and /dev/net/tun.

    python benchmarks/bench_network.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from slow_network import SlowNetwork
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.schedule import Plan

WIDTH, LAYERS, MICROBATCHES, WORKERS, STEPS = 1024, 8, 4, 2, 8
FORWARD_S, BACKWARD_S = 0.03, 0.06
PLAN = "forward 0-1 2-3 4-5; fused 6-7; backward 4-5 2-3 0-1; round 4"
RATES = (50, 100)
"""Mbit/s of each machine."""
CONNECTIONS = (1, 2)
"""For gradients, and for weights."""
NBYTES = 4 * (WIDTH * WIDTH + WIDTH)


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Slept.apply(self.linear(x).tanh())
        return slept


class Stack(pl.LightningModule):
    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.began: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.began.append(time.monotonic())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def work(staleness: int, connections: int) -> None:
    """Train on one of the machines, and print the median seconds from step to step."""
    from lightning_roundpipe import RoundPipeStrategy
    from lightning_roundpipe.machines import peers

    peers.CONNECTIONS = connections
    torch.set_num_threads(1)
    module, machines = Stack(), int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=WORKERS, num_nodes=machines, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        strategy=RoundPipeStrategy(
            num_microbatches=MICROBATCHES, layers=["Layer"], plan=PLAN, staleness=staleness
        ),
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(MICROBATCHES * STEPS, WIDTH), MICROBATCHES))
    ends = module.began[2:]  # the first steps learn, and fill the pipeline
    print(json.dumps(statistics.median(b - a for a, b in pairwise(ends))))


def measured(network: SlowNetwork, machines: int, staleness: int, connections: int) -> float:
    """Return the seconds of a step."""
    processes = [
        subprocess.Popen(
            [*network.inside(rank), sys.executable, __file__, str(staleness), str(connections)],
            env=os.environ | network.variables | {"NODE_RANK": str(rank), "WORLD_SIZE": str(machines)},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(machines)
    ]  # fmt: skip
    found = [float(process.communicate()[0].splitlines()[-1]) for process in processes]
    return max(found)


def simulated(rate: float, machines: int, staleness: Any) -> float:
    """Return the seconds of a step by the planner, with the same sleeps and nothing else that takes time."""
    call = (FORWARD_S, BACKWARD_S, NBYTES, NBYTES, 0, 0, True)
    costs = Costs(tuple(CallCost(f"layers.{number}", *call) for number in range(LAYERS)))
    rules = Rules(staleness=staleness, network=Network(machines, rate, 1.0))
    run = run_steps(Plan.parse(PLAN), costs, WORKERS, MICROBATCHES, rules, STEPS)
    return run.period_s(STEPS - 3)


def main() -> None:
    machines = 2
    print(f"{machines} machines, {LAYERS * NBYTES / 1e6:.1f} MB of gradients, 5 ms of latency")
    names = " | ".join(map(str, CONNECTIONS))
    print(f"| Mbit/s | staleness | s on the network | s a step, simulated | with connections: {names} |")
    print("|" + " ---: |" * (4 + len(CONNECTIONS)))
    for rate in RATES:
        nbytes = rate * 1e6 / 8
        busy = Network(machines, nbytes, 1.0).wire_bytes(LAYERS * NBYTES) / nbytes
        network = SlowNetwork(machines, nbytes, 0.005)
        try:
            for staleness in (0, 1):
                found = [f"{measured(network, machines, staleness, connections):.2f}" for connections in CONNECTIONS]
                row = (rate, staleness, f"{busy:.2f}", f"{simulated(nbytes, machines, staleness):.2f}", *found)
                print("|", " | ".join(map(str, row)), "|", flush=True)
        finally:
            network.close()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else main()
