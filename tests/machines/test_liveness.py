"""What a machine makes of the others' messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines import liveness
from lightning_roundpipe.machines.liveness import EXIT, Liveness, MachineError


class Board:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.broken = False

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("Broken pipe\nat a place in C++")
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.005)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Board, list[Liveness], list[int]]]]:
    """Makes two machines on one board, and notes with what status they end their processes."""
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    monkeypatch.setattr(liveness, "STALL", 0.1)
    monkeypatch.setattr(liveness, "SILENCE", 0.3)
    made: list[Liveness] = []

    def make(timeout: float = 1.0, begin: bool = True) -> tuple[Board, list[Liveness], list[int]]:
        board, left = Board(), list[int]()
        made.extend(Liveness(board, rank, ["a", "b"], timeout, left.append) for rank in (0, 1))
        for one in made:
            one.enter()
        for one in made if begin else ():
            one.begin()
        return board, made, left

    yield make
    for one in made:
        one.failure = None  # or the process would end with it
        one.end()


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("spilled\n  twice"), "ValueError: spilled twice"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_an_error_reaches_the_others_before_its_machine_ends(error: BaseException, said: str, pair: Any) -> None:
    _, (first, second), left = pair(timeout=30.0)
    second.fail(error)
    with pytest.raises(MachineError, match=rf"machine 1 \(b\) has failed: {said}$"):
        first.check()
    assert not left
    with pytest.raises(RoundPipeError, match="an earlier run of this process on several machines has failed"):
        first.begin()


def test_a_machine_that_is_silent_has_failed(pair: Any) -> None:
    _, (first, second), left = pair(timeout=4.0)
    second.end()
    until(lambda: first.failure)
    with pytest.raises(MachineError, match=r"machine 1 \(b\) has not answered for .*machine_timeout"):
        first.check()
    time.sleep(2.5)
    assert not left, "the main thread knows, and ends by itself"


def test_a_main_thread_that_nothing_reaches_is_ended(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, (_, second), left = pair(timeout=0.4)
    second.end()
    until(lambda: left)
    assert left == [EXIT]
    assert "roundpipe: machine 1 (b) has not answered" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_does_not_come_back(rank: int, pair: Any) -> None:
    """The machine that keeps it was stopped, or the network was down, and the only thread waited in it for ever."""
    board, machines, left = pair(timeout=1.0)
    until(lambda: machines[rank]._beats[0])
    goes_on = threading.Event()
    board.set = lambda *_: goes_on.wait(20)
    began = time.monotonic()
    until(lambda: machines[rank].failure and left)
    assert time.monotonic() - began < 15
    keeper = r"machine 0 \(a\)" if rank else "this machine"
    with pytest.raises(MachineError, match=f"{keeper}, which keeps the job's store, has not answered for .*network is"):
        machines[rank].check()
    machines[rank].fail(ValueError("the same"))
    goes_on.set()


def test_a_broken_connection_is_explained_by_what_comes_later(pair: Any) -> None:
    _, (first, second), _ = pair(timeout=30.0)
    threading.Timer(0.1, second.fail, (KeyError("lost"),)).start()
    error = first.explain(RuntimeError("Connection reset"), "the gradients")
    assert "machine 1 (b) has failed: KeyError" in str(error)


def test_machines_that_wait_for_different_things_are_stuck(pair: Any) -> None:
    _, (first, second), _ = pair(timeout=30.0)
    over = threading.Event()

    def wait(one: Liveness, label: str) -> threading.Thread:
        def work() -> None:
            with one.waiting(label):
                over.wait(20)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    threads = [wait(first, "the gradients of bucket 3"), wait(second, "the end of the run")]
    until(lambda: first.failure and second.failure)
    over.set()
    for thread in threads:
        thread.join()
    assert "have come to different places" in str(first.failure)
    assert "the gradients of bucket 3" in str(first.failure) and "the end of the run" in str(first.failure)


def test_a_call_of_torch_distributed_is_a_wait(pair: Any) -> None:
    """Of user code, in the main thread: the same call has the same beginning each time that the thread looks."""
    code = "def broadcast(until):\n    while not until():\n        sum(range(1000))\n"
    called: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d"}
    exec(code, called)
    _, (first, second), _ = pair(timeout=30.0)
    with second.waiting("the gradients of bucket 3"):
        until_ = time.monotonic() + 20
        called["broadcast"](lambda: (first.failure and second.failure) or time.monotonic() > until_)
    assert "torch.distributed.broadcast()" in str(first.failure)


@pytest.mark.parametrize("theirs", ["the gradients of bucket 3", "the weights of bucket 1"])
def test_machines_that_all_wait_for_messages_have_no_network(theirs: str, pair: Any) -> None:
    """They waited for a day. What one of them has sent may be in the memory of its kernel, so it is ahead."""
    _, (first, second), _ = pair(timeout=1.0)
    with first.waiting("the gradients of bucket 3"), second.waiting(theirs):
        time.sleep(0.5)
        first.check()
        assert (
            first.says() == "For 1 seconds this machine has waited for the gradients of bucket 3 from other machines."
        )
        until(lambda: first.failure and second.failure)
    places = rf"machine 0 \(a\) waits for the gradients of bucket 3 and machine 1 \(b\) waits for {theirs}"
    with pytest.raises(MachineError, match=f"the network has stalled: .* for 1 seconds {places}"):
        first.check()
