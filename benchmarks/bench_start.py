"""How long training takes to begin: the start beside plain Lightning's, and the first batch beside later ones.

The model is a narrow Qwen3 of 32 layers with LoRA on all linear layers, on emulated devices. Times are CPU seconds of
all threads, so that other work on the machine does not count. Garbage is collected before the first batch, and not
counted: a collection of all objects takes 0.3 s, and where it falls is chance.

    .venv/bin/python benchmarks/bench_start.py [--devices 1] [--batches 8]
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from common import Steps, parser_of, quiet, trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

LAYERS = 32


class Start(Steps):
    """Also notes when training begins, and collects garbage then."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began = self.clock()
        gc.collect()


class Adapted(pl.LightningModule):
    roundpipe_passive_hooks = True

    def __init__(self) -> None:
        super().__init__()
        shape = Qwen3Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=512, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = get_peft_model(Qwen3ForCausalLM(shape), LoraConfig(r=4, target_modules="all-linear"))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def measure(strategy: str, devices: int, batches: int) -> tuple[float, list[float]]:
    """Return the seconds from ``fit()`` to the start of training, and those of each batch."""
    watch, module = Start(clock=time.process_time), Adapted()
    fitter = trainer(strategy, devices, callbacks=watch)
    began = time.process_time()
    fitter.fit(module, DataLoader([torch.randint(0, 512, (64,)) for _ in range(batches)], batch_size=1))  # type: ignore[arg-type]
    return watch.began - began, watch.seconds


def main() -> None:
    options = parser_of(__doc__, devices=1, batches=8).parse_args()
    quiet()
    torch.set_num_threads(1)
    measure("auto", 1, 2)  # what libraries do once
    plain, _ = measure("auto", 1, options.batches)
    ours, seconds = measure("roundpipe", options.devices, options.batches)
    later = statistics.median(seconds[1:])
    print(f"start {ours:.2f} s, by plain Lightning {plain:.2f} s: {ours - plain:.2f} s more (goal: at most 2)")
    print(f"first batch {seconds[0]:.2f} s, later ones {later:.2f} s: ratio {seconds[0] / later:.2f} (goal: at most 3)")


if __name__ == "__main__":
    main()
