"""What it costs to find out whether parts of a batch are the whole: in the first batch, and afterwards.

A Llama of random weights on emulated devices, with ``microbatch_scope="auto"``. The comparison is timed beside the rest
of the first batch, which runs its microbatches one after another, and beside the median of the later ones.

    python benchmarks/bench_parts.py --microbatches 8 --samples 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.profile.parts_check import PartsCheck


class Tuned(pl.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=2048, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Seconds of each batch."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="of each microbatch")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    compared: list[float] = []
    real = PartsCheck.find_out

    def find_out(self: PartsCheck, models: Any) -> Any:
        began = time.perf_counter()
        verdict = real(self, models)
        compared.append(time.perf_counter() - began)
        assert verdict.parts is None and not verdict.why_not, verdict
        return verdict

    PartsCheck.find_out = find_out  # type: ignore[method-assign]
    ids = torch.randint(0, 2048, (args.microbatches * args.samples, args.tokens))
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu", devices=args.devices, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        strategy=RoundPipeStrategy(num_microbatches=args.microbatches),
    )  # fmt: skip
    batches: Any = [{"input_ids": ids, "labels": ids}] * 4
    trainer.fit(Tuned(args.width, args.layers), DataLoader(batches, batch_size=None))
    first, later = clock.seconds[0] - sum(compared), statistics.median(clock.seconds[1:])
    print(f"comparison {sum(compared):.2f} s, the rest of the first batch {first:.2f} s, later batches {later:.2f} s")
    print(f"comparison / first batch {sum(compared) / first:.3f}, later batches compare nothing")


if __name__ == "__main__":
    main()
