"""Models whose code between the layers does what such code does: in place, with weights, across distances."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.batches import VOCAB, causal_batch, unlabelled_batch, vector_batch
from zoo.modules import PlainClassifier, PlainLM, ZooModule
from zoo.plain import MLP, ResidualBlock
from zoo.registry import WIDTH, entry


class Branch(nn.Module):
    """A branch that does not save its own input, so plain autograd allows ``h += branch(h)``."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(torch.tanh(x))


class InPlace(nn.Module):
    """Residuals, scales and biases added in place: on a layer's output, on a layer's input, on a slice of one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Branch(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = self.stem(x)
        h *= 1.5  # an output, before anyone has taken it
        for i, block in enumerate(self.blocks):
            if i % 2:
                branch = block(h)
                branch.mul_(0.5).add_(0.1)  # an output
                h = h + branch
            else:
                h += block(h)  # an input, after the call; for i > 0 it is not a layer's output
        h[:, :4] += 0.25
        return self.head(h)


entry("inplace", vector_batch, PlainClassifier, layers=("Linear", "Branch"))(InPlace)


class UserCodeParameters(nn.Module):
    """Parameters that no layer owns: read by the code between the layers, one of them twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = self.stem(x) + self.token
        for block in self.blocks:
            h = block(h * self.gain)
        return self.head(F.linear(h, self.mixing) * self.gain)


class UserCodeParameterModule(PlainClassifier):
    """A LightningModule that has a bare parameter itself, too."""

    def __init__(self, model):
        super().__init__(model)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def loss_and_logits(self, batch):
        logits = self.model(batch["x"]) / self.temperature
        return F.cross_entropy(logits, batch["y"]), logits


entry("glue_parameters", vector_batch, UserCodeParameterModule)(UserCodeParameters)


class WeightReadOutside(nn.Module):
    """The output layer is the embedding's weight, read by the code between the layers; the embedding is called too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.embed.weight)


entry("weight_outside", causal_batch, PlainLM)(WeightReadOutside)


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


class TwoModelModule(ZooModule):
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

    def targets(self, batch):
        return len(batch["y"])


entry("two_models", vector_batch, TwoModelModule)(TwoModels)


class Heads(nn.Module):
    """Returns a dict of tensors."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(WIDTH, 4)
        self.spread = nn.Linear(WIDTH, 4)

    def forward(self, h):
        return {"mean": self.mean(h), "spread": F.softplus(self.spread(h)), "norm": h.detach().norm(dim=-1)}


class Splitting(nn.Module):
    """Takes and returns a pair."""

    def __init__(self):
        super().__init__()
        self.inner = ResidualBlock(WIDTH)

    def forward(self, pair):
        a, b = pair
        h = self.inner(a + b)
        return h, torch.tanh(h) * b


@dataclass
class Encoded:
    """What a model returns; user code may use any class."""

    mean: Tensor
    spread: Tensor
    rebuilt: Tensor
    states: list[Tensor]


class MultiOutput(nn.Module):
    """Several outputs at every level, none of them a logit, no labels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Splitting() for _ in range(3))
        self.heads = Heads()
        self.decoder = nn.Linear(4, 8)

    def forward(self, x):
        h = self.stem(x)
        pair, states = (h, torch.sin(h)), []
        for block in self.blocks:
            pair = block(pair)
            states.append(pair[1])
        found = self.heads(pair[0])
        return Encoded(found["mean"], found["spread"], self.decoder(found["mean"] * found["spread"]), states)


class MultiOutputModule(ZooModule):
    def loss_and_logits(self, batch):
        out = self.model(batch["x"])
        rebuilt = F.mse_loss(out.rebuilt, batch["x"])
        divergence = (out.mean.square() + out.spread - out.spread.log()).mean()
        smooth = sum(state.abs().mean() for state in out.states[:2])
        self.log_dict({"train/rebuilt": rebuilt, "train/divergence": divergence})
        return rebuilt + 0.1 * divergence + 0.01 * smooth, out.rebuilt

    def targets(self, batch):
        return len(batch["x"])


entry("multi_output", unlabelled_batch, MultiOutputModule)(MultiOutput)
