"""``trainer.validate`` of a model that returns its loss, on one emulated device and on four: layers that take time.

The model is a narrow Llama with as many layers as the main job's. Each layer sleeps for a time in proportion to its
weights, once for each sequence, so that four devices work at once even on two cores. As in SmolLM2-135M, the output
layer has eight times the weights of another one.

    .venv/bin/python benchmarks/bench_evaluation.py [--layer 0.02] [--batches 64]
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import lightning.pytorch as pl
import torch
from common import quiet, trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import emulated_work

LAYERS, SEQUENCES, TOKENS, CLASSES, WIDTH = 30, 1, 16, 784, 16
HEAD = 8.0
"""Weights of the output layer, in weights of a layer."""


class Layer(LlamaDecoderLayer):
    """A layer that takes ``seconds`` for each sequence."""

    seconds = 0.0

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        emulated_work(self.seconds * len(hidden_states))
        return super().forward(hidden_states, **kwargs)


class Head(nn.Linear):
    seconds = 0.0

    def forward(self, input: Tensor) -> Tensor:
        emulated_work(HEAD * self.seconds * len(input))
        return super().forward(input)


class Validated(pl.LightningModule):
    """Notes how long validation takes."""

    def __init__(self, layer_s: float) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        for layer in self.model.model.layers:
            layer.__class__, layer.seconds = Layer, layer_s
        self.model.lm_head.__class__, self.model.lm_head.seconds = Head, layer_s
        self.seconds = 0.0

    def on_validation_epoch_start(self) -> None:
        self.seconds -= time.perf_counter()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch).loss)

    def on_validation_epoch_end(self) -> None:
        self.seconds += time.perf_counter()


def measure(devices: int, batches: int, layer_s: float) -> tuple[float, float]:
    """Return the seconds of all batches, and the validated loss."""
    torch.manual_seed(0)
    module = Validated(layer_s)
    data = torch.randint(CLASSES, (batches, SEQUENCES, TOKENS))
    loaded = torch.utils.data.DataLoader(list(data), batch_size=None)
    gc.collect()  # a full collection takes 0.3 s
    (result,) = trainer(RoundPipeStrategy(), devices).validate(module, loaded, verbose=False)
    return module.seconds, result["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", type=float, default=0.02, help="seconds of a layer for a sequence")
    parser.add_argument("--batches", type=int, default=64)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    with console.status("one device"):
        one, _ = measure(1, options.batches, options.layer)
    with console.status("four devices"):
        four, loss = measure(4, options.batches, options.layer)
    table = Table(title=f"validation, {options.batches} batches of {SEQUENCES} sequences, loss {loss:.4f}")
    for heading in ("devices", "seconds", "times as fast"):
        table.add_column(heading, justify="right")
    table.add_row("1", f"{one:.2f}", "1.00")
    table.add_row("4", f"{four:.2f}", f"{one / four:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
