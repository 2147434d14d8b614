"""What the engine costs: the time of a step through it over that of plain Lightning, both measured in one run.

All sides train the same random Llama on the same tokens with the same number of threads, each step on M microbatches.
Plain Lightning accumulates them one after another, the engine sends them through one emulated device. They are compared
in two pairs, because an engine with room for the whole model keeps every graph and recomputes nothing:

* recomputing: Hugging Face's activation checkpointing, against a plan with a stage for each decoder layer;
* not recomputing: no checkpointing, against the plan that the engine makes itself, a single fused stage.

What is left within a pair is interception, turns, threads, and copies of weights, gradients and boundary tensors. The
sides take turns, so that whatever else the machine does meets all of them. A pair whose losses differ, or a side that
does not recompute as said, ends the benchmark: its ratio would mean nothing.

    .venv/bin/python benchmarks/overhead.py [--layers 6] [--hidden 384] [--tokens 256] [--microbatches 4] [--repeat 3]
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy

SIZES = {"layers": 6, "hidden": 384, "tokens": 256, "microbatches": 4, "vocabulary": 4096, "steps": 4, "repeat": 3}
WARM_UP = 2
"""Steps that are not counted: the engine's first one makes the plan, its second one first follows it."""


@dataclass(frozen=True)
class Side:
    name: str
    engine: bool
    recomputes: bool


SIDES = [
    Side("plain Lightning, activation checkpointing", engine=False, recomputes=True),
    Side("roundpipe, a stage for each decoder layer", engine=True, recomputes=True),
    Side("plain Lightning", engine=False, recomputes=False),
    Side("roundpipe, one fused stage", engine=True, recomputes=False),
]


class Model(pl.LightningModule):
    def __init__(self, sizes: argparse.Namespace, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass
class Steps(pl.Callback):
    """Seconds and loss of each optimizer step, which is made of ``batches`` batches."""

    batches: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _start: float = 0.0
    _parts: list[float] = field(default_factory=list)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.batches == 0:
            self._start, self._parts = time.perf_counter(), []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._parts.append(float(outputs["loss"]))
        if (batch_idx + 1) % self.batches == 0:
            self.seconds.append(time.perf_counter() - self._start)
            # Lightning has divided the loss of an accumulated batch already.
            self.losses.append(sum(self._parts))


def plan_of(layers: int, microbatches: int) -> str:
    """The stages that recompute what Hugging Face checkpoints: the decoder layers, and not the final norm and the head.

    Calls are the embedding (0), the decoder layers, the norm and the head.
    """
    blocks = ["0-1", *(str(call) for call in range(2, layers + 1))]
    backward = " ".join(reversed(blocks))
    return f"forward {' '.join(blocks)}; fused {layers + 1}-{layers + 2}; backward {backward}; round {microbatches}"


def measure(side: Side, sizes: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of the steps that count, and the losses of all."""
    m = sizes.microbatches
    steps = Steps(1 if side.engine else m)
    plan = plan_of(sizes.layers, m) if side.recomputes else None
    strategy = RoundPipeStrategy(num_microbatches=m, plan=plan) if side.engine else None
    trainer = pl.Trainer(
        strategy=strategy or "auto",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=steps.batches,
        callbacks=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shape = ((WARM_UP + sizes.steps) * m, sizes.tokens)
    tokens = torch.randint(sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens), batch_size=m if side.engine else 1)
    trainer.fit(Model(sizes, checkpointing=side.recomputes and not side.engine), loader)
    if strategy is not None:
        check_recomputation(side, sizes, strategy.report())
    return steps.seconds[WARM_UP:], steps.losses


def check_recomputation(side: Side, sizes: argparse.Namespace, report: dict[str, Any]) -> None:
    done = {(e["call"], e["microbatch"]) for e in report["events"] if e["kind"] == "recompute"}
    blocks = {(call, m) for call in range(1, sizes.layers + 1) for m in range(sizes.microbatches)}
    if not (done >= blocks if side.recomputes else not done):
        raise SystemExit(f"{side.name}: recomputed {len(done)} calls under the plan {report['plan']!r}, not as said.")


def check_losses(losses: dict[str, list[float]]) -> None:
    """Every side trains the same model on the same tokens, so all must lose the same."""
    first = losses[SIDES[0].name]
    for name, other in losses.items():
        if not torch.allclose(torch.tensor(first), torch.tensor(other), rtol=1e-4):
            raise SystemExit(f"{name} trains something else: its losses are {other}, not {first}.")


def table_of(seconds: dict[str, list[list[float]]], sizes: argparse.Namespace) -> Table:
    title = (
        f"{sizes.layers} layers, width {sizes.hidden}, vocabulary {sizes.vocabulary}, {sizes.microbatches} "
        f"microbatches of {sizes.tokens} tokens, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("side")
    for heading in ("step, median (s)", "fastest (s)", "ratio of medians", "lowest to highest"):
        table.add_column(heading, justify="right")
    for plain, ours in zip(SIDES[::2], SIDES[1::2], strict=True):
        pairs = zip(seconds[plain.name], seconds[ours.name], strict=True)
        each = [statistics.median(b) / statistics.median(a) for a, b in pairs]
        all_plain, all_ours = sum(seconds[plain.name], []), sum(seconds[ours.name], [])
        ratio = statistics.median(all_ours) / statistics.median(all_plain)
        table.add_row(plain.name, f"{statistics.median(all_plain):.3f}", f"{min(all_plain):.3f}", "", "")
        spread = f"{min(each):.3f} to {max(each):.3f}"
        table.add_row(
            ours.name, f"{statistics.median(all_ours):.3f}", f"{min(all_ours):.3f}", f"{ratio:.3f}", spread,
            end_section=True,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--threads", type=int, help="intra-op threads of every side; default: torch's own")
    sizes = parser.parse_args()
    if sizes.microbatches < 2 or sizes.layers < 2:
        parser.error("a plan needs at least --microbatches 2 and --layers 2")
    if sizes.threads:
        torch.set_num_threads(sizes.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    console = Console()
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=sizes.repeat * len(SIDES))
        for _ in range(sizes.repeat):
            losses = {}
            for side in SIDES:
                progress.update(task, description=side.name)
                counted, losses[side.name] = measure(side, sizes)
                seconds[side.name].append(counted)
                gc.collect()
                progress.advance(task)
            check_losses(losses)
    console.print(table_of(seconds, sizes))


if __name__ == "__main__":
    main()
