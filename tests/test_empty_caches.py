"""Models that make a key-value cache for each forward, whatever ``use_cache`` says: training goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, ours, run
from torch import Tensor, nn
from transformers import FlaubertConfig, FlaubertForSequenceClassification, XLMConfig, XLMForSequenceClassification
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lightning_roundpipe.config import RoundPipeError

WIDTH = 8


class Attention(nn.Module):
    """Attends to what its cache holds, as Hugging Face's attention does."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor, past: Any = None) -> Tensor:
        k, v = (lin(h).unsqueeze(1) for lin in (self.k, self.v))
        if past is not None:
            past = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
            k, v = past.update(k, v, self.index)
        return h + F.scaled_dot_product_attention(self.q(h).unsqueeze(1), k, v).squeeze(1)


class Net(pl.LightningModule):
    def __init__(self, attend: Callable[[Any, Tensor], Tensor], frozen: int = 0) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Linear(3, WIDTH).requires_grad_(not frozen)
        self.layers = nn.ModuleList(Attention(i).requires_grad_(i >= frozen) for i in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.attend(self, self.embed(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def through(net: Net, h: Tensor, past: Any) -> Tensor:
    for layer in net.layers:
        h = layer(h, past)
    return h


def paired(net: Net, h: Tensor) -> Tensor:
    return through(net, h, EncoderDecoderCache(DynamicCache(), DynamicCache()))


def listed(net: Net, h: Tensor) -> Tensor:
    for layer in net.layers:
        h = layer(h, past=DynamicCache())
    return h


def made_twice(net: Net, h: Tensor) -> Tensor:
    return through(net, through(net, h, DynamicCache()), DynamicCache())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 5, 3, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("microbatches, devices", [(1, 1), (3, 2)])
@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("attend", [paired, listed, made_twice])
def test_a_cache_of_each_forward(
    attend: Callable[[Any, Tensor], Tensor], frozen: int, microbatches: int, devices: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net(attend, frozen)
    trained = run(ours(num_microbatches=microbatches), module, batches(), devices=devices)
    assert_same(run("auto", module, batches()), trained)


def twice(net: Net, h: Tensor) -> Tensor:
    past = DynamicCache()
    through(net, h[:, :2], past)
    return through(net, h[:, 2:], past)


def prefixed(net: Net, h: Tensor) -> Tensor:
    past = DynamicCache()
    for layer in net.layers:
        past.update(h[:, None, :1] * 2, h[:, None, :1], layer.index)
    return through(net, h, past)


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("attend", [twice, prefixed])
def test_a_cache_whose_contents_are_read_is_refused(attend: Callable[[Any, Tensor], Tensor], frozen: int) -> None:
    with pytest.raises(RoundPipeError, match=r"layer 'layers.\d' is called with a DynamicCache in training"):
        run(ours(num_microbatches=2), Net(attend, frozen), batches())


class Classifier(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "config, model", [(XLMConfig, XLMForSequenceClassification), (FlaubertConfig, FlaubertForSequenceClassification)]
)
def test_xlm_and_flaubert(config: Any, model: Any) -> None:
    sizes = {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "summary_first_dropout": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Classifier(model(config(**sizes, **off)))
        data = [{"input_ids": torch.randint(5, 96, (6, 10)), "labels": torch.arange(6) % 2} for _ in range(3)]
    assert_same(run("auto", module, data), run(ours(num_microbatches=3), module, data, devices=2))
