"""A thread that dies or never comes back is reported, with where all threads are, instead of a silent hang."""

import copy
import re
import threading
import time

import faulty
import harness
import lightning.pytorch as pl
import pytest
from faulty import BATCHES, MODULE
from harness import Learner, ours
from patience import PATIENCE_S, longer_each_try, until
from torch import nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine import pool as engine_pool

# ----------------------------------------------------------------------------------------------------------------- dead


def end(thread):
    """Make a thread's loop fail, outside of what it was given."""
    thread._tasks.put("no task")


class End(pl.Callback):
    """Ends one of the engine's threads at the start of batch ``batch`` or a little later; -1: of a validation batch."""

    def __init__(self, which, batch, after_s=0.0):
        self.which, self.batch, self.after_s = which, batch, after_s
        self.at = 0.0

    def _end(self, engine):
        pool = engine.context.pool
        thread = pool.workers[1].sender if self.which == "worker" else pool.thread(1)
        threading.Timer(self.after_s, end, [thread]).start() if self.after_s else end(thread)
        self.at = time.monotonic() + self.after_s

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self._end(trainer.strategy._engine)

    def on_validation_batch_start(self, trainer, *_):
        if self.batch < 0:
            self._end(trainer.strategy._engine)


@pytest.mark.parametrize(("which", "batch", "after_s"), [("worker", 2, 0.01), ("microbatch", 2, 0), ("worker", -1, 0)])
def test_a_dead_thread_is_reported(which, batch, after_s):
    ended = End(which, batch, after_s)
    trainer = harness.trainer_of(faulty.strategy(), devices=2, callbacks=[ended], num_sanity_val_steps=1)
    module = copy.deepcopy(MODULE)
    # So many that a thread which dies a little later does so while they are trained.
    batches = BATCHES * (1000 if after_s else 1)
    with pytest.raises(RoundPipeError) as caught:
        trainer.fit(module, harness.loader(batches), harness.loader(BATCHES[:1]))
    assert time.monotonic() - ended.at < faulty.WITHIN_S
    said = str(caught.value)
    died = "gradients" if which == "worker" else which
    assert re.match(rf"thread 'roundpipe-{died}\d' has died \(AttributeError", said), said
    for name in ("MainThread", "roundpipe-gradients0"):
        assert f"Thread {name!r}" in said
    assert isinstance(caught.value.__cause__, AttributeError)
    until(lambda: harness.roundpipe_threads() == [], "a thread is left")  # who closes waits a second, and no longer
    faulty.assert_nothing_left(module)
    if after_s:
        faulty.assert_trains()


# ---------------------------------------------------------------------------------------------------------------- stuck


class Stuck:
    """Where user code waits, once, for something that does not come.

    From then on the watchdog waits no longer than `LIMIT_S`; what is only slow before that is no reason to bark.
    """

    def __init__(self):
        self.where = ""
        self.worker_pool = None
        self.release = threading.Event()
        self.reached = threading.Event()

    def __call__(self, where):
        if where == self.where:
            self.where = ""
            self.reached.set()
            assert self.worker_pool._limit == PATIENCE_S, "the strategy's option"
            self.worker_pool._limit = LIMIT_S
            wait_for_nothing(self.release)


def wait_for_nothing(release):
    """Shows in the stacks."""
    release.wait(PATIENCE_S)


LIMIT_S = 0.5
STUCK = Stuck()


class StuckLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        STUCK("layer")
        return self.inner(x)


class StuckModule(Learner):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), StuckLayer(), nn.Linear(8, 5))

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        STUCK("user code")
        return nn.functional.cross_entropy(out, batch["y"])

    def validation_step(self, batch, batch_idx):
        self.net(batch["x"])


class StickAt(pl.Callback):
    """In the third batch; ``where`` is ``"validation"`` for a layer in the first batch of that."""

    def __init__(self, where):
        self.where = where

    def _stick(self, trainer, where):
        STUCK.where, STUCK.worker_pool, self.where = where, trainer.strategy._engine.context.pool, ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and self.where != "validation":
            self._stick(trainer, self.where)

    def on_validation_batch_start(self, trainer, *_):
        if self.where == "validation":
            self._stick(trainer, "layer")


@pytest.fixture
def stuck(monkeypatch):
    """Afterwards it is let go, and the thread that was left behind ends."""
    monkeypatch.setattr(engine_pool, "GRACE", 0.2)
    STUCK.release.clear()
    STUCK.reached.clear()
    yield STUCK
    STUCK.release.set()
    STUCK.worker_pool = None
    until(lambda: harness.roundpipe_threads() == [], "does not end when it is let go")


class GoOn(pl.Callback):
    """Lightning stops when a step fails; who goes on all the same is told what is wrong."""

    def __init__(self):
        self.refused = []

    def on_exception(self, trainer, *_):
        for step in (trainer.strategy.training_step, trainer.strategy.validation_step):
            with pytest.raises(RoundPipeError) as caught:
                step(BATCHES[0], 0)
            self.refused.append(str(caught.value))


@pytest.mark.parametrize("where", ["layer", "validation"])
def test_a_stuck_thread_is_reported(where, stuck):
    go_on, module = GoOn(), StuckModule()
    chosen = ours(num_microbatches=3, layers=["Linear", "StuckLayer"], watchdog_timeout=PATIENCE_S)
    trainer = harness.trainer_of(chosen, devices=2, callbacks=[StickAt(where), go_on])
    with pytest.raises(TimeoutError) as caught:
        trainer.fit(module, harness.loader(BATCHES), harness.loader(BATCHES[:1]))
    assert stuck.reached.is_set()
    said = str(caught.value)
    assert said.startswith("nothing happened for watchdog_timeout=0.5 seconds")
    assert "wait_for_nothing" in said, "no stack shows where it is stuck"
    assert "Thread 'MainThread'" in said and "Thread 'roundpipe-gradients" in said
    assert len(go_on.refused) == 2 and all("never came back" in text for text in go_on.refused)

    def as_expected():
        names = harness.roundpipe_threads()
        return len(names) <= 3 and all("worker" in name or "microbatch" in name for name in names)

    until(as_expected, "more is left behind than one stuck thread explains")
    if where == "layer":
        stuck.release.set()  # a layer that is stuck has a core, and this machine may have only one
        trainer.fit(module, harness.loader(BATCHES))


@longer_each_try
def test_what_is_slow_is_not_stuck(times):
    """The watchdog counts from the last thing that happened, not from the start of the step."""

    class Slow(StuckLayer):
        def forward(self, x):
            time.sleep(0.1 * times)
            return super().forward(x)

    module = StuckModule()
    module.net = nn.Sequential(nn.Linear(8, 8), Slow(), Slow(), nn.Linear(8, 5))
    chosen = ours(num_microbatches=3, layers=["Linear", "Slow"], watchdog_timeout=0.7 * times)
    trainer = harness.trainer_of(chosen, devices=1)
    start = time.monotonic()
    trainer.fit(module, harness.loader(BATCHES[:1]))
    assert time.monotonic() - start > 0.7 * times, "no step was longer than the watchdog's time"
