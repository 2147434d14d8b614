"""The interpreter's switch interval: short while GPUs are in use, and what it was before and after."""

import gc
import sys
import weakref

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices.interpreter import quick_switches
from lightning_roundpipe.engine.context import make_context

USUAL = 0.005


@pytest.fixture(autouse=True)
def usual():
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def now():
    return sys.getswitchinterval()


@pytest.fixture
def thawed():
    """What the tests' own ``gc.freeze`` has set aside is walked through again, for one test."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_was_there_before_a_run_is_not_walked_through_in_it():
    seen = []

    class Looking(zoo.PlainClassifier):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(gc.get_freeze_count())

    run(ours(num_microbatches=2), Looking(zoo.MLP()), zoo.make_batches("mlp", 2), devices=2)
    assert len(seen) == 2 and all(seen)
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_an_engine_is_freed_before_it_is_set_up_again(hook, monkeypatch):
    """It has cycles and a copy of the weights, and would be among the objects that are left out of collection."""
    engines = []

    def made(*args, **kwargs):
        assert all(engine() is None for engine in engines)
        return make_context(*args, **kwargs)

    class Replacing(zoo.PlainClassifier):
        def replace(self, *_):
            if not engines:
                engines.append(weakref.ref(self.trainer.strategy._engine))
                self.model.head = torch.nn.Linear(self.model.head.in_features, self.model.head.out_features)
                self.trainer.optimizers = [zoo.modules.sgd(self.parameters())]

        def on_train_batch_end(self, *_):
            assert engines[0]() is None

    setattr(Replacing, hook, Replacing.replace)
    monkeypatch.setattr("lightning_roundpipe.strategy.make_context", made)
    run(ours(), Replacing(zoo.MLP()), zoo.make_batches("mlp", 2), devices=2)


class Looks(pl.Callback):
    """The interval in a run."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.seen = set()

    def on_train_epoch_start(self, *_):
        self.seen.add(now())

    on_train_batch_start = on_validation_batch_start = on_validation_end = on_train_epoch_end = on_train_epoch_start


@pytest.mark.parametrize("staleness", [0, 1])
def test_threads_switch_quickly_in_a_run_on_gpus_and_nowhere_else(staleness, gpus):
    looks, batches = Looks(), zoo.make_batches("mlp", 4)
    strategy = ours(num_microbatches=2, staleness=staleness)
    run(strategy, zoo.make_module("mlp"), batches, devices=2, callbacks=[looks], val_batches=batches[:2], watch=False)
    with quick_switches():
        assert looks.seen == {now()}  # as the interpreter rounds it
    assert now() == USUAL
