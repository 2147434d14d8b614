"""What the tests of traps share: a small network, what user code does with it, and the comparison with plain training.

A trap is a function ``(net, h) -> h`` that stands between the stem and the head, and perhaps blocks with another
``forward``, something that is arranged before training, or another ``training_step``. It either equals plain training
or is refused with an error that names it.
"""

import pytest
import torch
import zoo
from harness import assert_same, halves, ours, run, seeded
from patience import PATIENCE_S
from torch import nn

from lightning_roundpipe.config import RoundPipeError

WIDTH = zoo.WIDTH


class Block(nn.Module):
    """A layer that does not save its input, so that plain autograd lets user code write to it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.aux = None
        self.flag = 1.0

    def forward(self, x):
        return torch.tanh(x) + self.other(torch.tanh(self.inner(torch.tanh(x))))


class Net(nn.Module):
    """Five calls, if every block is called once."""

    def __init__(self, block):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))

    def body(self, h):
        return in_turn(self, h)


def in_turn(net, h):
    """What the blocks do where the trap lies elsewhere."""
    for block in net.blocks:
        h = block(h)
    return h


class Trap(zoo.PlainClassifier):
    """A LightningModule with something unusual about it. ``calls`` is how many calls a microbatch makes.

    ``blocking``: the strategy is set up anew in training, which gradients are not taken from the optimizer's thread of.
    """

    calls = 5
    late = blocking = False

    def arrange(self, net):
        """Done before training, or when training has been set up if ``late``."""

    def setup(self, stage):
        if not self.late:
            self.arrange(self.model)

    def on_fit_start(self):
        if self.late:
            self.arrange(self.model)


class Traps:
    """The traps of a file, by name."""

    def __init__(self):
        self.equal = {}
        self.refused = {}
        self._bodies = {}

    def __call__(self, name, error="", forward=None, block=Block, **attributes):
        """Register the decorated body.

        Args:
            name: of the test.
            error: what the refusal says; empty if the trap equals plain training.
            forward: of the blocks.
            block: their class.
            attributes: of the LightningModule: ``arrange``, ``late``, ``calls``, ``training_step``.
        """

        def put(body):
            kind = type("Trap", (Trap,), attributes)
            made = type("Block", (block,), {"forward": forward}) if forward else block
            self._bodies[kind] = (body, made)
            if error:
                self.refused[name] = (kind, error)
            else:
                self.equal[name] = kind
            return body

        return put

    def build(self, kind):
        body, block = self._bodies[kind]
        with seeded(5):
            return kind(type("Net", (Net,), {"body": body})(block))

    def check_equal(self, name):
        """After a first window that learns, a plan that recomputes the first calls and keeps the graphs of others."""
        kind = self.equal[name]
        plain = run("auto", self.build(kind), **windows())
        chosen = strategy(plan=halves(kind.calls), emulation={"poison": True})
        assert_same(plain, run(chosen, self.build(kind), devices=3, blocking=kind.blocking, **windows()))

    def check_refused(self, name):
        kind, error = self.refused[name]
        with pytest.raises(RoundPipeError, match=error):
            run(strategy(watchdog_timeout=PATIENCE_S), self.build(kind), devices=2, **windows(2))


def windows(count=3):
    """Arguments of ``harness.run``: windows of three batches."""
    return {"batches": zoo.make_batches("mlp", 3 * count, samples=2), "accumulate_grad_batches": 3}


def strategy(**options):
    return ours(layers=[f"model.blocks.{i}" for i in range(3)], **options)
