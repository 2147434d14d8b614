"""Signals wait for a place where they do no harm."""

import signal
import threading
import weakref

import pytest
from patience import PATIENCE_S

from lightning_roundpipe.faults.interrupts import interrupts_allowed, interrupts_deferred


def press():
    signal.raise_signal(signal.SIGINT)


def child_died():
    signal.raise_signal(signal.SIGCHLD)


@pytest.fixture(autouse=True)
def handlers():
    """Put back what was there, and see to it that the tests did."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.getsignal(signal.SIGINT)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after in (signal.default_int_handler, signal.SIG_IGN), after


@pytest.mark.parametrize("before", [False, True])
def test_it_comes_where_it_may(before):
    """Also one that came before that."""
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        if before:
            press()
        reached.append("waiting")
        with interrupts_allowed():
            press()
            reached.append("too far")
        reached.append("too far")
    assert reached == ["waiting"]


def test_whoever_leaves_is_not_interrupted_again():
    """The one who was waiting cleans up: until that is done, the next one is held back."""
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        try:
            with interrupts_allowed():
                try:
                    press()
                finally:
                    press()
                    cleaned.append("inside")
        except KeyboardInterrupt:
            cleaned.append("outside")
    assert cleaned == ["inside", "outside"]


def test_a_second_one_does_not_wait():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        press()
        reached.append(1)
        press()
        reached.append(2)
    assert reached == [1]


def test_an_inner_one_ends_with_the_outer_one():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        with interrupts_deferred():
            press()
        reached.append("outer")
    assert reached == ["outer"]


def test_other_handlers_are_called_with_their_signal():
    """torch's data loader raises from a handler for SIGCHLD."""
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731 - compared below
    signal.signal(signal.SIGCHLD, handler)
    with interrupts_deferred():
        child_died()
        child_died()
        assert seen == []
        with interrupts_allowed():
            assert seen == [signal.SIGCHLD] * 2
            child_died()
            assert len(seen) == 3
        child_died()
        assert len(seen) == 3
    assert len(seen) == 4
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_handlers_that_may_save_are_called_at_the_end():
    """In the order of their signals, and not while the engine waits, which others may interrupt."""
    seen = []
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: seen.append(number))
    with interrupts_deferred():
        with interrupts_allowed():
            signal.raise_signal(signal.SIGUSR1)
            child_died()
            assert seen == [signal.SIGCHLD]
        signal.raise_signal(signal.SIGUSR1)
        child_died()
        with interrupts_allowed():
            assert seen == [signal.SIGCHLD] * 2
    assert seen == [signal.SIGCHLD] * 2 + [signal.SIGUSR1] * 2
    signal.raise_signal(signal.SIGUSR1)
    assert len(seen) == 5


def test_it_may_come_while_handlers_are_put_back(monkeypatch):
    """At every one of them, and though there is one already."""
    real = signal.signal
    child = signal.getsignal(signal.SIGCHLD)
    for moment in range(4):
        for earlier in (False, True):
            steps = iter(range(100))

            def put(*args, steps=steps, moment=moment):
                if next(steps) == moment:
                    press()
                return real(*args)

            with pytest.raises(KeyboardInterrupt):
                with interrupts_deferred():
                    if earlier:
                        press()
                    monkeypatch.setattr(signal, "signal", put)
                monkeypatch.undo()
                press()  # where it was too late for this moment
            monkeypatch.undo()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGCHLD) is child


def test_other_threads_have_nothing_to_do_with_it():
    inside, done = threading.Event(), threading.Event()
    failed = []

    def work():
        try:
            with interrupts_deferred(), interrupts_allowed():
                inside.set()
                done.wait(PATIENCE_S)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        press()
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        press()
        done.set()
        thread.join()
    assert not failed


class Thing:
    """May be referred to weakly."""


class Going:
    def __init__(self, order):
        self.order = order

    def __del__(self):
        self.order.append("begins")
        press()
        self.order.append("ends")


@pytest.mark.parametrize("way", ["finalizer", "del"])
def test_an_interrupt_is_not_lost_in_a_finalizer(way):
    """What is raised there Python prints, and goes on."""
    order = []

    def goes():
        order.append("begins")
        press()
        order.append("ends")

    def user_code():
        thing = Going(order) if way == "del" else Thing()
        if way == "finalizer":
            weakref.finalize(thing, goes)
        del thing

    with pytest.raises(KeyboardInterrupt), interrupts_deferred(), interrupts_allowed():
        user_code()
        order.append("goes on")
        with interrupts_allowed():  # as when it calls a layer
            order.append("not reached")
    assert order == ["begins", "ends", "goes on"]
