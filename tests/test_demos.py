"""Lightning's own example modules train as they do plainly. Their data, which would be downloaded, is random here.

Those with ReLUs and max pooling are compared in float64: in float32 some input lies within rounding of a kink on some
processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, ours, run
from lightning.pytorch.demos import LightningTransformer, boring_classes, lstm
from torch import Tensor

VOCABULARY = 50


def tokens(length: int = 12, samples: int = 6) -> list[tuple[Tensor, Tensor]]:
    texts = torch.randint(0, VOCABULARY, (3, samples, length + 1), generator=torch.Generator().manual_seed(0))
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def without_dropout(module: pl.LightningModule) -> pl.LightningModule:
    for part in module.modules():
        for name in vars(part).keys() & {"p", "dropout"}:
            if isinstance(getattr(part, name), float):
                setattr(part, name, 0.0)
    module.prepare_data = lambda: None  # type: ignore[method-assign]
    return module


def transformer() -> pl.LightningModule:
    return without_dropout(LightningTransformer(VOCABULARY)).double()


def text_lstm() -> pl.LightningModule:
    module = lstm.LightningLSTM(VOCABULARY)
    module.model = lstm.SimpleLSTM(VOCABULARY, ninp=16, nhid=16, nlayers=2)
    return without_dropout(module)


class ImageClassifier(pl.LightningModule):
    """Around the network of Lightning's MNIST examples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = boring_classes.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.nll_loss(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


def images() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shape = 4, 1, 28, 28
    return [(torch.randn(shape, generator=generator, dtype=torch.float64), torch.arange(4)) for _ in range(3)]


def vectors() -> list[Tensor]:
    return list(torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("make", "data", "microbatches"),
    [
        (boring_classes.BoringModel, vectors, 3),
        (boring_classes.ManualOptimBoringModel, vectors, 1),
        (boring_classes.DemoModel, vectors, 1),  # sums over samples, which no split into parts can know
        (lambda: without_dropout(ImageClassifier()).double(), images, 2),
        (transformer, tokens, 3),
        (text_lstm, tokens, 1),  # its state goes from batch to batch
    ],
    ids=["boring", "manual", "demo", "images", "transformer", "lstm"],
)
def test_training(make: Callable[[], pl.LightningModule], data: Callable[[], Any], microbatches: int) -> None:
    torch.manual_seed(0)
    module, batches = make(), data()
    plain = run("auto", module, batches)
    result = run(ours(num_microbatches=microbatches), module, batches, devices=2)
    assert_same(plain, result)


def test_with_their_own_data() -> None:
    """The whole of a boring model and data module: fit, validate, test, predict."""
    found = []
    for strategy in ("auto", ours()):
        torch.manual_seed(0)
        module, data = boring_classes.BoringModel(), boring_classes.BoringDataModule()
        limits = {f"limit_{kind}_batches": 3 for kind in ("train", "val", "test", "predict")}
        trainer = harness.trainer_of(strategy, devices=1 if strategy == "auto" else 2, **limits)
        trainer.fit(module, data)
        evaluated = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        found.append([dict(module.state_dict()), evaluated, trainer.predict(module, data)])
    harness.assert_tensors_same(*found)
