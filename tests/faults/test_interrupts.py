"""Signals wait for a place where they do no harm."""

import signal
import threading

import pytest
from patience import PATIENCE_S
from torch import nn

from lightning_roundpipe.faults.interrupts import deliver_interrupts, interrupts_deferred
from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.host_layer import host_layers


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


def test_it_comes_at_a_point_and_not_between():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        press()
        reached.append("waiting")
        deliver_interrupts()
        reached.append("too far")
    assert reached == ["waiting"]


def test_whoever_leaves_is_not_interrupted_again():
    """The one who was waiting cleans up: until that is done, the next one is held back."""
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        try:
            press()
            deliver_interrupts()
        finally:
            press()
            cleaned.append("all")
    assert cleaned == ["all"]


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
        deliver_interrupts()
        assert seen == [signal.SIGCHLD] * 2
        child_died()
        assert len(seen) == 2
    assert len(seen) == 3
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_handlers_that_may_save_are_called_at_the_end():
    """In the order of their signals, and not while the engine waits, which others may interrupt."""
    seen = []
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: seen.append(number))
    with interrupts_deferred():
        for waits in (1, 2):
            signal.raise_signal(signal.SIGUSR1)
            child_died()
            deliver_interrupts()
            assert seen == [signal.SIGCHLD] * waits
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
            with interrupts_deferred():
                inside.set()
                done.wait(PATIENCE_S)
                deliver_interrupts()
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


class Going:
    def __del__(self):
        press()


def test_an_interrupt_is_not_lost_in_a_finalizer():
    """What is raised there Python prints, and goes on."""
    order = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        Going()
        order.append("goes on")
        deliver_interrupts()
        order.append("not reached")
    assert order == ["goes on"]


def test_it_comes_between_layers_of_which_weights_are_moved(device):
    """That takes long for a large model. Each layer is whole: in a buffer, or where it was."""
    layers = {name: nn.Linear(3, 3) for name in "ab"}
    places = [layer.weight.data_ptr() for layer in layers.values()]

    def one_by_one():
        for name, layer in layers.items():
            yield name, layer
            press()

    class Slowly(dict):
        def items(self):
            return one_by_one()

    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        host_layers(Slowly(layers), device, Formats(), double_buffered=False, mapped=())
    moved = [layer.weight.data_ptr() != place for layer, place in zip(layers.values(), places, strict=True)]
    assert moved == [True, False]
