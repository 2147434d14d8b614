"""Models whose layers share weights with the code between them, and two models in one module."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.batches import vector_batch
from zoo.modules import PlainClassifier
from zoo.plain import MLP, ResidualBlock
from zoo.registry import WIDTH, entry


class ScaledBlock(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma
        self.inner = ResidualBlock(WIDTH)

    def forward(self, x, scale):
        return scale * x + self.gamma * self.inner(x)


class SharedScales(nn.Module):
    """One LayerScale vector that all blocks hold; another that the code between them reads and hands to each."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        gamma = nn.Parameter(0.5 * torch.rand(WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.blocks = nn.ModuleList(ScaledBlock(gamma) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = self.stem(x)
        scale = torch.tanh(self.scale)
        for block in self.blocks:
            h = h + scale * block(h, self.scale)
        return self.head(h)


entry("shared_scales", vector_batch, PlainClassifier)(SharedScales)


class TwoModels(nn.Module):
    """Only holds them; how they meet is the LightningModule's own code."""

    def __init__(self):
        super().__init__()
        self.encoder = MLP()
        self.scorer = nn.Sequential(nn.Linear(5 + 8, WIDTH), nn.Tanh(), ResidualBlock(WIDTH), nn.Linear(WIDTH, 5))


class TwoModelModule(PlainClassifier):
    """Two submodels, a bare parameter, and a loss of two parts."""

    def __init__(self, model):
        super().__init__(model)
        self.encoder, self.scorer = model.encoder, model.scorer
        self.mixing = nn.Parameter(torch.randn(5))
        del self.model

    def loss_and_logits(self, batch):
        x = batch["x"]
        first = self.encoder(x) * self.mixing
        logits = self.scorer(torch.cat([first, x], -1)) + self.mixing.square() * first
        usual = self.scorer[0](torch.ones(len(x), 13))[:, :5]
        return F.cross_entropy(logits, batch["y"]) + 0.1 * F.mse_loss(first, usual), logits


entry("two_models", vector_batch, TwoModelModule)(TwoModels)
