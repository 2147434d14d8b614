"""What tiles of tokens save and cost in a layer, on an emulated device: peak memory, and the processor's seconds.

    OMP_NUM_THREADS=1 python benchmarks/bench_tiles.py [tokens] [tile]

Two models of two layers, one of Llama-3.1-8B's shape at an eighth of its width, and a mixture of experts of Qwen3-MoE's
shape. Every call is a stage of its own, so that the peak is one call's. They run as they are and in tiles, one after
another, several times in turn: the ratios are medians over the turns, so that other work on the machine changes little.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from common import Stopwatch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaModel, Qwen3MoeConfig, Qwen3MoeModel

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.messages import gib

STEPS = 5
CHECKED = 3
"""Of them: the first two check recomputations, and the plan is made after the first."""
TURNS = 3


class TwoLayers(pl.LightningModule):
    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.width = width

    def training_step(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.model(inputs_embeds=hidden).last_hidden_state.pow(2).mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def llama() -> TwoLayers:
    config = LlamaConfig(
        vocab_size=8, hidden_size=512, intermediate_size=1792, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=128, max_position_embeddings=2**17,
    )  # fmt: skip
    return TwoLayers(LlamaModel(config), 512)


def experts() -> TwoLayers:
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=256, intermediate_size=768, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=64, num_experts=16, num_experts_per_tok=8,
        max_position_embeddings=2**17,
    )  # fmt: skip
    return TwoLayers(Qwen3MoeModel(config), 256)


def step(module: TwoLayers, tokens: int, tile: int | None) -> tuple[int, float]:
    """Return the peak bytes of the device and the processor's seconds of the fastest step after the checked ones."""
    data = [torch.randn(1, tokens, module.width, generator=torch.Generator().manual_seed(0))] * STEPS
    plan = "forward 0 1; fused 2; backward 1 0; round 1"
    strategy = RoundPipeStrategy(token_tiles=tile, num_microbatches=1, plan=plan)
    watch = Stopwatch(clock=time.process_time)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None))
    return max(strategy.report()["peak_device_bytes"]), min(watch.seconds[CHECKED:])


def main() -> None:
    warnings.simplefilter("ignore")
    given = [int(argument) for argument in sys.argv[1:]]
    tokens, tile = given if len(given) == 2 else (8192, 1024)
    for name, make in (("Llama, 1/8 of the width", llama), ("Qwen3-MoE, 1/8 of the width", experts)):
        turns = []
        for _ in range(TURNS):
            torch.manual_seed(0)
            turns.append([step(make(), tokens, size) for size in (None, tile)])
        whole, tiled = (max(turn[i][0] for turn in turns) for i in range(2))
        longer = statistics.median(turn[1][1] / turn[0][1] for turn in turns)
        print(
            f"{name}, {tokens:,} tokens: {gib(whole)} whole, {gib(tiled)} ({100 * tiled / whole:.0f} %) in tiles of "
            f"{tile:,}, which take {longer:.3f} times as long"
        )


if __name__ == "__main__":
    main()
