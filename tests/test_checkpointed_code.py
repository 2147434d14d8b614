"""`torch.utils.checkpoint` around layers and the code between them equals plain Lightning, of both kinds."""

import pytest
import torch
import zoo
from harness import Learner, assert_plain, assert_same, ours, run, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from traps import Block

from lightning_roundpipe.config import RoundPipeError

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_plain(place, kind):
    assert_plain(build(place, kind), batches(), {"num_microbatches": 2}, devices=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [OneBlockTwice, Nested])
def test_draws_what_the_forward_has_drawn(place, kind):
    """In layers and between them: without checkpoints, the numbers are the same."""
    results = [
        run(ours(num_microbatches=2), build(place, each, dropout=0.4), batches(), devices=2) for each in ("", kind)
    ]
    assert_same(*results)


@pytest.mark.parametrize(
    "plan",
    [
        "forward 0-1 2; fused 3-4; backward 2 0-1; round 2",
        "forward 0 1 2 3; fused 4; backward 3 2 1 0; round 2; recompute ahead",
    ],
)
def test_under_other_plans(plan):
    """Layers are called again where no slot has their weights."""
    module = build(TwoBlocks, "not reentrant", dropout=0.4)
    expected = run(ours(num_microbatches=4), build(TwoBlocks, dropout=0.4), batches(), devices=2)
    assert_same(expected, run(ours(num_microbatches=4, plan=plan), module, batches(), devices=2))


def test_a_layer_that_only_a_backward_calls_is_refused():
    class Late(HeadAndLoss):
        def step(self, x, y):
            h = self.stem(x)
            h.register_hook(lambda grad: self.blocks[0](grad).detach())
            return self.loss(h, y)

    with pytest.raises(RoundPipeError, match=r"layer 'blocks\.0' was called in a backward"):
        run(ours(num_microbatches=2), build(Late, "reentrant"), batches(), devices=2)
