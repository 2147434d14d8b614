"""Models that keep something (statistics, norms, a state that is handed on), and one that leaves layers out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from zoo.batches import sequence_batch, vector_batch, voting_batch
from zoo.modules import PlainClassifier, Voting
from zoo.plain import MLP
from zoo.registry import WIDTH, entry


class NormedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + F.relu(self.norm(self.up(x)))


class BatchNormMLP(nn.Module):
    """Batch norm inside layers, and one that is a layer of its own.

    Each sample is several rows: over two or three of them batch norm would make noise of rounding.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = self.norm(self.stem(x.flatten(0, 1)))
        for block in self.blocks:
            h = block(h)
        return self.head(h).view(*x.shape[:2], -1).mean(1)


entry("batch_norm", sequence_batch, PlainClassifier, coupled=True)(BatchNormMLP)


class SpectralBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class SpectralNorm(MLP):
    """Each forward in training goes on with the power iteration, so every microbatch sees another weight."""

    def __init__(self):
        super().__init__()
        self.stem = spectral_norm(self.stem)
        self.blocks = nn.ModuleList(SpectralBlock() for _ in range(2))


entry("spectral_norm", vector_batch, PlainClassifier, coupled=True)(SpectralNorm)


class Recurrent(nn.Module):
    """Two recurrent layers between others; the second starts from the state that the first ends with."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.middle = nn.Linear(16, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        h, (state, cell) = self.lstm(torch.tanh(self.stem(x)))
        h, last = self.gru(torch.tanh(self.middle(h)), state[-1:] + cell[:1])
        return self.head(torch.cat([h.mean(1), last[0]], -1))


entry("recurrent", sequence_batch, PlainClassifier)(Recurrent)


class LayerDrop(MLP):
    """Leaves out the blocks that most samples want left out: another subset in every microbatch."""

    def forward(self, x, keep):
        h = self.stem(x)
        for block, wanted in zip(self.blocks, keep.float().mean(0) > 0.5, strict=True):
            if wanted:
                h = block(h)
        return self.head(h)


entry("layer_drop", voting_batch, Voting, coupled=True)(LayerDrop)
