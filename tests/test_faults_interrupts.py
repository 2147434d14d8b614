"""Ctrl-C at any time: training ends at once, in the way of plain Lightning, and nothing of it is left.

The signal is sent when the main thread comes to a given line of the package, so that no line is left out by luck.
"""

import contextlib
import copy
import functools
import inspect
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import faulty
import harness
import pytest
from faulty import BATCHES, MODULE, PLANTED

import lightning_roundpipe
from lightning_roundpipe.engine import planner

PACKAGE = str(Path(lightning_roundpipe.__file__).parent)
VALIDATION = harness.loader(BATCHES[:1])


@pytest.fixture(autouse=True)
def _handler_restored():
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

    def __init__(self):
        self.sent = 0.0
        self.ended = False

    def send(self):
        self.sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    def run(self, sending, **options):
        """Train while ``sending`` sends, and look at what is left; the trainer."""
        handler, child = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
        module = copy.deepcopy(MODULE)
        trainer = harness.trainer_of(faulty.strategy(**options), devices=2)
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


# ------------------------------------------------------------------------------------------- at any line of the package


WORKING = {
    "strategy.py": ("_start_engine", "_stop_engine"),
    "engine.py": ("train_window", "_prepare", "_failing", "_drain", "_end", "settle"),
    "step.py": ("run", "_begin", "_rest", "drain", "release", "result", "_finish"),
    "pool.py": ("rest", "close", "_close_devices", "wait"),
    "evaluation.py": ("begin", "start", "wait_for", "show", "end"),
    "randomness.py": ("park", "restore"),
    "sync.py": ("acquire", "release"),
    "async_optimizer.py": ("begin", "submit", "settle"),
    "report.py": ("report_of",),
    "interception.py": ("install", "remove", "intercepted", "without_caches"),
    "interrupts.py": ("interrupts_deferred", "install", "remove"),
    "worker.py": ("close", "reserve"),
    "emulated.py": ("close", "allocate"),
    "base.py": ("free",),
}
"""Functions that must not be left in the middle: most of what the main thread does is none of these."""


class Lines:
    """Counts the lines of the package that the main thread comes to, and sends the signal at one of them.

    Args:
        at: the line, and how many times it is passed before.
    """

    def __init__(self, run, at=None):
        self.seen = Counter()
        self._run, self._at = run, at

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _call(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or (self._at and self._at[0][1] != code.co_name):
            return None
        return self._line

    def _line(self, frame, event, arg):
        if event != "line" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return self._line  # it may be thrown away half-way, as by any(): what is raised there Python only prints
        site = (Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno)
        if self._at == (site, self.seen[site]) and not self._run.sent:
            self._run.send()
        self.seen[site] += 1
        return self._line


def working():
    """A line of each function that must not be left in the middle."""
    draw = random.Random(0)
    functions = [(file, name) for file, names in WORKING.items() for name in names]
    return [draw.choice([site for site in sites() if site[:2] == function]) for function in functions]


@functools.cache
def sites():
    """All lines of undisturbed runs, and how often they were passed: in each, or only a busy machine comes there."""
    counted = []

    def counting(run):
        counted.append(Lines(run))
        return counted[-1]

    for _ in range(2):
        Interrupted().run(counting)
    one, two = (lines.seen for lines in counted)
    return dict(one & two)


def at_lines(chosen, seed):
    """A line that is passed while somebody waits is passed more or less often: then at an earlier time."""
    draw = random.Random(seed)
    sent = 0
    for number, site in enumerate(chosen):
        passed, run = sites()[site], Interrupted()
        while passed and not run.sent:
            passed = draw.randrange(passed)
            trainer = run.run(lambda run, at=(site, passed): Lines(run, at))
            assert run.ended or not run.sent, f"{site}: nothing ended"
        sent += bool(run.sent)
        if number % 8 == 0:
            faulty.trains_again(trainer, val_dataloaders=VALIDATION)
    assert sent > 0.8 * len(chosen), "there are lines that are not always passed, but not many"
    faulty.assert_trains()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wherever_the_engine_works_and_elsewhere():
    at_lines([*working(), *random.Random(1).sample(sorted(sites()), 24)], seed=1)


def test_a_search_for_a_plan_is_interrupted_between_plans(monkeypatch):
    run, reached, own = Interrupted(), [], planner.search_partition

    def search(*args):
        run.send()
        reached.append("the search")
        own(*args)
        reached.append("its end")

    monkeypatch.setattr(planner, "search_partition", search)
    monkeypatch.setattr(planner, "WORTH_S", 0.0)
    run.run(contextlib.nullcontext, plan=None)
    assert run.ended and reached == ["the search"]
