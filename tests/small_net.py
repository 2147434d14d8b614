"""A small LightningModule whose layers and parameters lie where a test changes one thing of it."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import zoo
from harness import seeded
from torch import nn

WIDTH = zoo.WIDTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(self.act(self.inner(x)))


class Net(pl.LightningModule):
    """Five layers, and two parameters beside them for ``between``, which stands in front of the blocks and behind."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.arrange()

    def arrange(self):
        """What a case adds."""

    def between(self, h):
        return h

    def body(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x):
        return self.head(self.between(self.body(self.between(self.stem(x)))))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch["x"]), batch["y"]))

    def configure_optimizers(self):
        return zoo.modules.sgd([p for p in self.parameters() if p.requires_grad])


def all_of(self, h):
    """Uses both parameters, as ``between``."""
    return h * self.gain @ self.mix


def made(kind):
    """What ``kind`` makes; the same call gives the same weights."""
    with seeded(3):
        return kind()


def make(**methods):
    """A ``Net`` with other methods."""
    return made(type("Net", (Net,), methods))
