"""What a machine makes of the others' messages."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S, until

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines import liveness
from lightning_roundpipe.machines.liveness import EXIT, Liveness, MachineError

STEP_S = 0.1
"""Seconds of the tests' clock in which every machine that lives is heard of."""


class Board:
    """A store in this process."""

    def __init__(self):
        self.values = {}
        self.writes = Counter()

    def set(self, key, value):
        self.values[key] = value
        self.writes[key] += 1

    def get(self, key):
        return self.values[key].encode()

    def check(self, keys):
        return all(key in self.values for key in keys)


class Pair:
    """Two machines on one board, and a clock that goes on only when a test says so.

    Attributes:
        left: the status with which each machine has ended its process.
        silent: the machines that write nothing any more.
        asleep: what happens while a machine sleeps.
    """

    def __init__(self, patch, timeout):
        self.now, self.board, self.left, self.silent = 100.0, Board(), list[int](), set[int]()
        self.asleep = lambda: self.advance(STEP_S)
        self._looks = Counter()
        look = Liveness._look_for_stuck

        def counted(one, *args):
            look(one, *args)
            self._looks[one._rank] += 1

        patch.setattr(Liveness, "_look_for_stuck", counted)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: self.asleep())
        patch.setattr(liveness, "time", clock)
        self.machines = [Liveness(self.board, rank, ["a", "b"], timeout, self.left.append) for rank in (0, 1)]
        for one in self.machines:
            one.enter()
        for one in self.machines:
            one.begin()
        self.settle()

    def advance(self, seconds):
        """Let time pass, in steps in which each machine that lives says so and looks at the others."""
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.settle()

    def settle(self):
        """Wait until each machine has written, then read what the others wrote, and then looked at that."""
        before = self.board.writes.copy()
        for rank in {0, 1} - self.silent:
            key = f"roundpipe/beat/{rank}"
            until(lambda key=key: self.board.writes[key] >= before[key] + 3)
        looks = self._looks.copy()
        for rank in (0, 1):
            until(lambda rank=rank: self._looks[rank] >= looks[rank] + 2 or self._ended(rank))

    def _ended(self, rank):
        return not any("liveness" in thread.name and thread.is_alive() for thread in self.machines[rank]._threads)

    def silence(self, rank):
        """A machine ends without a word."""
        self.machines[rank].end()
        self.silent.add(rank)


@pytest.fixture
def pair(monkeypatch):
    """Makes a `Pair`, of machines with that timeout."""
    for name, seconds in {"BEAT": 0.002, "STALL": 1.0, "SILENCE": 3.0, "LAST_WORDS": PATIENCE_S}.items():
        monkeypatch.setattr(liveness, name, seconds)
    made = []

    def make(timeout):
        made.append(Pair(monkeypatch, timeout))
        return made[-1]

    yield make
    for one in made[-1].machines:
        one.failure = None  # or the process would end with it
        one.end()


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("spilled\n  twice"), "ValueError: spilled twice"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_an_error_reaches_the_others_before_its_machine_ends(error, said, pair):
    both = pair(2 * PATIENCE_S)
    first, second = both.machines
    second.fail(error)
    with pytest.raises(MachineError, match=rf"machine 1 \(b\) has failed: {said}$"):
        first.check()
    assert not both.left
    with pytest.raises(RoundPipeError, match="an earlier run of this process on several machines has failed"):
        first.begin()


def test_a_machine_that_is_silent_has_failed(pair):
    both = pair(4.0)
    first, _ = both.machines
    both.silence(1)
    both.advance(1.8)
    assert first.failure is None
    both.advance(0.4)
    with pytest.raises(MachineError, match=r"machine 1 \(b\) has not answered for .*machine_timeout"):
        first.check()
    both.advance(2.5)
    assert not both.left, "the main thread knows, and ends by itself"


def test_a_main_thread_that_nothing_reaches_is_ended(pair, capsys):
    both = pair(2.0)
    both.silence(0)
    both.advance(1.8)
    assert not both.left
    both.advance(0.5)
    assert both.left == [EXIT]
    assert "roundpipe: machine 0 (a) has not answered" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_does_not_come_back(rank, pair):
    """The machine that keeps it was stopped, or the network was down, and the only thread waited in it for ever."""
    both, goes_on = pair(2.0), threading.Event()
    both.board.set = lambda *_: goes_on.wait()
    both.silent = {0, 1}
    machine = both.machines[rank]
    both.advance(2.5)
    assert both.left == [EXIT] * 2, "nobody was told"
    keeper = r"machine 0 \(a\)" if rank else "this machine"
    with pytest.raises(MachineError, match=f"{keeper}, which keeps the job's store, has not answered for .*network is"):
        machine.check()
    machine.fail(ValueError("the same"))
    goes_on.set()


def test_a_broken_connection_is_explained_by_what_comes_later(pair):
    both = pair(2 * PATIENCE_S)
    first, second = both.machines

    def fail():
        second.fail(KeyError("lost"))
        both.silence(1)
        both.asleep = lambda: both.advance(STEP_S)

    both.asleep = fail
    error = first.explain(RuntimeError("Connection reset"), "the gradients")
    assert "machine 1 (b) has failed: KeyError" in str(error)


def test_machines_that_wait_for_different_things_are_stuck(pair):
    both = pair(30.0)
    first, second = both.machines
    with first.waiting("the gradients of bucket 3"), second.waiting("the end of the run"):
        both.advance(0.8)
        assert first.failure is second.failure is None
        both.advance(0.4)
    assert "have come to different places" in str(first.failure) and second.failure
    assert "the gradients of bucket 3" in str(first.failure) and "the end of the run" in str(first.failure)


def test_a_call_of_torch_distributed_is_a_wait(pair):
    """Of user code, in the main thread: the same call has the same beginning each time that the thread looks."""
    code = "def broadcast(until):\n    while not until():\n        pass\n"
    called = {"__name__": "torch.distributed.distributed_c10d"}
    exec(code, called)
    both = pair(30.0)
    first, second = both.machines
    ends = both.now + 10

    def over():
        both.advance(STEP_S)
        return (first.failure and second.failure) or both.now > ends

    with second.waiting("the gradients of bucket 3"):
        called["broadcast"](over)
    assert "torch.distributed.broadcast()" in str(first.failure)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("the gradients of bucket 3", "the gradients of bucket 3"),
        ("the gradients of bucket 3", "the weights of bucket 1"),
        ("a decision int64", "a decision int64"),
    ],
)
def test_machines_that_all_wait_for_messages_have_no_network(mine, theirs, pair):
    """They waited for a day. What one of them has sent may be in the memory of its kernel, so it is ahead."""
    both = pair(1.0)
    first, second = both.machines
    with first.waiting(mine, bounded=True), second.waiting(theirs, bounded=True):
        both.advance(0.8)
        first.check()
        assert first.says() == f"For 1 seconds this machine has waited for {mine} from other machines."
        both.advance(0.4)
    places = rf"machine 0 \(a\) waits for {mine} and machine 1 \(b\) waits for {theirs}"
    with pytest.raises(MachineError, match=f"the network has stalled: .* for 1 seconds {places}"):
        first.check()


def test_a_message_of_any_size_takes_longer(pair):
    both = pair(0.5)
    first, second = both.machines
    with first.waiting("the mean of a value"), second.waiting("the mean of a value", bounded=True):
        both.advance(4.5)
        first.check()
        both.advance(1.0)
    assert "the network has stalled" in str(first.failure)
