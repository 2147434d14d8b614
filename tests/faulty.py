"""A model in whose code faults can be planted anywhere, and what has to be true after one of them.

User code passes places by name and with the samples that it works on, so that a fault can be planted for one
microbatch: ``PLANTED.plant("block 1", sample=3)`` raises where the microbatch with sample 3 runs block 1, and
``time=1`` where it does so for the second time, which in a step with a plan is the recomputation. It is global because
workers run copies of the layers.
"""

import contextlib
import copy
import functools
import gc
import threading
import time
import traceback

import harness
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, loader, ours, run, seeded, trainer_of
from torch import nn

from lightning_roundpipe.devices import emulated
from lightning_roundpipe.engine import pool as engine_pool

WITHIN_S = 60.0
"""Seconds from an exception to the caller, where it takes milliseconds: nobody waited until the grace was over."""
WIDTH, SAMPLES, BLOCKS = 16, 6, 4
CALLS = BLOCKS + 2
LAYERS = ["Linear", "FaultyBlock"]
CUT = harness.per_call(CALLS)


class Boom(Exception):
    """Nobody else raises this."""


class Planted:
    """Raises ``error`` when user code comes to ``where`` with ``sample`` for the ``time``-th time.

    Attributes:
        raised_at: when it did (monotonic), once each.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self.clear()

    def plant(self, where, sample=None, time=0, error=Boom):
        self.where, self.sample, self.left, self.error = where, sample, time, error
        self.raised_at = []

    def clear(self):
        self.where, self.sample, self.left = "", None, 0
        self.error = Boom
        self.raised_at = []

    def __call__(self, where, samples=None):
        if self.where != where:
            return
        if self.sample is not None and samples is not None and not bool((samples == self.sample).any()):
            return
        with self._lock:
            self.left -= 1
            if self.left != -1:
                return
        explode(self)


PLANTED = Planted()


def explode(planted):
    """Shows in tracebacks."""
    planted.raised_at.append(time.monotonic())
    raise planted.error("planted")


class PassBackward(torch.autograd.Function):
    """Passes its input on; its backward comes by the place ``name``."""

    @staticmethod
    def forward(ctx, x, samples, name):
        ctx.name, ctx.samples = name, samples
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        PLANTED(ctx.name, ctx.samples)
        return grad, None, None


class FaultyBlock(nn.Module):
    """Places ``block 0`` and ``block 0 backward``."""

    def __init__(self, index):
        super().__init__()
        self.name = f"block {index}"
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, samples):
        PLANTED(self.name, samples)
        h = torch.sin(torch.cos(torch.tanh(self.inner(x))))  # more to save for backward than what comes in and goes out
        return x + PassBackward.apply(h, samples, f"{self.name} backward")


class FaultyNet(nn.Module):
    """Places ``between 0`` after block 0, and so on; ``hook around`` block 1, and ``hook inside`` block 2."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(FaultyBlock(i) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 5)
        self.blocks[1].register_forward_hook(lambda module, args, output: PLANTED("hook around", args[1]))
        self.blocks[2].inner.register_forward_hook(lambda *_: PLANTED("hook inside"))

    def forward(self, x, samples):
        h = self.stem(x)
        for i, block in enumerate(self.blocks):
            h = block(h, samples)
            PLANTED(f"between {i}", samples)
        return self.head(h)


class FaultyOptimizer(torch.optim.SGD):
    independent_parameters = True

    def step(self, closure=None):
        loss = super().step(closure)
        PLANTED("optimizer")
        return loss


class FaultySchedule(torch.optim.lr_scheduler.LambdaLR):
    roundpipe_passive_hooks = True

    def step(self, *args):
        PLANTED("scheduler")
        super().step(*args)


class FaultyModule(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = FaultyNet()

    def training_step(self, batch, batch_idx):
        samples = batch["samples"]
        PLANTED("training_step", samples)
        logits = self.model(batch["x"], samples)
        PLANTED("loss", samples)
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss)
        return PassBackward.apply(loss, samples, "loss backward")

    def validation_step(self, batch, batch_idx):
        PLANTED("validation_step")
        logits = self.model(batch["x"], batch["samples"])
        PLANTED("validation loss")
        self.log("val/loss", F.cross_entropy(logits, batch["y"]))

    def configure_optimizers(self):
        optimizer = FaultyOptimizer(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = FaultySchedule(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PlantAt(pl.Callback):
    """Plants a fault when training batch ``batch`` starts, and only once."""

    roundpipe_passive_hooks = True

    def __init__(self, batch, *planted):
        self.batch, self.planted = batch, planted

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.batch = -1
            if (engine := getattr(trainer.strategy, "_engine", None)) is not None:
                engine.settle()  # or the batch before, whose backward still runs, would come to it first
            PLANTED.plant(*self.planted)


with seeded(4):
    MODULE = FaultyModule()
    BATCHES = [
        {"x": torch.randn(SAMPLES, 8), "y": torch.randint(5, (SAMPLES,)), "samples": torch.arange(SAMPLES)}
        for _ in range(4)
    ]


def strategy(**options):
    return ours(**({"num_microbatches": 3, "layers": LAYERS, "plan": CUT} | options))


def microbatch_of(sample, microbatches):
    parts = torch.arange(SAMPLES).tensor_split(microbatches)
    return next(i for i, part in enumerate(parts) if sample in part)


# ----------------------------------------------------------------------------------------------------------- afterwards


@functools.cache
def plainly():
    """Plain training, without any fault."""
    return run("auto", MODULE, BATCHES)


@contextlib.contextmanager
def no_collector():
    """What goes, goes by itself: what hangs in a circle stays, on a GPU as well, until there is no room for more."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def devices_made():
    """All emulated devices that are made inside. The grace is so long that waiting it out would be seen."""
    made = []
    real = emulated.make_emulated

    def make(*args):
        new = real(*args)
        made.extend(new)
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "make_emulated", make)
        patch.setattr(engine_pool, "GRACE", 2 * WITHIN_S)
        yield made


def assert_nothing_left(module, devices=()):
    """No thread, no interceptor, nothing on the devices."""
    assert harness.roundpipe_threads() == []
    patched = [name for name, inner in module.named_modules() if "forward" in vars(inner)]
    assert not patched, f"still intercepted: {patched}"
    left = [device.resident_by_purpose() for device in devices]
    assert left == [{}] * len(devices)


def assert_trains(**options):
    """Nothing is left of the fault in the process: the next training has plain training's numbers."""
    PLANTED.clear()
    assert harness.roundpipe_threads() == []
    assert_same(plainly(), run(strategy(**options), MODULE, BATCHES, devices=2))


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fit(trainer, module=MODULE, *, traced=True, **options):
    """Train a copy of ``module`` and look at what is left. The copy, and what was raised, without its frames.

    ``traced``: whether a traceback reaches the line that raised.
    """
    copied, error = copy.deepcopy(module), None
    with devices_made() as made, no_collector():
        try:
            with harness.quiet():
                trainer.fit(copied, loader(BATCHES), **options)
        except (Exception, SystemExit) as raised:
            if PLANTED.raised_at:
                assert time.monotonic() - PLANTED.raised_at[0] < WITHIN_S
                assert not traced or any("explode" in frames(each) for each in _causes(raised))
            for each in _causes(raised):  # they hold what they worked with
                each.__traceback__ = None
            error = raised
        assert_nothing_left(copied, made)
    return copied, error


def _causes(error):
    """It, and all that it came from."""
    return [error, *(more for cause in (error.__cause__, error.__context__) if cause for more in _causes(cause))]


def trains_again(trainer, module=MODULE, **options):
    """With the same strategy, from the start. Lightning would go on behind the error, which may be at the end."""
    PLANTED.clear()
    trainer.fit_loop = type(trainer.fit_loop)(trainer, max_epochs=1)
    copied, error = fit(trainer, module, **options)
    assert error is None
    harness.assert_tensors_same(plainly().state, dict(copied.state_dict()))


def fail(batch, *planted, devices=2, again=True, probed=False, trainer=None, module=MODULE, **options):
    """Train into a fault, look at what is left, and train once more with the same Trainer.

    Args:
        batch: when it is planted; None: at once.
        planted: arguments of ``Planted.plant``.
        again: whether to train once more.
        probed: whether the place may be in a layer that is tried without gradients, where it is not wrong to raise.
        trainer: more arguments for the Trainer; ``val_dataloaders`` goes to its ``fit``.
        module: what is trained, a copy of it.
        options: for the strategy.

    Returns:
        The exception; None if nobody came to the place, so that the run went through.
    """
    given = dict(trainer or {})
    validation = {name: given.pop(name) for name in ("val_dataloaders",) if name in given}
    callbacks = [PlantAt(-1 if batch is None else batch, *planted), *given.pop("callbacks", ())]
    if batch is None:
        PLANTED.plant(*planted)
    chosen = trainer_of(strategy(**options), devices=devices, callbacks=callbacks, **given)
    copied, error = fit(chosen, module, **validation)
    if error is None:
        assert probed or not PLANTED.raised_at, "swallowed"
        harness.assert_tensors_same(plainly().state, dict(copied.state_dict()))
    else:
        assert PLANTED.raised_at, error
        if again:
            trains_again(chosen, module, **validation)
    PLANTED.clear()
    return error
