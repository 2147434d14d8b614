"""What hooks between batches find in ``.grad``, and what becomes of what they write there."""

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_plain, assert_same, assert_tensors_same, callback, ours, run
from torch import nn

HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_validation_start", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip
"""Those that let the optimizer step on its own thread."""


class Module(zoo.PlainClassifier):
    """With a parameter beside the layers, and one that is used in every other batch."""

    def __init__(self):
        super().__init__(zoo.MLP())
        self.gain = nn.Parameter(torch.ones(5))
        self.seldom = nn.Parameter(torch.ones(5))

    def loss_and_logits(self, batch):
        logits = self.model(batch["x"]) * self.gain
        if float(batch["x"].detach()[0, 0]) > 0:
            logits = logits * self.seldom
        return nn.functional.cross_entropy(logits, batch["y"]), logits


class Look(pl.Callback):
    """Copies gradients; then ``does`` something with them at ``at``."""

    def __init__(self, at="", does=None):
        self.seen = []
        self.kept = []
        self.at, self.does = at, does
        self.apart = False

    def look(self, hook, trainer, module):
        found = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        engine = getattr(trainer.strategy, "_engine", None)
        self.apart |= engine is not None and engine.updates is not None
        self.seen.append((hook, trainer.global_step, found))
        if hook == self.at and self.does is not None:
            for parameter in module.parameters():
                self.does(parameter, self)


def _looking(hook):
    return lambda self, trainer, module: self.look(hook, trainer, module)


for _hook in HOOKS:
    setattr(Look, _hook, _looking(_hook))


def batches():
    made = zoo.make_batches("mlp", count=6, samples=8)
    for number, batch in enumerate(made):
        batch["x"][:, 0] = 1.0 if number % 2 else -1.0
    return made


class Matrices(Module):
    """Its optimizer holds matrices alone. ``zero_grad`` does not reach the other parameters: their gradients grow."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.ndim > 1], lr=0.1)


def train(strategy, look, devices=1, *, validates=True, module=Module, **options):
    torch.manual_seed(1)
    given = {"val_batches": batches()[:1]} if validates else {}
    given |= {"watch": False} | options
    result = run(strategy, module(), batches(), devices=devices, callbacks=[look], **given)
    assert look.apart is (strategy != "auto"), "the optimizer steps on its own thread"
    return result


def check_seen(plain, other, **tolerance):
    assert [entry[:2] for entry in plain.seen] == [entry[:2] for entry in other.seen]
    for (hook, step, expected), (_, _, found) in zip(plain.seen, other.seen, strict=True):
        where = f"{hook} after step {step}"
        assert expected.keys() == found.keys()
        assert {n for n, g in expected.items() if g is None} == {n for n, g in found.items() if g is None}, where
        pairs = {name: (value, found[name]) for name, value in expected.items() if value is not None}
        assert_tensors_same([a for a, _ in pairs.values()], [b for _, b in pairs.values()], what=where, **tolerance)


OPTIONS = {
    "validation behind a window": {"accumulate_grad_batches": 4, "val_check_interval": 4},
    "no window": {"val_check_interval": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "no validation": {"validates": False, "max_epochs": 2},
    "a last window that is not full": {"accumulate_grad_batches": 4, "validates": False, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("module", [Module, Matrices])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_hooks_find_what_plain_training_leaves(options, module):
    plain, other = Look(), Look()
    expected = train("auto", plain, module=module, **options)
    assert_same(expected, train(ours(num_microbatches=2), other, 2, module=module, **options))
    check_seen(plain, other)


def halve(p, look):
    if p.grad is not None:
        p.grad.mul_(0.5)


def replace(p, look):
    look.kept.append((p.grad, p.grad if p.grad is None else p.grad.clone()))
    p.grad = torch.full_like(p, 0.01)


def anew(p, look):
    p.grad = None
    differentiate(p, look)


def keep_parts(p, look):
    if p.grad is not None:
        look.kept.append((p.grad[:1].T, p.grad[:1].T.clone()))


def differentiate(p, look):
    """As training against adversaries does, while it validates."""
    with torch.enable_grad():
        (p.square().sum() * 0.01).backward()


@pytest.mark.parametrize("way", [halve, replace, keep_parts, anew])
@pytest.mark.parametrize("module", [Module, Matrices])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_train_epoch_end"])
def test_what_hooks_make_of_them_counts(way, hook, module):
    options = {"accumulate_grad_batches": 4, "val_check_interval": 4, "gradient_clip_val": 0.5}
    plain, other = Look(hook, way), Look(hook, way)
    expected = train("auto", plain, module=module, **options)
    assert_same(expected, train(ours(num_microbatches=2), other, 2, module=module, **options))
    check_seen(plain, other)
    assert_tensors_same(plain.kept, other.kept, what="what a hook keeps")


class Early(Matrices):
    """Writes gradients before the first batch: of the parameters that the optimizer holds, and of the others."""

    at = "on_fit_start"

    def _write(self, hook):
        for number, parameter in enumerate(self.parameters() if hook == self.at else ()):
            parameter.grad = torch.full_like(parameter, 0.01 * number)

    def on_fit_start(self):
        self._write("on_fit_start")

    def on_train_epoch_start(self):
        self._write("on_train_epoch_start" if self.current_epoch == 0 else "")


@pytest.mark.parametrize("options", [{"validates": False, "accumulate_grad_batches": 4}, {"num_sanity_val_steps": 1}])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_gradients_from_before_the_first_batch(hook, options, monkeypatch):
    monkeypatch.setattr(Early, "at", hook)
    plain, other = Look(), Look()
    expected = train("auto", plain, module=Early, **options)
    found = train(ours(num_microbatches=2), other, 2, module=Early, **options)
    check_seen(plain, other)
    assert_same(expected, found)


class ReadsLastGradients(zoo.PlainClassifier):
    """Logs the norm of the last step's gradients in ``training_step``."""

    def __init__(self):
        super().__init__(zoo.MLP())

    def training_step(self, batch, batch_idx):
        found = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", sum(found, torch.zeros(())))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_zero_grad"])
def test_a_step_finds_the_last_gradients_where_hooks_find_those_of_each_batch(hook):
    looks = callback(**{hook: lambda *_: None})
    plain, _ = assert_plain(ReadsLastGradients(), batches(), callbacks=[looks])
    assert any(logged["norm"] for _, logged in plain.logged)
