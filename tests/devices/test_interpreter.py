"""The interpreter's switch interval: short while GPUs are in use, and what it was before and after."""

import gc
import sys

import lightning.pytorch as pl
import pytest
import zoo
from harness import ours, run

from lightning_roundpipe.devices.interpreter import quick_switches

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
