"""Ctrl-C at any time: training ends at once, in the way of plain Lightning, and nothing of it is left.

The signal is sent at random moments.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import faulty
import harness
import lightning.pytorch as pl
import pytest
from faulty import BATCHES, MODULE, PLANTED

VALIDATION = harness.loader(BATCHES[:1])


@pytest.fixture(autouse=True)
def _handler_restored() -> Iterator[None]:
    """What runs in the background is started with interrupts ignored, and Python then leaves it at that."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
    PLANTED.clear()


class Interrupted:
    """One training with an interrupt.

    Attributes:
        sent: when the signal was sent (monotonic); 0: never.
        ended: whether it ended the training.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.ended = False

    def send(self) -> None:
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    def run(self, sending: Callable[[Interrupted], contextlib.AbstractContextManager[Any]]) -> pl.Trainer:
        """Train while ``sending`` sends, and look at what is left; the trainer."""
        handler, child = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
        module = copy.deepcopy(MODULE)
        trainer = harness.trainer_of(faulty.strategy(), devices=2)
        with faulty.devices_made() as made:
            try:
                with harness.quiet(), sending(self):
                    trainer.fit(module, harness.loader(BATCHES), VALIDATION)
            except SystemExit as error:
                self.ended = True
                assert error.code == 1
                assert time.monotonic() - self.sent < faulty.WITHIN_S
                assert trainer.interrupted, "Lightning was not the one who ended it"
            # Lightning ignores further interrupts while it shuts down; with some versions that is how it stays.
            assert signal.getsignal(signal.SIGINT) in (handler, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGCHLD) is child
            faulty.gc.collect()
            faulty.assert_nothing_left(module, made)
        signal.signal(signal.SIGINT, handler)
        return trainer


def trains_again(trainer: pl.Trainer) -> None:
    """With the same strategy, from the start; Lightning's loops would go on from where they were interrupted."""
    trainer.fit_loop = type(trainer.fit_loop)(trainer, max_epochs=1)
    module = copy.deepcopy(MODULE)
    with harness.quiet():
        trainer.fit(module, harness.loader(BATCHES), VALIDATION)
    harness.assert_tensors_same(faulty.plainly().state, dict(module.state_dict()))


# ------------------------------------------------------------------------------------------------------ at random times


@contextlib.contextmanager
def undisturbed(run: Interrupted) -> Iterator[None]:
    yield


@contextlib.contextmanager
def after(seconds: float, run: Interrupted) -> Iterator[None]:
    timer = threading.Timer(seconds, run.send)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def at_random_times(wanted: int, seed: int) -> None:
    """Until ``wanted`` signals have ended a training. How long one takes changes with what else the machine does."""
    draw = random.Random(seed)
    whole = 0.0
    ended = tries = 0
    while ended < wanted:
        tries += 1
        assert tries <= 20 * wanted, f"only {ended} of them came in time"
        run = Interrupted()
        start = time.monotonic()
        try:
            trainer = run.run(functools.partial(after, draw.uniform(0.02, 0.9 * whole)) if whole else undisturbed)
        except KeyboardInterrupt:
            continue  # before fit, or behind it
        except RuntimeError as error:
            if "iter(combined_loader)" not in str(error) or not isinstance(error.__context__, KeyboardInterrupt):
                raise
            continue  # while Lightning begins to iterate: its own teardown raises then, whatever the strategy
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not run.ended:
            whole = time.monotonic() - start
        ended += run.ended
        if run.ended and ended % 4 == 1:
            trains_again(trainer)
    faulty.assert_trains()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_at_random_times() -> None:
    at_random_times(20, seed=1)
