"""Plain PyTorch models whose layers follow one another."""

import torch.nn.functional as F
from torch import nn

from zoo.batches import vector_batch
from zoo.modules import PlainClassifier
from zoo.registry import WIDTH, entry


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


entry("mlp", vector_batch, PlainClassifier)(MLP)
