"""Optimizers on a thread of their own: the numbers of plain training, or of one whose gradients come one step late.

`delayed` is the second opinion on staleness 1: a plain loop, in which each gradient is that of the weights before the
last update.
"""

import copy
import itertools
import time

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import Result, ours, run
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW

from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

LAYERS = ["Linear", "ResidualBlock"]
BATCHES = zoo.make_batches("mlp", 6)


class Trained(zoo.PlainClassifier):
    """The zoo's MLP with an optimizer of one's choice; two groups, of different rates."""

    def __init__(self, make, schedule=False):
        super().__init__(copy.deepcopy(zoo.make_module("mlp").model))
        self.make, self.schedule = make, schedule

    def configure_optimizers(self):
        head = [id(p) for p in self.model.head.parameters()]
        optimizer = self.make([p for p in self.parameters() if id(p) not in head])
        optimizer.add_param_group({"params": list(self.model.head.parameters()), "lr": 0.5 * optimizer.defaults["lr"]})
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


OPTIMIZERS = {
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.02),
    "adagrad": lambda p: Adagrad(p, lr=0.01, eps=1e-3),
    "fused": lambda p: AdamW(p, lr=0.01, eps=1e-3, fused=True),
}


def many(steps):
    return list(itertools.islice(itertools.cycle(BATCHES), steps))


def assert_losses_close(plain, other, tolerance=1e-4):
    assert len(plain.losses) == len(other.losses)
    for step, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        gap = float((a - b).abs() / a.abs())
        assert gap <= tolerance, f"step {step}: loss {float(b):.7g} instead of {float(a):.7g}, off by {gap:.2g}"


class Apart(pl.Callback):
    """Whether the optimizer was stepped on its own thread, and never waited for at the end of a batch."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.seen = set()

    def on_train_batch_end(self, trainer, *_):
        self.seen.add(bool(trainer.strategy._fit.stepping.asynchronous))


# ------------------------------------------------------------------------------------------------------- staleness 0


WAYS = {
    "alone": {},
    "norm": {"gradient_clip_val": 0.3},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("adamw", "alone"),
        ("momentum", "norm"),
        ("adafactor", "value"),
        ("momentum", "both"),
        ("fused", "alone"),
        ("adagrad", "alone"),
    ],
)
def test_as_in_plain_training(name, way):
    """A scheduler, two groups, microbatches on three workers."""
    options, steps = WAYS[way], 16
    module = Trained(OPTIMIZERS[name], schedule=True)
    apart = Apart()
    plain = run("auto", module, many(steps), **options)
    strategy = ours(num_microbatches=4, layers=LAYERS, plan=harness.halves(6, 2))
    result = run(strategy, module, many(steps), devices=3, callbacks=[apart], **options)
    assert apart.seen == {True}
    assert_losses_close(plain, result)
    assert plain.trainer.global_step == result.trainer.global_step
    groups = [r.trainer.optimizers[0].param_groups for r in (plain, result)]
    rates = [[group["lr"] for group in each] for each in groups]
    assert rates[0] == rates[1]
    assert groups[1][0].get("fused") == groups[0][0].get("fused"), "the user's groups were written to"


# ------------------------------------------------------------------------------------------------------- staleness 1


def delayed(module, batches, *, clip=None, accumulate=1):
    """The losses of a plain loop in which step k computes with the weights before update k - 1."""
    newest = copy.deepcopy(module)
    newest.log = lambda *args, **kwargs: None
    configured = newest.configure_optimizers()
    optimizer, schedule = configured, None
    if isinstance(configured, dict):
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    before = copy.deepcopy(newest)
    losses = []
    for start in range(0, len(batches), accumulate):
        old = copy.deepcopy(before)
        old.log = newest.log
        for batch in batches[start : start + accumulate]:
            loss = old.training_step(batch, 0)
            losses.append(loss.detach() / accumulate)  # as callbacks are given it
            (loss / accumulate).backward()
        before = copy.deepcopy(newest)  # what the next step computes with
        for mine, theirs in zip(newest.parameters(), old.parameters(), strict=True):
            mine.grad = theirs.grad
        if clip is not None:
            nn.utils.clip_grad_norm_(newest.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses


@pytest.mark.parametrize(
    ("name", "clip", "accumulate", "microbatches"),
    [("momentum", None, 1, 4), pytest.param("adamw", 0.3, 3, 4, marks=pytest.mark.slow)],
)
def test_exactly_one_step_late(name, clip, accumulate, microbatches, monkeypatch):
    """Working copies take their time, so that an upload that does not wait for its version finds the one before."""
    refresh = ParamBucket.refresh
    monkeypatch.setattr(ParamBucket, "refresh", lambda bucket, **how: (time.sleep(0.01), refresh(bucket, **how)))
    module = Trained(OPTIMIZERS[name], schedule=True)
    expected = Result(losses=delayed(module, many(18), clip=clip, accumulate=accumulate))
    strategy = ours(num_microbatches=microbatches, layers=LAYERS, staleness=1, emulation={"delay_seed": 1})
    options = {} if clip is None else {"gradient_clip_val": clip}
    result = run(strategy, module, many(18), devices=2, accumulate_grad_batches=accumulate, **options)
    assert_losses_close(expected, result)
    exact = run("auto", module, many(18), accumulate_grad_batches=accumulate, **options)
    assert float((exact.losses[-1] - result.losses[-1]).abs()) > 1e-3, "nothing was late"


# -------------------------------------------------------------------------------------------------- who looks, and when


class Norms(pl.Callback):
    """Looks at the optimizer's state, and then at weights, at the end of each batch."""

    roundpipe_passive_hooks = True  # not quite: it asks for state dicts, which wait by themselves

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        states = len(trainer.optimizers[0].state_dict()["state"])
        self.seen.append((float(sum(p.detach().norm() for p in pl_module.parameters())), states))


def test_who_looks_sees_whole_updates(monkeypatch):
    """Each bucket's update takes longer than what callbacks do."""
    module, seen, apply = Trained(OPTIMIZERS["adamw"]), [], BucketStepper._apply
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)
    monkeypatch.setattr(BucketStepper, "_apply", lambda *args: (time.sleep(0.02), apply(*args)))
    for strategy, devices in (("auto", 1), (ours(num_microbatches=2, layers=LAYERS), 2)):
        looking, apart = Norms(), Apart()
        callbacks = [looking, *([apart] if devices > 1 else [])]
        run(strategy, module, many(4), devices=devices, callbacks=callbacks, watch=False)
        assert devices == 1 or apart.seen == {True}
        seen.append(looking.seen)
    assert [n for _, n in seen[0]] == [n for _, n in seen[1]]
    assert [v for v, _ in seen[0]] == pytest.approx([v for v, _ in seen[1]], rel=1e-5)
