"""Language models whose code divides, or adds a bias, by what is the same for all samples train without a warning."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same, ours, run
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_roundpipe import RoundPipeWarning


def granite() -> Any:
    return GraniteForCausalLM(
        GraniteConfig(
            vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


class LanguageModel(pl.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded() -> list[dict[str, Tensor]]:
    found = []
    for _ in range(3):
        mask = (torch.arange(8) < torch.tensor([8, 6, 5, 8, 4, 7])[:, None]).long()
        ids = torch.randint(5, 60, (6, 8)) * mask
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


@pytest.mark.parametrize("make", [granite, t5])
def test_parts_are_trained_without_a_warning_of_their_loss(make: Any) -> None:
    torch.manual_seed(0)
    module, batches = LanguageModel(make().train()), padded()
    plain = run("auto", module, batches)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "roundpipe: in parts of the batch", RoundPipeWarning)
        result = run(ours(num_microbatches=3), module, batches, devices=2)
    assert_same(plain, result)
