"""Copies of weights in chunks on two streams in turn, between which activations pass; and steps that fail."""

import itertools
import threading
from collections import Counter

import fake_cuda
import pytest
import torch
from fake_cuda import FakeEvent, FakeStream
from patience import PATIENCE_S, join, start

from lightning_roundpipe.devices import StreamAborted
from lightning_roundpipe.devices.base import MAX_WAIT_S
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_chunks import MIN_CHUNK_BYTES
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream

RATE = 2 * MIN_CHUNK_BYTES / MAX_WAIT_S
"""Bytes a second of the link: a chunk is as small as they get."""


@pytest.fixture
def device(monkeypatch):
    fake_cuda.play_cuda(monkeypatch)
    device = CudaDevice(0, torch.device("cpu", 0), "off", sharers=1)
    for stream in (device.weights_up, device.gradients_down):
        stream.bytes_per_second = RATE
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: 1e6)  # which teaches no other rate
    fake_cuda.SYNCHRONIZED.clear()
    yield device
    device.close()


def test_no_thread_of_the_process_takes_part(device):
    src = torch.randint(256, (5 * MIN_CHUNK_BYTES + 7,)).to(torch.uint8)
    there, back = torch.zeros_like(src), torch.zeros_like(src)
    before = threading.active_count()
    device.weights_up.copy(there, src)
    arrived = device.weights_up.record(timed=True)
    device.gradients_down.wait(arrived)
    device.gradients_down.copy(back, there)
    assert isinstance(arrived, CudaEvent) and arrived.given is None, "other streams can wait for it at once"
    assert threading.active_count() <= before and fake_cuda.SYNCHRONIZED == []
    assert torch.equal(back, src)


def test_chunks_go_through_two_streams_in_turn(device, monkeypatch):
    """An engine that stays with a stream as long as it has work would let activations wait for the whole layer."""
    moved = []
    real = CudaStream.move

    def move(self, to, of):
        moved.append((fake_of(self), len(fake_of(self).waited)))
        real(self, to, of)

    monkeypatch.setattr(CudaStream, "move", move)
    src = torch.ones(20 * MIN_CHUNK_BYTES, dtype=torch.uint8)
    device.weights_up.copy(torch.zeros_like(src), src)
    lanes = [lane for lane, _ in moved]
    assert len(lanes) == 20 and all(one is not other for one, other in itertools.pairwise(lanes))
    waits = [[count for lane, count in moved if lane is mine] for mine in lanes[:2]]
    assert all(one < other for mine in waits for one, other in itertools.pairwise(mine)), (
        "each waits for the one before"
    )


def test_two_threads_chunks_do_not_mix(device, monkeypatch):
    """A worker's thread and the optimizer's upload at the same time."""
    order = []
    real = CudaStream.move

    def move(self, to, of):
        order.append(int(of[0]))
        real(self, to, of)

    monkeypatch.setattr(CudaStream, "move", move)

    def copies(value):
        for _ in range(10):
            src = torch.full((7 * MIN_CHUNK_BYTES,), value, dtype=torch.uint8)
            device.weights_up.copy(torch.zeros_like(src), src)

    join(start(lambda: copies(1), lambda: copies(2)))
    runs = [len(list(group)) for _, group in itertools.groupby(order)]
    assert Counter(order) == {1: 70, 2: 70}
    assert all(length % 7 == 0 for length in runs), runs


class TestFailures:
    def test_an_abort_between_two_chunks(self, device, monkeypatch):
        """The rest does not come, what is on its way keeps its memory until the GPU rests, and then all is well."""
        stream, moved = device.weights_up, list[int]()
        real = CudaStream.move

        def move(self, to, of):
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


class TestPageable:
    """CUDA holds up who copies from or to it."""

    @pytest.fixture(autouse=True)
    def pageable(self, monkeypatch, device):
        """``pinned`` is where it is not."""
        self.pinned = torch.ones(3 * MIN_CHUNK_BYTES, dtype=torch.uint8)
        self.gate = threading.Event()
        self.movers = []
        real = CudaStream.move
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() == self.pinned.data_ptr())

        def move(stream, to, of):
            first = self.pinned.data_ptr()
            if of.numel() and not first <= of.data_ptr() < first + self.pinned.numel():
                assert self.gate.wait(PATIENCE_S)
            self.movers.append(threading.current_thread().name)
            real(stream, to, of)

        monkeypatch.setattr(CudaStream, "move", move)

    def test_a_thread_is_held_up_and_not_the_caller(self, device):
        stream, name = device.weights_up, device.weights_up.name
        there, src = torch.zeros(3 * MIN_CHUNK_BYTES, dtype=torch.uint8), torch.full_like(self.pinned, 2)
        stream.copy(there, self.pinned)
        assert set(self.movers) == {"MainThread"}
        stream.copy(there, src)
        event = stream.record(timed=True)
        stream.copy(torch.zeros_like(src), self.pinned)  # behind it
        assert event.given is not None
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
        assert fake_of(device.compute).waited[-1] is event.event

    def test_an_abort_wakes_who_waits_for_it(self, device):
        stream, src = device.weights_up, torch.ones(8, dtype=torch.uint8)
        stream.copy(torch.zeros_like(src), src)
        event, raised = stream.record(), list[BaseException]()

        def wait():
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


def fake_of(stream):
    fake = stream.stream
    assert isinstance(fake, FakeStream)
    return fake
