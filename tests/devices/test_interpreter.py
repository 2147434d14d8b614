"""The interpreter's switch interval: short while a step runs on GPUs, and what it was whenever none does."""

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


WITHIN = []
"""The interval in steps, on the threads that run them."""


class Looks(pl.Callback):
    """The interval between steps."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.between = []

    def on_train_epoch_start(self, *_):
        self.between.append(now())

    on_validation_start = on_validation_end = on_train_epoch_end = on_train_epoch_start


class Module(zoo.PlainClassifier):
    fails_at = -1

    def training_step(self, batch, batch_idx):
        WITHIN.append(now())
        if batch_idx == self.fails_at:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        WITHIN.append(now())
        return super().validation_step(batch, batch_idx)


class Manual(Module):
    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        WITHIN.append(now())
        loss, _ = self.loss_and_logits(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def fit(kind, **options):
    looks, batches = Looks(), zoo.make_batches("mlp", 4)
    WITHIN.clear()
    strategy = ours(**{"num_microbatches": 2, **options})
    module = kind(zoo.MLP())
    run(strategy, module, batches, devices=2, callbacks=[looks], val_batches=batches[:2], watch=False)
    return looks


@pytest.fixture
def short():
    """As the interpreter rounds it."""
    with quick_switches():
        return now()


@pytest.mark.parametrize(
    ("kind", "options"), [(Module, {}), (Module, {"staleness": 1}), (Manual, {"num_microbatches": 1})]
)
def test_it_is_short_in_steps_and_nowhere_else(kind, options, gpus, short):
    looks = fit(kind, **options)
    assert len(WITHIN) >= 6
    assert set(WITHIN) == {short}
    assert looks.between and set(looks.between) == {USUAL}
    assert now() == USUAL
