"""Host memory of full fine-tuning at its peak, against what it should be.

By design it is what `roundpipe-plan` counts: `planning.memory.host_items`.

On a machine without a GPU the process itself and the emulated devices come on top, and what a layer takes while it
computes. What is measured beyond that sum is user code (the loss is computed there) and what the allocator keeps.

    .venv/bin/python benchmarks/bench_memory.py [--steps 6] [--optimizer_state int8]
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from common import batches, parser_of, quiet, show, trainer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.config import OPTIMIZER_STATES, REDUCE_DTYPES
from lightning_roundpipe.devices.host_memory import forget_peak, peak_bytes
from lightning_roundpipe.heap import give_back
from lightning_roundpipe.planning.memory import Item, Parameters, host_items

MIB = 2**20


def resident() -> int:
    """Bytes of the process now."""
    return int(psutil.Process().memory_info().rss)


def trimmed() -> int:
    """The same without what was freed and the allocator keeps."""
    gc.collect()
    give_back()
    return resident()


class Growth(pl.Callback):
    """Resident bytes after each step, and at the end: of the process, and of what emulated devices count."""

    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        self.after: list[int] = []
        self.at_rest = self.on_devices = 0
        self.planned: list[Item] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(resident())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at_rest = trimmed()
        engine = trainer.strategy._engine
        self.on_devices = sum(device.resident_bytes() for device in engine.context.pool.devices)
        options, learned = engine.context.options, engine.context.learned
        trained = sum(p.numel() for p in trainer.lightning_module.parameters())
        known = Parameters(trained, 0, 2, optimizer_state=options.optimizer_state, shares=True, by_layer=True)
        window = trainer.accumulate_grad_batches
        self.planned = host_items(learned.plan, learned.costs, known, len(engine.context.pool.workers), window)


class Full(pl.LightningModule):
    """A model of random weights, all of which are trained."""

    roundpipe_passive_hooks = True

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32_000, hidden_size=hidden, intermediate_size=27 * hidden // 10, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config)

    def configure_model(self) -> None:
        if self.model.device.type == "meta":
            self.model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.normal_(0.0, 0.02)
            self.model.model.rotary_emb.__init__(config=self.model.config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def full(options: argparse.Namespace) -> None:
    """All weights of a model, with AdamW."""
    fit_full(64, 2, 2, options)  # all that is imported and started once
    before = trimmed()
    forget_peak()
    module, strategy, growth = fit_full(options.hidden, options.layers, options.steps, options)
    most = peak_bytes()
    report = strategy.report()
    trained = sum(p.numel() for p in module.parameters())
    design = [(item.name, item.nbytes) for item in growth.planned]
    activations = sum(size for name, size in design if name.startswith("boundary"))
    apart = [
        ("process before the model", before),
        ("memory of the two emulated devices", sum(report["peak_device_bytes"])),
        ("what their layers take while they compute: the peak over the steps' ends", most - max(growth.after)),
    ]
    show_memory(f"full fine-tuning of {trained / 1e6:.1f} M parameters, {report['plan']}", design, apart, most)
    own = most - sum(size for _, size in apart) - activations
    print(f"bytes a parameter at the peak, beside activations, process and devices: {own / trained:.2f}")
    rest = growth.at_rest - growth.on_devices - before
    sizes = f"{growth.at_rest / MIB:,.0f} MiB, of which the devices hold {growth.on_devices / MIB:,.0f}"
    print(f"at the end, when no layer computes and free memory was given back: {rest / trained:.2f} ({sizes})")
    print("resident after each step (MiB): " + " ".join(f"{size / MIB:,.0f}" for size in growth.after))


def fit_full(
    hidden: int, layers: int, steps: int, options: argparse.Namespace
) -> tuple[Full, RoundPipeStrategy, Growth]:
    """Train a model of this shape on two emulated devices, a sequence a microbatch."""
    module, growth = Full(hidden, layers), Growth()
    emulation = {"poison": True}  # or pages of a device's memory would count that were never touched
    strategy = RoundPipeStrategy(
        memory_budget=options.budget, optimizer_state=options.optimizer_state, reduce_dtype=options.reduce_dtype,
        emulation=emulation,
    )  # fmt: skip
    tokens = torch.randint(0, 32_000, (options.window * steps, options.tokens))
    trainer(
        strategy, 2, precision=options.precision, callbacks=growth, accumulate_grad_batches=options.window
    ).fit(module, batches(tokens, 1))  # fmt: skip
    return module, strategy, growth


def show_memory(title: str, design: list[tuple[str, int]], apart: list[tuple[str, int]], most: int) -> None:
    """Print what there is by design, what comes on top of it here, and what was measured."""
    by_design = sum(size for _, size in design)
    should = by_design + sum(size for _, size in apart)
    sums = [("with these", should), ("measured at the peak", most)]
    rows = [(name, f"{size / MIB:,.0f}") for name, size in (*design, ("by design", by_design), *apart, *sums)]
    show(f"Host memory of {title}, MiB", ("", "MiB"), [*rows, ("ratio", f"{most / should:.2f}")])


def main() -> None:
    parser = parser_of(__doc__, steps=3, hidden=1280, layers=20, tokens=64)
    parser.add_argument("--budget", default="600MiB")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--optimizer_state", default="fp32", choices=OPTIMIZER_STATES)
    parser.add_argument("--reduce_dtype", choices=REDUCE_DTYPES)
    parser.add_argument("--window", type=int, default=4, help="batches of a window")
    options = parser.parse_args()
    quiet()
    full(options)


if __name__ == "__main__":
    main()
