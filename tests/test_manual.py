"""Manual optimization: training_step differentiates and steps by itself, and it is as in plain Lightning."""

import gc
import time

import harness
import lightning.pytorch as pl
import plain_oracle
import pytest
import torch
import torch.nn.functional as F
from harness import assert_identical, assert_same, callback, ours
from torch import nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.manual import ManualMicrobatch


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.out(self.inner(x))


def tower(inside, outside, dropout=0.0):
    return nn.Sequential(nn.Linear(inside, 8), Block(dropout), Block(dropout), nn.Linear(8, outside))


class Manual(pl.LightningModule):
    """One model, two heads; ``step`` is a training_step, called with the module, its optimizers and a batch."""

    def __init__(self, step, make=None, dropout=0.0):
        super().__init__()
        self.automatic_optimization = False
        self.trunk, self.one, self.two = tower(6, 8, dropout), nn.Linear(8, 1), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(0.9))  # which user code reads
        self.step, self.make = step, make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))

    def losses(self, batch):
        hidden = self.trunk(batch) * self.scale
        return self.one(hidden).square().mean(), (self.two(hidden.tanh()) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        return self.step(self, self.optimizers(), batch)

    def validation_step(self, batch, batch_idx):
        self.log("validated", sum(self.losses(batch)))

    def configure_optimizers(self):
        return self.make(self.parameters())


def samples(count=3):
    drawn = torch.Generator().manual_seed(7)
    return [torch.randn(5, 6, generator=drawn) for _ in range(count)]


def run(strategy, module, batches=None, **options):
    batches = samples() if batches is None else batches
    return harness.run(strategy, module, batches, watch=False, **options)


def plain_and_ours(module, *, devices=2, delays=False, **options):
    emulation = {"poison": True} | ({"delay_seed": 3} if delays else {})
    plain, result = run("auto", module, **options), run(ours(emulation=emulation), module, devices=devices, **options)
    assert any(not torch.equal(result.state[name], before) for name, before in module.state_dict().items())
    return plain, result


# ------------------------------------------------------------------------------------------------------ what it can do


class Gan(pl.LightningModule):
    """As in Lightning's documentation, with a schedule for each optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = tower(4, 6), tower(6, 1)

    def judged(self, made, real):
        logits = self.discriminator(made)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        noise = torch.randn(len(batch), 4)

        self.toggle_optimizer(first)
        loss = self.judged(self.generator(noise), True)
        self.log("generator", loss, prog_bar=True, on_epoch=True)
        self.manual_backward(loss)
        assert all(p.grad is None for p in self.discriminator.parameters())
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        loss = (self.judged(batch, True) + self.judged(self.generator(noise).detach(), False)) / 2
        self.log("discriminator", loss)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=0.02, eps=1e-3) for part in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


@pytest.mark.parametrize("devices", [1, 2])
def test_two_optimizers(devices):
    """Noise is drawn by user code, from the generator that plain training draws from."""
    plain, result = plain_and_ours(Gan(), devices=devices, delays=devices == 2)
    assert {"generator_step", "generator_epoch", "discriminator"} <= set(plain.metrics)
    assert_same(plain, result)
    assert {slot["phase"] for slot in result.report["slots"]} == {"forward", "backward"}
    assert len({slot["worker"] for slot in result.report["slots"]}) == devices


def _one_after_another(self, optimizer, batch):
    """What was not reached by the first loss is there for the second one; in between weights of others change."""
    one, two = optimizer
    optimizer[0].zero_grad()
    optimizer[1].zero_grad()
    hidden = self.trunk(batch)
    loss = self.one(hidden.detach()).square().mean()
    other = self.two(hidden).square().mean()
    self.manual_backward(loss)
    one.step()
    self.log("norm", self.trunk[0].weight.data.norm())  # may be looked at, as long as it is not written to
    self.manual_backward(other)
    two.step()
    self.log("sum", loss + other)


def _shared_trunk(self, optimizer, batch):
    optimizer.zero_grad()
    loss, other = self.losses(batch)
    self.manual_backward(loss, retain_graph=True)
    self.log("so far", self.trunk[1].out.weight.grad.norm())
    self.manual_backward(other, gradient=torch.tensor(0.5))
    optimizer.step()
    return {"loss": loss, "other": other.detach()}


def _by_hand(self, optimizer, batch):
    """Past Lightning: torch's own backward, clipping, optimizer, and weights that are written to."""
    bare = optimizer.optimizer
    for _ in range(2):
        bare.zero_grad(set_to_none=False)
        sum(self.losses(batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        bare.step()
        for parameter in self.trunk.parameters():
            parameter.data.clamp_(-0.3, 0.3)
    with torch.no_grad():
        self.one.weight.mul_(0.9)
        self.log("after", sum(self.losses(batch)))


def _written_ahead(write):
    def step(self, optimizer, batch):
        with torch.no_grad():
            self.log("before", sum(self.losses(batch)))
        time.sleep(0.02)  # what is uploaded ahead arrives, with the old weights
        write(self.trunk[0].weight)
        _shared_trunk(self, optimizer, batch)

    return step


def _unseen(weight):
    weight.data.mul_(0.8)


def _accumulated(self, optimizer, batch):
    self.manual_backward(sum(self.losses(batch)) / 2)
    self.batches = getattr(self, "batches", 0) + 1
    if self.batches % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def _with_closures(self, optimizer, batch):
    for index, part in enumerate(optimizer):

        def closure(part=part, index=index):
            part.zero_grad()
            loss = self.losses(batch)[index]
            self.manual_backward(loss)
            return loss

        with part.toggle_model(sync_grad=index == 0):
            part.step(closure=closure)


def _hooked(self, optimizer, batch):
    """On a layer's output, and on the batch itself, whose gradient is asked for."""
    optimizer.zero_grad()
    batch = batch.clone().requires_grad_()
    hidden = self.trunk(batch)
    hidden.register_hook(lambda grad: grad * 2)
    self.manual_backward(self.one(hidden).square().mean())
    self.log("of the batch", batch.grad.norm())
    optimizer.step()


def _parts(parameters):
    every = list(parameters)
    one, two = every[-4:-2], every[:-4] + every[-2:]
    return [torch.optim.Adam(part, lr=0.03, eps=1e-3) for part in (one, two)]


def _halves(parameters):
    """Both hold the trunk."""
    every = list(parameters)
    return [torch.optim.SGD(every, lr=0.05), torch.optim.SGD(every[:-2], lr=0.03)]


WAYS = {
    "one loss after another": (_one_after_another, _parts),
    "a shared trunk": (_shared_trunk, None),
    "by hand": (_by_hand, None),
    "accumulated": (_accumulated, None),
    "with closures": (_with_closures, _halves),
    "lbfgs": (
        lambda self, optimizer, batch: _with_closures(self, [optimizer], batch),
        lambda parameters: torch.optim.LBFGS(list(parameters), lr=0.1, max_iter=2),
    ),
    "hooks on tensors": (_hooked, None),
    "written to": (_written_ahead(torch.no_grad()(lambda weight: weight.mul_(0.8))), None),
    "written to unseen": (_written_ahead(_unseen), None),
    "put elsewhere": (_written_ahead(lambda weight: setattr(weight, "data", weight.detach() * 0.8)), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_in_plain_training(way):
    step, make = WAYS[way]
    plain, result = plain_and_ours(Manual(step, make), val_batches=samples(1))
    assert "validated" in plain.metrics
    assert_same(plain, result)


def test_resuming_goes_on_to_the_bit(tmp_path):
    """Two optimizers with their schedules and state. Each batch draws from its own seed, wherever a run begins."""
    seeds = [callback(on_train_batch_start=lambda trainer, *_: torch.manual_seed(trainer.fit_loop.total_batch_idx))]
    module = Gan()
    whole, half = (run(ours(), module, samples(2), devices=2, max_epochs=n, callbacks=seeds) for n in (2, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit = {"ckpt_path": tmp_path / "half.ckpt"}
    resumed = run(ours(), Gan(), samples(2), devices=2, max_epochs=2, callbacks=seeds, fit=fit)
    assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


def test_on_any_number_of_workers():
    """To the bit, dropout included; and a mask is the same when a call is computed again."""
    module = Manual(_shared_trunk, dropout=0.5)
    one, two = (run(ours(), module, devices=devices) for devices in (1, 2))
    assert_identical(one, two)


def test_hooks_come_where_they_come_in_plain_training():
    batches = [batch.double() for batch in samples()]
    script = {"make": lambda: Manual(_shared_trunk).double(), "loader": lambda: harness.loader(batches)}
    plain, _ = plain_oracle.assert_plain(2, **script, watch=True)
    assert len(plain.of("on_after_backward")) == 2 * len(batches)


def test_nothing_is_left_of_a_step():
    """Without Python's garbage collector, as a circle would live on with all boundary tensors in it."""
    left = []

    def count():
        return sum(isinstance(thing, (ManualMicrobatch, LayerCall)) for thing in gc.get_objects())

    counting = callback(on_train_batch_end=lambda *_: left.append(count() - before))
    gc.collect()
    before = count()  # the frames of a test that failed hold some
    gc.disable()
    try:
        run(ours(), Manual(_shared_trunk), samples(2), callbacks=[counting])
    finally:
        gc.enable()
    assert left == [0, 0]


# ------------------------------------------------------------------------------------------------------ what it cannot


def _written_between(write):
    def step(self, optimizer, batch):
        loss, _ = self.losses(batch)
        write(self.trunk[0].weight)
        self.losses(batch)  # brings the new weights to where they belong
        self.manual_backward(loss)

    return step


def _kept(self, optimizer, batch):
    self.hidden = getattr(self, "hidden", 0) + self.trunk(batch)
    self.manual_backward(self.hidden.square().mean())


REFUSED = {
    "an unseen write between them": (_written_between(_unseen), "were written to"),
    "a tensor of the batch before": (_kept, "detach what is kept for a later batch"),
    "torch.autograd.grad": (
        lambda self, optimizer, batch: torch.autograd.grad(self.losses(batch)[0], self.trunk[1].out.weight),
        "autograd.grad",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    step, message = REFUSED[what]
    with pytest.raises(RoundPipeError, match=message):
        run(ours(), Manual(step, lambda parameters: torch.optim.SGD(list(parameters)[1:], lr=0.1)))  # not self.scale


class Bomb(nn.Linear):
    """Fails once, where it is told to."""

    fails = ""

    def forward(self, x):
        if self.fails == "forward":
            self._fail()
        out = super().forward(x)
        if self.fails == "backward" and out.requires_grad:
            out.register_hook(self._fail)
        return out

    def _fail(self, *_):
        raise KeyError("once")


@pytest.mark.parametrize("where", ["user code", "forward", "backward"])
def test_after_an_error_training_goes_on(where):
    """Nothing of the step is left on the module, and the error says where it was."""

    def step(self, optimizer, batch):
        _shared_trunk(self, optimizer, batch)
        if Bomb.fails == "user code":
            raise KeyError("once")

    module = Manual(step)
    module.two = Bomb(8, 1)
    trainer = harness.trainer_of(ours(), devices=2)
    try:
        Bomb.fails = where
        with pytest.raises(KeyError, match="once") as caught, harness.quiet():
            trainer.fit(module, harness.loader(samples()))
    finally:
        Bomb.fails = ""
    place = "the code " if where == "user code" else f"layer 'two', {where}"
    assert any(place in note for note in caught.value.__notes__)
    assert not any("forward" in vars(part) for part in module.modules())
    before = module.one.weight.detach().clone()
    with harness.quiet():
        trainer.fit(module, harness.loader(samples()))
    assert not torch.equal(module.one.weight, before)
