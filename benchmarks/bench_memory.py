"""Host memory of training at its peak, part by part, against what `roundpipe-plan` counts.

On emulated devices, workers' memory is the host's as well. What they count (arenas, activations, saved tensors) is
subtracted at each moment. What is left of them is what a layer computes with meanwhile, such as gradients on their way
into an arena. So the model has many small layers, and that is little beside the rest, as in large models.

All larger blocks are mapped alone (`map_blocks`), as those of large models are: freed ones go back to the system. On
the heap of the C library, beside what devices compute with, they would leave gaps.

    .venv/bin/python benchmarks/bench_memory.py [--optimizer_state bf16 --reduce_dtype bfloat16]
    .venv/bin/python benchmarks/bench_memory.py --lora [--quantization nf4] --hidden 2048 --layers 24
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import batches, parser_of, quiet, show, trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.config import OPTIMIZER_STATES, REDUCE_DTYPES
from lightning_roundpipe.heap import give_back
from lightning_roundpipe.memory.grad_buffers import GradientPool
from lightning_roundpipe.model.quantize import quantize
from lightning_roundpipe.model.quantized import is_packed, weights_in
from lightning_roundpipe.planning.memory import Item, Parameters, host_items, process_bytes

MIB = 2**20
VOCABULARY = 8_000

_M_MMAP_THRESHOLD = -3
"""The constant of glibc's malloc.h."""


def map_blocks() -> None:
    """Map each block of 64 KiB or more alone, whatever was freed before."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def resident() -> int:
    """Bytes of the process now that are no file's."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * sum(map(int, found))


def trimmed() -> int:
    """The same without what was freed and the allocator keeps."""
    gc.collect()
    give_back()
    return resident()


class Growth(pl.Callback):
    """Samples the host's memory without that of devices while a run trains.

    Attributes:
        most: the most bytes.
        after: bytes after each batch.
        gradients: the most bytes that the pool of gradients had after the first window.
        parts: bytes of weights and moments at the end, by the first word of their row in the plan.
        planned: what the plan counts.
    """

    roundpipe_passive_hooks = True

    def __init__(self, before: int = 0) -> None:
        self.before, self.most, self.gradients = before, 0, 0
        self.after: list[int] = []
        self.parts: dict[str, int] = {}
        self.planned: list[Item] = []
        self._over = threading.Event()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._engine = trainer.strategy._engine
        self._sampling = ThreadPoolExecutor(1).submit(self._sample)

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self._host_bytes())
            if self._engine.context.gradients.pool.keeps:
                self.gradients = max(self.gradients, held(self._engine.context.gradients.pool))

    def _host_bytes(self) -> int:
        on_devices = sum(device.resident_bytes() for device in self._engine.context.pool.devices)
        return resident() - on_devices - self.before

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(self._host_bytes())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._over.set()
        self._sampling.result()  # raises what ended it
        context, model = self._engine.context, self._engine.model
        trained, frozen, packed = counts(trainer.lightning_module)
        flats = [flat for layer in model.layers for flat in layer.weights.flats]
        of_frozen = sum(flat.source.nbytes for flat in flats if not flat.trained)
        known = Parameters(
            trained, frozen, 2, optimizer_state=context.options.optimizer_state, shares=True, by_layer=True,
            process=process_bytes(0), packed=packed, packed_bytes=packed and of_frozen - 2 * (frozen - packed),
            packed_as="packed",
        )  # fmt: skip
        window, workers = trainer.accumulate_grad_batches, len(context.pool.workers)
        self.planned = host_items(context.learned.plan, context.learned.costs, known, workers, window)
        states = trainer.optimizers[0].state.values()
        self.parts = {
            "trained": sum(flat.buffer.nbytes for flat in flats if flat.trained),
            "frozen": of_frozen,
            "AdamW's": sum(value.nbytes for own in states for key, value in own.items() if key != "step"),
        }


def counts(module: pl.LightningModule) -> tuple[int, int, int]:
    """Trained weights, frozen ones, and those of them in few bits."""
    every = list(module.parameters())
    kinds = ([p for p in every if p.requires_grad], [p for p in every if not p.requires_grad], filter(is_packed, every))
    trained, frozen, packed = (sum(map(weights_in, kind)) for kind in kinds)
    return trained, frozen, packed


def held(pool: GradientPool) -> int:
    """Bytes of the pool's blocks, used or not."""
    every = (pool._arriving, pool._landing, pool._wide)
    return sum(blocks.held + sum(block.nbytes for block in list(blocks._given)) for blocks in every)


class Full(pl.LightningModule):
    """A model of random weights, all of which are trained, or adapters on bf16 weights."""

    roundpipe_passive_hooks = True

    def __init__(self, hidden: int, layers: int, *, lora: bool = False, quantization: str | None = None) -> None:
        super().__init__()
        self._lora, self._quantization = lora, quantization
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=27 * hidden // 10, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config).to(torch.bfloat16 if lora else torch.float32)

    def configure_model(self) -> None:
        if self.model.device.type == "meta":
            self.model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.normal_(0.0, 0.02)
            self.model.model.rotary_emb.__init__(config=self.model.config)
            if self._quantization:
                self.model = quantize(self.model, self._quantization)
            if self._lora:
                self.model = get_peft_model(self.model, LoraConfig(target_modules="all-linear"))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-4, fused=True)


def measure(options: argparse.Namespace) -> None:
    """Train a model, and print its parts as planned and as measured."""
    fit(64, 2, 2, options, Growth())  # all that is imported and started once
    growth = Growth(trimmed())
    module, strategy = fit(options.hidden, options.layers, options.steps, options, growth)
    trained, frozen, _ = counts(module)
    growth.parts |= {"gradients": growth.gradients, "the": growth.before}
    most = growth.before + growth.most
    rows, planned = [], sum(item.nbytes for item in growth.planned)
    first = any("first window" in item.name for item in growth.planned)
    for item in growth.planned:
        kind = item.name.split(" ")[0]
        found = 0 if first and kind == "gradients" else growth.parts.pop(kind, 0)
        rows.append((item.name, f"{item.nbytes / MIB:,.0f}", f"{found / MIB:,.0f}" if found else ""))
    rows.append(("together, and the peak", f"{planned / MIB:,.0f}", f"{most / MIB:,.0f}"))
    rows.append(("ratio", "", f"{most / planned:.3f}"))
    title = f"{trained / 1e6:,.1f} M trained and {frozen / 1e6:,.1f} M frozen weights, {options.precision}"
    show(f"Host memory, MiB: {title}", ("", "planned", "measured"), rows)
    print(strategy.report()["plan"])
    print(f"bytes a trained weight at the peak, without the process: {growth.most / trained:.2f}")
    print("after each batch (MiB): " + " ".join(f"{size / MIB:,.0f}" for size in growth.after))


def fit(
    hidden: int, layers: int, steps: int, options: argparse.Namespace, growth: Growth
) -> tuple[Full, RoundPipeStrategy]:
    """Train a model of this shape on two emulated devices, a sequence a microbatch."""
    module = Full(hidden, layers, lora=options.lora, quantization=options.quantization)
    emulation = {"poison": True}  # or pages of a device's memory would count that were never touched
    strategy = RoundPipeStrategy(
        memory_budget=options.budget, optimizer_state=options.optimizer_state, reduce_dtype=options.reduce_dtype,
        emulation=emulation,
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (options.window * steps, options.tokens))
    trainer(
        strategy, 2, precision=options.precision, callbacks=growth, accumulate_grad_batches=options.window
    ).fit(module, batches(tokens, 1))  # fmt: skip
    return module, strategy


def main() -> None:
    parser = parser_of(__doc__, steps=4, hidden=512, layers=64, tokens=64)
    parser.add_argument("--budget", default="200MiB")
    parser.add_argument("--precision", default="bf16-true", choices=("bf16-true", "bf16-mixed"))
    parser.add_argument("--optimizer_state", default="fp32", choices=OPTIMIZER_STATES)
    parser.add_argument("--reduce_dtype", choices=REDUCE_DTYPES)
    parser.add_argument("--window", type=int, default=4, help="batches of a window")
    parser.add_argument("--lora", action="store_true", help="train adapters on bf16 weights")
    parser.add_argument("--quantization", choices=("nf4", "fp4", "int8"), help="of the weights under adapters")
    options = parser.parse_args()
    quiet()
    map_blocks()
    measure(options)


if __name__ == "__main__":
    main()
