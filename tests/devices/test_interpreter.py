"""The interpreter's switch interval: short while GPUs are in use, and what it was before and after."""

import gc
import sys

import lightning.pytorch as pl
import pytest
import zoo
from harness import ours, run

from lightning_roundpipe.devices.interpreter import quick_switches, unwalked_objects

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
class TestUnwalkedObjects:
    def test_are_those_of_before_until_the_last_one_leaves(self):
        kept = {"kept": [1]}
        with unwalked_objects():
            many = gc.get_freeze_count()
            assert many > 10_000
            assert not any(found is kept for found in gc.get_objects())
            made = {"made": [1]}
            with unwalked_objects():
                assert any(found is made for found in gc.get_objects())
            # Not equal: other threads of the process may drop objects that they held when the run began.
            assert many // 2 < gc.get_freeze_count() <= many
            assert not any(found is kept for found in gc.get_objects())
            assert any(found is made for found in gc.get_objects())
        assert not gc.get_freeze_count()
        assert any(found is kept for found in gc.get_objects())

    def test_hold_for_a_run(self):
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
