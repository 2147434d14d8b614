"""Weights that user code exchanges by their ``.data``, around validation or between batches, as in plain training."""

import pytest
import torch
import zoo
from harness import assert_plain


class Averaged(zoo.PlainClassifier):
    """Averages its weights."""

    def __init__(self, model):
        super().__init__(model)
        self.averages = [p.detach().clone() for p in model.parameters()]

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for average, p in zip(self.averages, self.model.parameters(), strict=True):
                average.lerp_(p.detach(), 0.3)


class KeptAside(Averaged):
    """As the class does that is copied from one repository to the next: a dict of what was there."""

    def on_validation_start(self):
        self.aside = {}
        for (name, p), average in zip(self.model.named_parameters(), self.averages, strict=True):
            self.aside[name] = p.data
            p.data = average

    def on_validation_end(self):
        for name, p in self.model.named_parameters():
            p.data = self.aside[name]
        self.aside = {}


class KeptAsViews(Averaged):
    """What is kept are views, and what is put in place parts of one flat tensor."""

    def on_validation_start(self):
        self.aside = [p.data.view(-1) for p in self.model.parameters()]
        flat = torch.cat([average.reshape(-1) for average in self.averages])
        sizes = [p.numel() for p in self.model.parameters()]
        for p, part in zip(self.model.parameters(), flat.split(sizes), strict=True):
            p.data = part.view_as(p)

    def on_validation_end(self):
        for p, kept in zip(self.model.parameters(), self.aside, strict=True):
            p.data = kept.view_as(p)


class OfOneLayer(Averaged):
    """Two trained parameters of one layer, and two of different ones, change places for good."""

    def on_train_batch_end(self, *_):
        blocks = self.model.blocks
        for one, other in ((blocks[0].up, blocks[2].up), (blocks[1].norm, blocks[1].norm)):
            one.weight.data, other.weight.data = other.weight.data, one.weight.data
        norm = blocks[1].norm
        norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


class EachBatch(Averaged):
    """As Lookahead does: slow weights now and then, of which a training step is made."""

    def on_train_batch_start(self, *_):
        for p, average in zip(self.model.parameters(), self.averages, strict=True):
            p.data, average.data = average.data, p.data


@pytest.mark.parametrize("kind", [KeptAside, KeptAsViews, OfOneLayer, EachBatch])
def test_equals_plain(kind):
    module = kind(zoo.make_module("mlp").model)
    batches, held_out = zoo.make_batches("mlp", count=5, samples=8), zoo.make_batches("mlp", count=2, seed=9)
    options = {"val_batches": held_out, "val_check_interval": 2}
    plain, other = assert_plain(module, batches, {"num_microbatches": 2}, **options)
    for mine, its in zip(plain.module.averages, other.module.averages, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
