"""Modules whose training_step puts `torch.utils.checkpoint` around layers and the code between them."""

import torch
import zoo
from harness import Learner, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from traps import Block

KINDS = {"reentrant": True, "not reentrant": False}


class Drops(Block):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return F.dropout(super().forward(x), self.dropout)


class Net(Learner, optimizer=torch.optim.AdamW, lr=0.01):
    """A stem, three blocks and a head, with code of its own between them."""

    def __init__(self, reentrant, dropout=0.0):
        """``reentrant``: the kind of checkpoints; None: there are none. ``dropout`` is that of all code."""
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.blocks = nn.ModuleList(Drops(dropout) for _ in range(3))
        self.norm_scale = nn.Parameter(torch.ones(zoo.WIDTH))
        self.head = nn.Linear(zoo.WIDTH, 5)
        self.dropout = dropout
        self.drop = nn.Dropout(dropout)

    def again(self, function, *args):
        if self.reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def step(self, x, y):
        raise NotImplementedError

    def two(self, h):
        h = self.drop(self.blocks[0](h))
        return self.blocks[1](h * torch.sigmoid(h)).tanh() * self.norm_scale

    def loss(self, h, y):
        logits = self.head(torch.tanh(h) * self.norm_scale)
        return F.cross_entropy(F.dropout(logits, self.dropout) * torch.sigmoid(logits), y)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch["x"], batch["y"])
        self.log("loss", loss)
        return loss


class HeadAndLoss(Net):
    def step(self, x, y):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.again(self.loss, h, y)


class TwoBlocks(Net):
    def step(self, x, y):
        h = self.again(self.two, self.stem(x))
        return self.loss(self.blocks[2](h), y)


class OneBlockTwice(Net):
    """In the same checkpoint, so that its calls draw other numbers."""

    def step(self, x, y):
        def both(h):
            return self.blocks[0](torch.sin(self.blocks[0](h.sin())))

        h = self.again(both, self.stem(x))
        return self.loss(self.blocks[2](h), y)


class Everything(Net):
    """The whole body. A reentrant checkpoint needs an input that requires grad."""

    def step(self, x, y):
        def body(x):
            return self.blocks[2](self.two(self.stem(x)).relu())

        return self.loss(self.again(body, x.requires_grad_()), y)


class Nested(Net):
    def step(self, x, y):
        h = self.again(lambda h: self.blocks[2](self.again(self.two, h)).sin(), self.stem(x))
        return self.again(self.loss, h, y)


PLACES = [HeadAndLoss, TwoBlocks, OneBlockTwice, Everything, Nested]


def build(place, kind="", **options):
    with seeded(5):
        return place(KINDS.get(kind), **options)


def batches():
    return zoo.make_batches("mlp", count=4, samples=8)
