"""Outputs that Hugging Face models collect by hooks, which the first forward registers on modules inside layers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same, ours, run
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    SEWDConfig,
    SEWDForSequenceClassification,
)

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {"vocab_size": 96, "pad_token_id": 0, "max_position_embeddings": 32, "attn_implementation": "eager"}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Distilling(pl.LightningModule):
    """Adds a term over what the model collects to its loss, as distillation does."""

    def __init__(self, model: nn.Module, collected: str) -> None:
        super().__init__()
        self.model, self.collected = model, collected

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch, **{f"output_{self.collected}": True})
        loss: Tensor = out.loss + sum(value.square().mean() for value in out[self.collected])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def text(model: Any, config: Any, **more: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    batches = [{"input_ids": torch.randint(5, 96, (6, 10)), "labels": torch.arange(6) % 2} for _ in range(2)]
    return model(config(**SIZES, **TEXT, **more)), batches


def speech() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Its softmax is an autograd.Function of its own."""
    off = dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"), 0.0)
    front = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_conv_pos_embedding_groups": 4}
    more = {"layerdrop": 0.0, "final_dropout": 0.0, "feature_layer_norm_eps": 1e-5, "classifier_proj_size": 16}
    config = SEWDConfig(**SIZES, **off, **front, **more, apply_spec_augment=False, num_conv_pos_embeddings=8)
    batches = [{"input_values": torch.randn(6, 400), "labels": torch.arange(6) % 2} for _ in range(2)]
    return SEWDForSequenceClassification(config), batches


@pytest.mark.parametrize(
    "make, collected",
    [
        (lambda: text(BertForSequenceClassification, BertConfig, **OFF), "attentions"),
        (speech, "hidden_states"),
    ],
)
def test_a_loss_over_them(make: Any, collected: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batches = make()
    module = Distilling(model, collected)
    assert_same(run("auto", module, batches), run(ours(num_microbatches=3), module, batches, devices=2))
