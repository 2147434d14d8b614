"""Rounds of the engine without a Trainer: a seed draws a plan, what each microbatch calls, delays, and an error.

    a round ── an engine on emulated devices that poison and are late ── some windows ── the weights of plain training
    an error somewhere ── it comes out, once ── the engine trains on from weights that are written back

Microbatches skip layers, call some twice, and swap two, in any window but the first, which shows the plan's calls.
Formats that round gradients or weights give what an engine with one kind worker gives, to the bit.
"""

import copy
import random
import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import harness
import torch
from harness import seeded
from patience import PATIENCE_S
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.config import Emulation, Options
from lightning_roundpipe.devices.emulated import make_emulated
from lightning_roundpipe.engine.context import make_context
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.planning.schedule import Plan, Span

WIDTH, BLOCKS = 8, 4
CALLS = BLOCKS + 2
PLACES = ("layer", "layer backward", "user code", "user code backward", "loss", "optimizer")


class Boom(Exception):
    """Nobody else raises this."""


class Fuse:
    """Raises when code comes to a place for the ``left``-th time; copies of the model share it."""

    def __init__(self):
        self.place, self.left = "", 0
        self.pause = random.Random(0)
        self.seen = []
        """The sections of user code that microbatches came to: section, and number of the microbatch."""

    def __deepcopy__(self, memo):
        return self

    def __call__(self, place):
        if self.pause.random() < 0.05:
            time.sleep(self.pause.random() * 1e-3)
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                raise Boom(place)


class _Mined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuse, place):
        ctx.fuse, ctx.place = fuse, place
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.fuse(ctx.place)
        return grad, None, None


def mined(x, fuse, place):
    return _Mined.apply(x, fuse, place)


class Block(nn.Module):
    """Gives two tensors; one of the blocks writes to its input."""

    def __init__(self, fuse, *, writes=False):
        super().__init__()
        self.inner, self.fuse, self.writes = nn.Linear(WIDTH, WIDTH), fuse, writes

    def forward(self, h, mask):
        self.fuse("layer")
        if self.writes:
            h.clamp_(-1.5, 1.5)
        out = torch.tanh(self.inner(h))
        return mined(out * mask, self.fuse, "layer backward"), out.square().mean()


class Network(nn.Module):
    """User code between layers reads a weight, and writes in place."""

    def __init__(self, fuse):
        super().__init__()
        with seeded(3):
            self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
            self.blocks = nn.ModuleList(Block(fuse, writes=i == 2) for i in range(BLOCKS))
            self.blocks[1].requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(WIDTH))
        self.fuse = fuse

    def loss(self, x, order, microbatch=0):
        mask = (x[:, :1] > -2).to(x.dtype)
        h, extra = self.embed(x), x.new_zeros(())
        for section, number in enumerate(order):
            self.fuse.seen.append((section, microbatch))
            out, aside = self.blocks[number](h * 1.0, mask)
            self.fuse("user code")
            h = h + out * self.scale
            h += 0.1
            extra = extra + aside
            h = mined(h, self.fuse, "user code backward")
        out = self.head(h)
        self.fuse("loss")
        return out.square().mean() + 0.1 * extra


class FusedSGD(torch.optim.SGD):
    """Comes to the place ``optimizer``."""

    independent_parameters = True

    def __init__(self, fuse, *args, **options):
        super().__init__(*args, **options)
        self._fuse = fuse

    def step(self, closure=None):
        self._fuse("optimizer")
        return super().step(closure)


@dataclass
class Round:
    """What a seed draws.

    Attributes:
        windows: for each window, and each of its microbatches, the samples and the order of its blocks.
        apart: whether the optimizer has a thread of its own.
        error: the place of an error, how often code comes there before, and the window in front of which it is planted.
        low: whether all is computed in bfloat16.
        narrow: whether gradients travel in it.
    """

    seed: int
    devices: int
    plan: str | None
    windows: list[list[tuple[Tensor, list[int]]]]
    apart: bool
    staleness: int
    prefetch: int
    overlap: bool
    error: tuple[str, int, int] | None
    low: bool
    narrow: bool

    @classmethod
    def draw(cls, seed):
        draw = random.Random(seed)
        count, windows = draw.randint(1, 6), []
        for number in range(5):
            odd = number and draw.random() < 0.5
            size = count if draw.random() < 0.8 else draw.randint(1, count)
            generator = torch.Generator().manual_seed(100 * seed + number)
            windows.append([(torch.randn(2, 6, generator=generator), _order(draw, bool(odd))) for _ in range(size)])
        apart = draw.random() < 0.8
        error = (draw.choice(PLACES[: 5 + apart]), draw.randint(1, 12), draw.randint(1, 3))
        formats = random.Random(f"{seed} formats")
        devices, plan = draw.randint(1, 4), None
        if draw.random() < 0.9:
            plan = _plan(draw, count, random.Random(seed), formats.choice([0, 0, 1, 2]))
        return cls(
            seed,
            devices=devices,
            plan=plan,
            windows=windows,
            apart=apart,
            staleness=draw.randint(0, 1) if apart else 0,
            prefetch=draw.choice([1, 1, 0]),
            overlap=draw.random() < 0.9,
            error=error if draw.random() < 0.4 else None,
            low=formats.random() < 0.2,
            narrow=plan is not None and formats.random() < 0.4,  # rounds, which a plan has, round on their own
        )

    def kindly(self):
        """Return the same training on one worker, all of it in one stage."""
        plan = None if self.plan is None else harness.single(CALLS, Plan.parse(self.plan).round_microbatches)
        return replace(self, devices=1, plan=plan, prefetch=1)


def _order(draw, odd):
    order = list(range(BLOCKS))
    if not odd:
        return order
    kind = draw.choice(["skip", "repeat", "swap", "all"])
    if kind in ("skip", "all"):
        order.remove(draw.choice(order))
    if kind in ("repeat", "all"):
        order.insert(draw.randint(0, len(order)), draw.choice(order))
    if kind in ("swap", "all"):
        a, b = draw.sample(range(len(order)), 2)
        order[a], order[b] = order[b], order[a]
    return order


def _plan(draw, count, carries, least):
    first = draw.randint(0, CALLS - 1)

    def cuts():
        ends = [0, *(c for c in range(1, first) if draw.random() < 0.5), first]
        return tuple(Span(a, b - 1) for a, b in pairwise(ends)) if first else ()

    plan = Plan(cuts(), Span(first, CALLS - 1), cuts()[::-1], draw.randint(1, count), draw.random() < 0.5)
    share = carries.choice([0.0, 0.5, 1.0])
    carry = tuple(call for call in range(first) if carries.random() < share)
    return str(replace(plan, carry=carry, carry_least=least))


class Plainly:
    """The same training without an engine: one microbatch after another."""

    def __init__(self, staleness):
        self.network = Network(Fuse())
        self.read = copy.deepcopy(self.network) if staleness else self.network
        # A rate with which no round diverges: rounding alone would then tell weights apart.
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.5)

    def window(self, microbatches):
        self.network.zero_grad()
        self.read.zero_grad()
        for x, order in microbatches:
            torch.autograd.backward(self.read.loss(x, order))
        for master, used in zip(self.network.parameters(), self.read.parameters(), strict=True):
            master.grad = used.grad
            if used is not master:
                with torch.no_grad():
                    used.copy_(master)  # what the next window reads: without this window's update
        self._optimizer.step()

    def catch_up(self):
        """Let the next window read the newest weights."""
        self.read.load_state_dict(self.network.state_dict())


class Engined:
    """The round's training under an engine."""

    def __init__(self, drawn, emulation):
        self.fuse = Fuse()
        self.module = nn.Module()
        self.module.net = self.network = Network(self.fuse)
        self._windows = 0
        options = Options(
            layers=["Linear", "Block"], plan=drawn.plan or "static", staleness=drawn.staleness, overlap=drawn.overlap,
            prefetch=drawn.prefetch, watchdog_timeout=PATIENCE_S, emulation=emulation,
            reduce_dtype="bfloat16" if drawn.narrow else None,
        )  # fmt: skip
        devices = make_emulated([torch.device("cpu")] * drawn.devices, emulation)
        self._dtype = torch.bfloat16 if drawn.low else torch.float32
        formats = Formats(self._dtype if drawn.low else None)
        self.engine = Engine(make_context(self.module, devices, options, lambda text: None, formats))
        self._optimizer = FusedSGD(self.fuse, self.network.parameters(), lr=0.05, momentum=0.5)
        if drawn.apart:
            self.engine.enable_async_optimizer(lambda: self._optimizer)

    def window(self, microbatches):
        functions = [
            lambda x=x, order=order, index=index: self.network.loss(x.to(self._dtype), order, index)
            for index, (x, order) in enumerate(microbatches)
        ]
        self.fuse.seen = []
        count, self._windows = len(functions), self._windows + 1
        updates = self.engine.updates
        if updates is None:
            self._optimizer.zero_grad()
        weights = LossWeights(None, [2] * count, list(range(count)))
        result = self.engine.train_window(functions, weights, (0, self._windows))
        if result.error is not None:
            raise result.error
        assert result.gradients is not None
        if all(order == list(range(BLOCKS)) for _, order in microbatches):
            for section in range(BLOCKS):
                came = [microbatch for where, microbatch in self.fuse.seen if where == section]
                assert came == sorted(came), f"microbatches came to section {section} in the order {came}"
        pairs = [(m.loss, m.differentiable) for m in result.microbatches if m.loss is not None]
        for loss in result.gradients.losses(pairs):
            torch.autograd.backward(loss)
        if updates is None:
            self._optimizer.step()
        else:
            updates.submit(None)

    def restore(self, state, momentum):
        """Go on from other weights, as from a checkpoint."""
        self.fuse.place = ""
        self.engine.settle()
        with torch.no_grad():
            self.network.load_state_dict(state)
        self._optimizer.load_state_dict(momentum)

    def catch_up(self):
        """Let the next window read the newest weights."""
        self.engine.settle()
        self.restore(_copied(self.network), self.momentum())

    def momentum(self):
        return copy.deepcopy(self._optimizer.state_dict())


def run(seed):
    """Run one round.

    Returns:
        "failed" if an error was planted and came out, "trained" otherwise.

    Raises:
        AssertionError: other weights than plain training's, or something is left.
    """
    drawn = Round.draw(seed)
    before = set(threading.enumerate())
    emulation = Emulation(delay_seed=seed if seed % 4 == 0 else None, poison=True)
    rounds = drawn.low or drawn.narrow
    plain = Engined(drawn.kindly(), Emulation()) if rounds else Plainly(drawn.staleness)
    ours, outcome = Engined(drawn, emulation), "trained"
    ours.fuse.pause.seed(seed)
    try:
        for number, window in enumerate(drawn.windows):
            if drawn.error is not None and drawn.error[2] == number and outcome == "trained":
                outcome = _fail(ours, drawn, plain, window)
                plain.catch_up()
            ours.window(window)
            plain.window(window)
        ours.engine.settle()
        _compare(plain, ours, drawn)
    finally:
        ours.engine.close()
        if isinstance(plain, Engined):
            plain.engine.close()
    left = [t.name for t in threading.enumerate() if t not in before]
    assert not left, left
    return outcome


def _fail(ours, drawn, plain, window):
    """Train into an error, and go on from the weights in front of it."""
    assert drawn.error is not None
    ours.engine.settle()
    state, momentum = _copied(ours.network), ours.momentum()
    _compare(plain, ours, drawn)
    ours.fuse.place, ours.fuse.left, _ = drawn.error
    outcome = "trained"
    try:
        for _ in range(3):
            ours.window(window)
        ours.engine.settle()
    except Boom as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        assert "roundpipe: " in notes, notes
        outcome = "failed"
    ours.restore(state, momentum)
    return outcome


def _copied(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def _compare(plain, ours, drawn):
    if exact := isinstance(plain, Engined):
        plain.engine.settle()
    pairs = zip(plain.network.state_dict().items(), ours.network.state_dict().values(), strict=True)
    for (name, expected), found in pairs:
        same = torch.equal(expected, found) if exact else torch.allclose(expected, found, rtol=1e-4, atol=1e-6)
        assert same, f"{name} differs by {float((expected - found).abs().max())}: {drawn}"
