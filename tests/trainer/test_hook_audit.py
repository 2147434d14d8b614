"""Hooks that may read weights or gradients between steps are found before training."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from lightning_roundpipe.callbacks.measurements import Measurements
from lightning_roundpipe.callbacks.progress import ProgressLines
from lightning_roundpipe.callbacks.run_folder import RunFolder
from lightning_roundpipe.tasks.causal_lm import CausalLM
from lightning_roundpipe.trainer import hook_audit
from lightning_roundpipe.trainer.hook_audit import looks_at_weights, reason_to_block

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
HOOKS = sorted(hook_audit._OF_CALLBACKS)
WITHIN = hook_audit._WITHIN_THE_STEP
EVERY = sorted({*HOOKS, *hook_audit._WAITS_AT})


class Plain(pl.LightningModule):
    """A module with nothing but what each has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "step"}}


def connected(module, *given, **options):
    """A trainer as it is when ``Strategy.on_train_start`` is called."""
    trainer = pl.Trainer(callbacks=list(given), **{**QUIET, **options})
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    module._trainer = trainer
    trainer.strategy.setup_optimizers(trainer)
    return trainer


def looks(*given, module=None):
    module = module or Plain()
    return looks_at_weights(connected(module, *given), module)


def needs(*given, module=None, **options):
    module = module or Plain()
    trainer = connected(module, *given, **options)
    return reason_to_block(trainer, module, trainer.optimizers)


def overriding(base, *hooks, away=None, **names):
    """An instance of a subclass of ``base`` that overrides ``hooks`` with functions that only pass on."""

    def passing(hook):
        return lambda self, *args, **kwargs: getattr(super(kind, self), hook)(*args, **kwargs)

    said = {} if away is None else {hook_audit.PASSIVE_HOOKS: away}
    kind = type("Mine", (base,), {**{hook: passing(hook) for hook in hooks}, **said, **names})
    return kind() if base is not callbacks.EarlyStopping else kind("loss")


def test_a_users_callback_looks():
    for hook in HOOKS:
        assert looks(overriding(Callback, hook)) == {hook}
    given = callbacks.LambdaCallback(on_train_batch_end=lambda *_: None, on_fit_end=lambda *_: None)
    assert looks(given) == {"on_train_batch_end", "on_fit_end"}


def test_a_subclass_of_a_passive_callback_waits_until_it_is_declared():
    assert looks(overriding(callbacks.EarlyStopping)) == {"on_train_epoch_end", "on_validation_end"}
    assert looks(overriding(callbacks.EarlyStopping, away=True)) == set()


def test_a_class_speaks_for_itself_and_what_it_inherits():
    parent = type(overriding(Callback, "on_train_batch_end", "on_train_start", away=True))
    assert looks(overriding(parent)) == set()
    assert looks(overriding(parent, "on_train_start")) == {"on_train_start"}, "the parent cannot know"
    assert looks(overriding(parent, "on_train_start", away=("on_train_start",))) == set()
    assert looks(overriding(parent, "on_train_start", away=False)) == {"on_train_start"}
    silent = type(overriding(Callback, "on_train_batch_end"))
    assert looks(overriding(silent, away=True)) == set()


def test_callbacks_of_the_packaged_job_are_passive():
    packaged = (Measurements(), ProgressLines(), RunFolder("."))
    trainer = connected(module := Plain())
    trainer.callbacks = [*packaged]
    assert reason_to_block(trainer, module, trainer.optimizers) is None
    for hook in (*EVERY, *hook_audit.PER_BATCH, *WITHIN, *hook_audit._PARTS_OF_THE_STEP, "optimizer_step"):
        if hook in hook_audit.PER_BATCH or hook not in EVERY:
            assert getattr(CausalLM, hook, None) is getattr(pl.LightningModule, hook, None)


def test_an_overridden_hook_of_the_module_looks():
    for hook in (h for h in EVERY if hasattr(pl.LightningModule, h)):
        assert looks(module=overriding(Plain, hook)) == {hook}
        assert looks(module=overriding(Plain, hook, away=(hook,))) == set()
        patched = Plain()
        setattr(patched, hook, getattr(patched, hook))
        assert looks(module=patched) == {hook}


class Strange(LRScheduler):
    """A scheduler that is not torch's."""

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [(lambda o: LambdaLR(o, lambda step: 1.0), None), (Strange, "Strange is no scheduler of torch, which may read")],
)
def test_schedulers_that_are_not_torchs_count(scheduler, found):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [scheduler(optimizer)]

    reason = needs(module=Scheduled())
    assert reason is found or str(reason).startswith(str(found))
    assert needs(module=overriding(Scheduled, away=("lr_scheduler_step",))) is None


def test_a_callback_within_the_step_or_at_each_batch_makes_it_block():
    for hook in (*WITHIN, "on_train_batch_start", "on_train_batch_end"):
        declare = f"which may read weights or gradients {hook_audit.DECLARE}"
        assert needs(overriding(Callback, hook)) == f"callback Mine has {hook}, {declare}"
        by_lambda = needs(callbacks.LambdaCallback(**{hook: lambda *_: None}))
        assert by_lambda == f"callback LambdaCallback has {hook}, {declare}"
        assert needs(overriding(Callback, hook, away=(hook,))) is None


def test_a_module_within_the_step_or_at_each_batch_makes_it_block():
    for hook in (*WITHIN, *hook_audit.PER_BATCH, "optimizer_step", *hook_audit._PARTS_OF_THE_STEP):
        a_part = hook in hook_audit._PARTS_OF_THE_STEP
        reason = needs(module=overriding(Plain, hook)) or ""
        assert reason.startswith(f"Mine overrides {hook}") and reason.endswith(hook_audit.DECLARE) != a_part
        assert needs(module=overriding(Plain, hook, away=True)) == (reason if a_part else None)


def test_anomaly_detection_needs_the_step_where_it_happens():
    assert "detect_anomaly" in (needs(detect_anomaly=True) or "")
    with torch.autograd.set_detect_anomaly(True):
        assert "detect_anomaly" in (needs() or "")


def test_manual_optimization_and_several_optimizers():
    module = Plain()
    module.automatic_optimization = False
    assert needs(module=module) == "Plain has automatic_optimization=False"
    module = Plain()
    trainer = connected(module)
    several = [torch.optim.SGD([p], lr=0.1) for p in module.parameters()]
    assert reason_to_block(trainer, module, several) == "there are several optimizers (2)"
