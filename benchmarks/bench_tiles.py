"""What tiles of tokens save and cost in a layer, on an emulated device: peak memory, and seconds of a step.

    python benchmarks/bench_tiles.py [tokens] [tile]

Two models of two layers, each as it is and in tiles: one of Llama-3.1-8B's shape at an eighth of its width, and a
mixture of experts of Qwen3-MoE's shape. Every call is a stage of its own, so that the peak is one call's.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaModel, Qwen3MoeConfig, Qwen3MoeModel

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.messages import gib

STEPS = 4
"""The first two check recomputations, and the plan is made after the first."""


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
    """Return the peak bytes of the device and the seconds of computing in the last step."""
    data = [torch.randn(1, tokens, module.width, generator=torch.Generator().manual_seed(0))] * STEPS
    plan = "forward 0 1; fused 2; backward 1 0; round 1"
    strategy = RoundPipeStrategy(token_tiles=tile, num_microbatches=1, plan=plan)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None))
    report = strategy.report()
    computing = [e for e in report["events"] if e["kind"] in ("forward", "recompute", "backward")]
    spent = sum(e["end_s"] - e["start_s"] for e in computing)
    return max(report["peak_device_bytes"]), spent


def main() -> None:
    warnings.simplefilter("ignore")
    given = [int(argument) for argument in sys.argv[1:]]
    tokens, tile = given if len(given) == 2 else (8192, 1024)
    for name, make in (("Llama, 1/8 of the width", llama), ("Qwen3-MoE, 1/8 of the width", experts)):
        found = {}
        for size in (None, tile):
            torch.manual_seed(0)
            found[size] = step(make(), tokens, size)
        (whole, before), (tiled, after) = found[None], found[tile]
        print(
            f"{name}, {tokens:,} tokens: {gib(whole)} and {before:.2f} s whole; {gib(tiled)} "
            f"({100 * tiled / whole:.0f} %) and {after:.2f} s ({after / before:.2f} times) in tiles of {tile:,}"
        )


if __name__ == "__main__":
    main()
