"""Sparse tensors in layers and in the batch: adjacencies and bags of words, as in plain Lightning."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_plain, ours, run
from torch import Tensor

from lightning_roundpipe.engine.hints import Hints

MLP = zoo.make_module("mlp").model
ROLLED = torch.eye(zoo.WIDTH).roll(1, 0)
LAYOUTS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")


class Inside(zoo.PlainClassifier):
    """Has the matrix as a buffer of its layers."""

    def __init__(self, layout):
        super().__init__(copy.deepcopy(MLP))
        self.layout = layout

    def setup(self, stage):
        for block in self.model.blocks:
            block.register_buffer("matrix", LAYOUTS[self.layout](ROLLED), persistent=False)
            block.forward = functools.partial(_mixed, block)


def _mixed(block, h):
    return torch.sparse.mm(block.matrix, type(block).forward(block, h).T).T


class Bags(zoo.PlainClassifier):
    """The batch has its features in a sparse matrix, a row for each sample."""

    def loss_and_logits(self, batch):
        h = torch.sparse.mm(batch["words"], self.model.stem.weight.T) + self.model.stem.bias
        for block in self.model.blocks:
            h = block(h)
        logits = self.model.head(h)
        return F.cross_entropy(logits, batch["y"]), logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_layers(layout, monkeypatch):
    """And no word that they change."""
    said = []
    monkeypatch.setattr(Hints, "say", lambda self, key, text: said.append(text))
    monkeypatch.setattr(Hints, "warn", lambda self, key, text: said.append(text))
    module, batches = Inside(layout), zoo.make_batches("mlp", 3)
    assert_plain(module, batches, {"num_microbatches": 2, "layers": ["Linear", "ResidualBlock"]})
    assert not [text for text in said if "changes in every forward pass" in text]


@pytest.mark.parametrize("layout", ["csr"])
def test_in_the_batch(layout):
    module = Bags(copy.deepcopy(MLP))
    batches = [batch | {"words": LAYOUTS[layout](batch["x"].relu())} for batch in zoo.make_batches("mlp", 3)]
    assert_plain(module, batches)
    with pytest.raises(ValueError, match=r"batch\['words'\] is a sparse tensor"):
        run(ours(num_microbatches=2), module, batches, devices=2)


def test_gradients_of_an_embedding():
    """They are dense here; few optimizers take sparse ones."""
    model = torch.nn.Sequential(torch.nn.Embedding(24, 6, sparse=True), torch.nn.Linear(6, 5))
    module = zoo.PlainClassifier(model)
    module.make_optimizer = lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)
    batches = [{"x": torch.arange(4) + i, "y": torch.arange(4) % 5} for i in range(4)]
    assert_plain(module, batches, accumulate_grad_batches=2, watch=False)
