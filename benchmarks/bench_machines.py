"""What several machines send to each other in a step, and what ``network_dtype`` costs in accuracy.

Two processes on this machine train a stack of linear layers. The loopback device counts all bytes that they send. Run
it while nothing else uses the loopback device.

    python benchmarks/bench_machines.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH, LAYERS, STEPS = 1024, 8, 6
MACHINES = int(os.environ.get("WORLD_SIZE", 2))


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.sent: list[int] = []
        self.first: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.trainer.strategy.barrier()
        self.sent.append(loopback())

    def on_train_batch_end(self, *_: object) -> None:
        self.first = self.first or [p.detach().clone() for p in self.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def loopback() -> int:
    """Bytes that the loopback device has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def work(options: str) -> None:
    """Train on one of the machines, and print what was found."""
    from lightning_roundpipe import RoundPipeStrategy

    rank, module = int(os.environ["NODE_RANK"]), Stack()
    module.roundpipe_passive_hooks = True  # what it looks at is finished: both machines wait before
    before = [p.detach().clone() for p in module.parameters()]
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(8 * STEPS, WIDTH, generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, num_nodes=MACHINES, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        strategy=RoundPipeStrategy(num_microbatches=4, layers=["Sequential"], **json.loads(options)),
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8))
    module.sent.append(loopback())
    gradients = torch.cat([(a - b).flatten() for a, b in zip(before, module.parameters(), strict=True)])
    torch.save(gradients, os.environ["RESULT"] + str(rank))
    print(json.dumps({"sent": module.sent[-1] - module.sent[0]}))  # an update may end within the next step


def run(folder: Path, **options: object) -> tuple[float, Tensor]:
    """Return the bytes that all machines send in a step, and how the weights have moved."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(MACHINES)}
    variables["RESULT"] = f"{folder}/"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            env=os.environ | variables | {"NODE_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(MACHINES)
    ]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return results[0]["sent"] / STEPS, torch.load(folder / "0").detach()


def main() -> None:
    nbytes = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    least = 2 * (MACHINES - 1) / MACHINES * nbytes * MACHINES
    print(f"{MACHINES} machines, {nbytes / 1e6:.1f} MB of gradients: at least {least / 1e6:.1f} MB a step together")
    exact: Tensor | None = None
    with tempfile.TemporaryDirectory() as folder:
        for options in ({}, {"shard_optimizer": False}, {"network_dtype": "bfloat16"}):
            sent, moved = run(Path(folder), **options)
            exact = moved if exact is None else exact
            error = float((moved - exact).norm() / exact.norm())
            print(f"{options or 'default'}: {sent / 1e6:.1f} MB a step ({sent / least:.3f}), off by {error:.2e}")


if __name__ == "__main__":
    work(sys.argv[1]) if len(sys.argv) > 1 else main()
