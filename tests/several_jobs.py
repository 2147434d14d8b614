"""What the processes of ``several_machines`` run: each job is a function of its arguments and a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import zoo
from harness import loader, ours, quiet, trainer_of
from torch import Tensor

RANK = int(os.environ.get("NODE_RANK", 0))
MACHINES = int(os.environ.get("WORLD_SIZE", 1))


def main(job: str, folder: str, arguments: str) -> None:
    torch.set_num_threads(1)
    result = globals()[job](Path(folder), **json.loads(arguments))
    torch.save(result, Path(folder) / f"result-{RANK}.pt")


def global_batches(name: str, count: int, samples: int) -> list[zoo.Batch]:
    """Batches whose targets are spread unevenly over their samples."""
    batches = zoo.make_batches(name, count, samples)
    for batch in batches:
        if "labels" in batch and batch["labels"].dim() == 2:
            batch["labels"][0, 1:] = -100
            batch["labels"][-1, ::2] = -100
    return batches


def part(batch: Any, rank: int, machines: int) -> Any:
    """The samples of one machine."""
    return {key: torch.tensor_split(value, machines)[rank] for key, value in batch.items()}


def with_optimizer(module: Any, name: str) -> Any:
    makes = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    module.configure_optimizers = lambda: makes[name]([p for p in module.parameters() if p.requires_grad])
    return module


class Losses(pl.Callback):
    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(torch.as_tensor(outputs["loss"] if isinstance(outputs, dict) else outputs).detach().clone())


class Looks(pl.Callback):
    """Looks at gradients, so the optimizer steps in ``optimizer_step``."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


def train(
    *,
    rank: int = RANK,
    machines: int = MACHINES,
    strategy: Any = None,
    model: str = "llama",
    lora: bool = False,
    optimizer: str = "adamw",
    steps: int = 3,
    samples: int = 8,
    microbatches: int | None = 4,
    devices: int = 2,
    blocking: bool = False,
    dropout: float = 0.0,
    even: bool = False,
    options: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Train on one machine's part of each batch; with ``machines=1``, on all of it.

    Args:
        strategy: another strategy than ours.
        microbatches: of all machines together; None: as many as each makes by default.
        blocking: whether a callback looks at gradients.
        even: whether each sample has the same number of targets.
    """
    module = with_optimizer(zoo.make_module(model, lora), optimizer)
    for inner in module.modules():
        if dropout and isinstance(inner, torch.nn.Linear):
            inner.register_forward_hook(lambda _, args, out: torch.nn.functional.dropout(out, dropout))
    batches = zoo.make_batches(model, steps, samples) if even else global_batches(model, steps, samples)
    parts = {} if microbatches is None else {"num_microbatches": microbatches // machines}
    losses = Losses()
    made = trainer_of(
        ours(**(parts | (options or {}))) if strategy is None else strategy,
        devices=devices,
        num_nodes=machines if strategy is None else 1,
        use_distributed_sampler=False,
        callbacks=[losses, *([Looks()] if blocking else [])],
        **trainer,
    )
    torch.manual_seed(1)
    with quiet():
        made.fit(module, loader([part(batch, rank, machines) for batch in batches]))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {"losses": losses.losses, "state": state, "steps": made.global_step}


def cases(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(**case) for case in cases]


if __name__ == "__main__":
    main(*sys.argv[1:])
