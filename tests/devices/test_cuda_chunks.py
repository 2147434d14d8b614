"""Copies of weights in chunks: who waits for whom on a copy engine, and what becomes of them when a step fails.

What was asked of a played CUDA is played a second time on a copy engine that takes time, and that chooses between
streams in one of several ways: which one a GPU's is nobody says.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import FakeEvent, FakeStream
from patience import PATIENCE_S, join, start, until

from lightning_roundpipe.devices import StreamAborted
from lightning_roundpipe.devices.copy_priority import MAX_WAIT_S, MIN_CHUNK_BYTES
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_chunks import FIRST_GUESS, ChunkedCopyStream, QueuedEvent
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream

RATE = 2 * MIN_CHUNK_BYTES / MAX_WAIT_S
"""Bytes a second of the link: a chunk is as small as they get."""
CHUNK_S = MAX_WAIT_S / 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    fake_cuda.play_cuda(monkeypatch)
    device = CudaDevice(0, torch.device("cpu", 0), "off", sharers=1)
    for stream in (device.weights_up, device.gradients_down):
        stream.bytes_per_second = RATE
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: 1e6)  # which teaches no other rate
    fake_cuda.SYNCHRONIZED.clear()
    yield device
    device.close()


@dataclass
class Work:
    """What a stream was asked for: a copy, an event to record, or one to wait for."""

    kind: str
    what: Any
    earliest: float = 0.0


@dataclass
class Copied:
    stream: str
    asked: float
    began: float
    ended: float


@dataclass
class Issued:
    """What the driver has been given, by stream; ``now``: when."""

    streams: dict[FakeStream, list[Work]] = field(default_factory=dict)
    now: float = 0.0

    def follow(self, patch: pytest.MonkeyPatch) -> None:
        real_record, real_wait, real_move = FakeEvent.record, FakeStream.wait_event, CudaStream.move

        def record(event: FakeEvent, stream: FakeStream) -> None:
            real_record(event, stream)
            self._add(stream, "record", event)

        def wait_event(stream: FakeStream, event: FakeEvent) -> None:
            real_wait(stream, event)  # which refuses an event that nobody has recorded
            self._add(stream, "wait", event)

        def move(stream: CudaStream, to: torch.Tensor, of: torch.Tensor) -> None:
            real_move(stream, to, of)
            fake: Any = stream.stream
            fake.name = stream.name.rpartition("-")[2]
            self._add(fake, "copy", of.numel() * of.element_size())

        patch.setattr(FakeEvent, "record", record)
        patch.setattr(FakeStream, "wait_event", wait_event)
        patch.setattr(CudaStream, "move", move)

    def _add(self, stream: FakeStream, kind: str, what: Any) -> None:
        self.streams.setdefault(stream, []).append(Work(kind, what, self.now))


Choose = Callable[[list[int], int, dict[int, float]], int]


def first_come(ready: list[int], last: int, since: dict[int, float]) -> int:
    return min(ready, key=lambda stream: since[stream])


def in_turn(ready: list[int], last: int, since: dict[int, float]) -> int:
    return min(ready, key=lambda stream: (stream <= last, stream))


def the_same_again(ready: list[int], last: int, since: dict[int, float]) -> int:
    """As long as it has something that is ready."""
    return last if last in ready else in_turn(ready, last, since)


def play(issued: Issued, choose: Choose) -> list[Copied]:
    """One copy after another on an engine that takes the next one from a stream which has one that is ready."""
    streams = list(issued.streams.items())
    left = [list(work) for _, work in streams]
    reached: set[int] = set()
    since: dict[int, float] = {}
    copied: list[Copied] = []
    now, last = 0.0, -1
    while any(left):
        moved = True
        while moved:  # what needs no engine
            moved = False
            for work in left:
                while work and work[0].kind != "copy" and (work[0].kind == "record" or id(work[0].what) in reached):
                    reached.add(id(work.pop(0).what))
                    moved = True
        ready = [i for i, work in enumerate(left) if work and work[0].kind == "copy" and work[0].earliest <= now]
        for i in ready:
            since.setdefault(i, max(now if copied else 0.0, left[i][0].earliest))
        coming = [work[0].earliest for work in left if work and work[0].kind == "copy"]
        if not coming:
            break  # a wait for what was recorded elsewhere, such as a clock's stream
        if not ready:
            now = min(coming)
            continue
        last = choose(ready, last, since)
        work = left[last].pop(0)
        asked = since.pop(last)
        began, now = now, now + work.what / RATE
        # What came while this one was under way stands in line from then on.
        for i, others in enumerate(left):
            if i != last and others and others[0].kind == "copy" and others[0].earliest <= now:
                since.setdefault(i, others[0].earliest)
        copied.append(Copied(streams[last][0].name, asked, began, now))
    return copied


POLICIES: list[Choose] = [first_come, in_turn, the_same_again]


def longest_wait(device: CudaDevice, direction: str, choose: Choose, patch: pytest.MonkeyPatch) -> float:
    """Of activations that come at any time while two layers of weights, or gradients, are on their way."""
    issued, longest = Issued(), 0.0
    with patch.context() as within:
        issued.follow(within)
        slow, fast = {"up": (device.weights_up, device.activations_up)}.get(
            direction, (device.gradients_down, device.activations_down)
        )
        large, small = torch.ones(20 * MIN_CHUNK_BYTES, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
        for _ in range(2):
            slow.copy(torch.zeros_like(large), large)
            slow.record(timed=True)
        for tenth in (1, 7, 84, 155, 333):
            issued.now = tenth * CHUNK_S / 10
            fast.copy(torch.zeros_like(small), small)
        copied = play(issued, choose)
    assert sum(c.stream == slow.name.rpartition("-")[2] for c in copied) == 40
    assert max(c.ended for c in copied) == pytest.approx(40 * CHUNK_S, rel=1e-3), "the link never rests"
    for c in copied:
        if c.stream.startswith("activations"):
            longest = max(longest, c.began - c.asked)
    return longest


@pytest.mark.parametrize("choose", POLICIES)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_activations_wait_no_longer_than_they_may(
    direction: str, choose: Choose, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all chunks of both layers are with the driver before the first activations come."""
    assert 0 < longest_wait(device, direction, choose, monkeypatch) <= MAX_WAIT_S * 1.001


def test_chunks_of_one_stream_would_hold_them_up(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine keeps to a stream that has more to do. So the test above can fail."""
    stream = device.weights_up
    stream._other = stream._last
    assert longest_wait(device, "up", first_come, monkeypatch) <= MAX_WAIT_S
    assert longest_wait(device, "up", the_same_again, monkeypatch) > 10 * MAX_WAIT_S


def test_no_thread_of_the_process_takes_part(device: CudaDevice) -> None:
    src = torch.randint(256, (5 * MIN_CHUNK_BYTES + 7,)).to(torch.uint8)
    there, back = torch.zeros_like(src), torch.zeros_like(src)
    before = threading.active_count()
    device.weights_up.copy(there, src)
    arrived = device.weights_up.record(timed=True)
    device.gradients_down.wait(arrived)
    device.gradients_down.copy(back, there)
    assert isinstance(arrived, CudaEvent), "other streams can wait for it at once"
    assert (threading.active_count(), fake_cuda.SYNCHRONIZED) == (before, [])
    assert torch.equal(back, src)


def test_what_is_copied_lives_until_its_last_chunk_is_there(device: CudaDevice) -> None:
    stream = device.weights_up
    for lane in stream.lanes:
        fake_of(lane).busy = True
    src = torch.ones(5 * MIN_CHUNK_BYTES, dtype=torch.uint8)
    storage = src.untyped_storage()._weak_ref()
    stream.copy(torch.zeros_like(src), src)
    del src
    last, other = fake_of(stream._last), fake_of(stream._other)
    try:
        other.busy = False
        stream.drop_finished()
        assert not torch.UntypedStorage._expired(storage)
        last.busy = False
        stream.drop_finished()
        assert torch.UntypedStorage._expired(storage)
    finally:
        torch.UntypedStorage._free_weak_ref(storage)


def test_two_threads_chunks_do_not_mix(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's thread and the optimizer's upload at the same time."""
    order: list[int] = []
    real = CudaStream.move

    def move(self: CudaStream, to: torch.Tensor, of: torch.Tensor) -> None:
        order.append(int(of[0]))
        real(self, to, of)

    monkeypatch.setattr(CudaStream, "move", move)

    def copies(value: int) -> None:
        for _ in range(10):
            src = torch.full((7 * MIN_CHUNK_BYTES,), value, dtype=torch.uint8)
            device.weights_up.copy(torch.zeros_like(src), src)

    join(start(lambda: copies(1), lambda: copies(2)))
    runs = [len(list(group)) for _, group in itertools.groupby(order)]
    assert Counter(order) == {1: 70, 2: 70}
    assert all(length % 7 == 0 for length in runs), runs


class TestRates:
    def test_chunks_grow_with_the_rate_that_was_seen(self, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        stream, src = device.weights_up, torch.ones(4 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        assert ChunkedCopyStream("new", stream.lanes, device._switch).bytes_per_second == FIRST_GUESS
        seconds = iter([src.numel() / (8 * RATE), 1.0, 0.0])
        monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: next(seconds) * 1e3)
        seen = []
        for _ in range(4):
            stream.copy(torch.zeros_like(src), src)
            seen.append(stream.bytes_per_second / RATE)
        assert seen == [1, pytest.approx(8), pytest.approx(8), pytest.approx(8)], "others only slow a link down"
        assert stream.chunk_bytes == pytest.approx(8 * MIN_CHUNK_BYTES)

    def test_nobody_waits_to_see_it(self, device: CudaDevice) -> None:
        stream, src = device.weights_up, torch.ones(4 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        for lane in stream.lanes:
            fake_of(lane).busy = True
        for _ in range(3):
            stream.copy(torch.zeros_like(src), src)
        assert (stream.bytes_per_second, fake_cuda.SYNCHRONIZED) == (RATE, [])


class TestFailures:
    def test_an_abort_between_two_chunks(self, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rest does not come, what is on its way keeps its memory until the GPU rests, and then all is well."""
        stream, moved = device.weights_up, list[int]()
        real = CudaStream.move

        def move(self: CudaStream, to: torch.Tensor, of: torch.Tensor) -> None:
            real(self, to, of)
            moved.append(of.numel())
            fake_of(self).busy = True
            if len(moved) == 3:
                device.abort()

        monkeypatch.setattr(CudaStream, "move", move)
        src = torch.ones(9 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        storage = src.untyped_storage()._weak_ref()
        try:
            with pytest.raises(StreamAborted):
                stream.copy(torch.zeros_like(src), src)
            assert len(moved) == 3
            del src
            assert not torch.UntypedStorage._expired(storage)
            device.reset()
            assert torch.UntypedStorage._expired(storage)
        finally:
            torch.UntypedStorage._free_weak_ref(storage)
        monkeypatch.setattr(CudaStream, "move", real)
        again = torch.ones(9 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        there = torch.zeros_like(again)
        stream.copy(there, again)
        stream.synchronize()
        assert torch.equal(there, again)

    def test_every_event_that_is_waited_for_has_been_recorded(
        self, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever comes between, all that the driver has comes to an end: it waits for earlier work alone."""
        issued = Issued()
        with monkeypatch.context() as patch:
            issued.follow(patch)
            src = torch.ones(9 * MIN_CHUNK_BYTES, dtype=torch.uint8)
            device.weights_up.copy(torch.zeros_like(src), src)
            device.abort()
            with pytest.raises(StreamAborted):
                device.weights_up.copy(torch.zeros_like(src), src)
            device.reset()
            device.weights_up.copy(torch.zeros_like(src), src)
        assert len(play(issued, in_turn)) == 18


class TestPageable:
    """CUDA holds up who copies from or to it."""

    @pytest.fixture(autouse=True)
    def pageable(self, monkeypatch: pytest.MonkeyPatch, device: CudaDevice) -> None:
        """``pinned`` is where it is not."""
        self.pinned = torch.ones(3 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        self.gate = threading.Event()
        self.movers: list[str] = []
        real = CudaStream.move
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() == self.pinned.data_ptr())

        def move(stream: CudaStream, to: torch.Tensor, of: torch.Tensor) -> None:
            first = self.pinned.data_ptr()
            if of.numel() and not first <= of.data_ptr() < first + self.pinned.numel():
                assert self.gate.wait(PATIENCE_S)
            self.movers.append(threading.current_thread().name)
            real(stream, to, of)

        monkeypatch.setattr(CudaStream, "move", move)

    def test_a_thread_is_held_up_and_not_the_caller(self, device: CudaDevice) -> None:
        stream, name = device.weights_up, device.weights_up.name
        there, src = torch.zeros(3 * MIN_CHUNK_BYTES, dtype=torch.uint8), torch.full_like(self.pinned, 2)
        stream.copy(there, self.pinned)
        assert set(self.movers) == {"MainThread"}
        stream.copy(there, src)
        event = stream.record(timed=True)
        stream.copy(torch.zeros_like(src), self.pinned)  # behind it
        assert isinstance(event, QueuedEvent)
        assert not event.done()
        waiting = start(lambda: device.compute.wait(event))
        with pytest.raises(RuntimeError, match="no time yet"):
            event.time()
        assert len(self.movers) == 3
        self.gate.set()
        join(waiting)
        event.wait()
        stream.synchronize()
        assert there.eq(2).all()
        assert event.time() > 0
        assert self.movers[3:] == [name] * 6
        recorded: Any = event.recorded
        assert fake_of(device.compute).waited[-1] is recorded.event

    def test_an_abort_wakes_who_waits_for_it(self, device: CudaDevice) -> None:
        stream, src = device.weights_up, torch.ones(8, dtype=torch.uint8)
        stream.copy(torch.zeros_like(src), src)
        event, raised = stream.record(), list[BaseException]()

        def wait() -> None:
            try:
                device.compute.wait(event)
            except StreamAborted as error:
                raised.append(error)

        waiting = start(wait)
        device.abort()
        join(waiting)
        assert len(raised) == 1
        self.gate.set()
        device.reset()
        stream.copy(torch.zeros_like(src), src)
        stream.synchronize()

    def test_an_error_reaches_who_comes_next(self, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(CudaStream, "move", fail)
        stream, src = device.weights_up, torch.ones(8, dtype=torch.uint8)
        stream.copy(torch.zeros_like(src), src)
        until(lambda: stream._error is not None)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            stream.record()

    def test_nothing_is_not_pageable(self, device: CudaDevice) -> None:
        device.weights_up.copy(torch.zeros(0), torch.zeros(0))
        assert isinstance(device.weights_up.record(), CudaEvent)


def fake_of(stream: Any) -> FakeStream:
    fake = stream.stream
    assert isinstance(fake, FakeStream)
    return fake
