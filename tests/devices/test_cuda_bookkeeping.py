"""What the CUDA half does besides calling CUDA: lifetimes, clocks, messages. A fake on the CPU plays CUDA.

That the calls are the right ones only a GPU can tell; ``test_cuda.py`` asks one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices import DeviceOutOfMemory, StreamAborted, cuda, cuda_streams
from lightning_roundpipe.devices.cuda import CudaDevice

GPU_CLOCK_AHEAD = 1234.5
"""Seconds by which the fake GPU's clock differs from the host's."""
NEAR_S = 10.0
"""Seconds that may pass between two looks at the clock: a machine may be busy."""


class FakeEvent:
    """Reached as soon as it is recorded, unless its stream is busy."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed = enable_timing
        self.stream: FakeStream | None = None
        self.at = 0.0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at = stream, time.perf_counter() + GPU_CLOCK_AHEAD

    def synchronize(self) -> None:
        assert self.stream is not None, "waited for an event that was never recorded"
        self.stream.busy = False

    def query(self) -> bool:
        return self.stream is not None and not self.stream.busy

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.timed and later.timed
        return (later.at - self.at) * 1e3


class FakeStream:
    """Counts what it is asked to wait for, and is busy when a test says so."""

    def __init__(self, torch_device: torch.device) -> None:
        self.device = torch.device("cuda", 0)
        self.busy = False
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None
        self.waited.append(event)

    def synchronize(self) -> None:
        self.busy = False


@contextmanager
def nothing(*args: object) -> Iterator[None]:
    yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    fakes: dict[str, Any] = {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": nothing,
        "device": nothing,
        "default_generators": (torch.Generator(),),
        "mem_get_info": lambda device: (600, 1000),
        "memory_reserved": lambda device: 200,
        "memory_allocated": lambda device: 150,
        "max_memory_allocated": lambda device: 180,
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    device = CudaDevice(0, torch.device("cpu", 0), "off", sharers=2)
    yield device
    device.close()


def fake_of(stream: object) -> FakeStream:
    assert isinstance(stream, cuda_streams.CudaStream)
    fake: Any = stream.stream
    assert isinstance(fake, FakeStream)
    return fake


def test_host_memory_lives_until_its_copy_is_done(device: CudaDevice) -> None:
    stream = device.weights_up
    host, arena = device.host_buffer(100), device.allocate(100, "weights")
    host.fill_(3)
    fake_of(stream).busy = True
    stream.copy(arena, host)
    assert arena.eq(3).all()
    assert isinstance(stream, cuda_streams.CudaStream)
    address = host.data_ptr()
    del host
    stream.copy(arena, arena.clone())
    assert address in [t.data_ptr() for _, tensors in stream._flying for t in tensors]
    stream.synchronize()
    assert not stream._flying
    device.free(arena)


def test_every_copy_stream_waits_before_it_uses_a_new_arena(device: CudaDevice) -> None:
    device.allocate(100, "weights")
    for stream in device.streams[1:]:
        assert [event.stream for event in fake_of(stream).waited] == [fake_of(device.compute)]


def test_waiting_passes_the_event_on(device: CudaDevice) -> None:
    event = device.activations_down.record()
    device.activations_up.wait(event)
    assert [e.stream for e in fake_of(device.activations_up).waited] == [fake_of(device.activations_down)]
    with device.activate(), device.compute.running(), device.permit(), device.saved_for_backward():
        pass
    with device.hold([torch.zeros(1)], "input"):
        pass


def test_times_are_the_hosts(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_of(device.compute).busy = True
    time.sleep(0.02)  # in another unit it would be far off
    before = time.perf_counter()
    event = device.compute.record(timed=True)
    after = time.perf_counter()
    with pytest.raises(RuntimeError, match="wait for it"):
        event.time()
    event.wait()
    assert before - NEAR_S < event.time() < after + NEAR_S
    reference = device._clock._reference
    monkeypatch.setattr(cuda_streams, "CLOCK_PERIOD", 0.0)
    assert before - NEAR_S < event.time() < after + NEAR_S  # before the new reference, and right all the same
    assert device._clock._reference is not reference
    with pytest.raises(RuntimeError, match="timed=True"):
        device.compute.record().time()


def test_memory_is_shared_out_and_explained(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.capacity() == 400  # (600 free + 200 reserved) for two workers
    assert (device.resident_bytes(), device.peak_bytes()) == (150, 180)
    device.reset_peak()
    arena = device.allocate(100, "weights")
    assert device.resident_by_purpose() == {"weights": 100, "other tensors": 50}

    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(300, "gradients")
    message = str(caught.value)
    assert "CUDA device 0 (worker 0) is out of memory: 300 B for gradients" in message
    assert "(weights 100 B, other tensors 50 B)" in message
    assert "memory_budget" in message
    assert "emulation" not in message
    device.free(arena)
    with pytest.raises(ValueError, match="no arena"):
        device.free(arena)


def test_a_fill_and_a_boundary(device: CudaDevice) -> None:
    t = torch.randn(3, 2).t()
    host = device.host_like(t)
    device.activations_down.copy(host, t)
    back = device.device_like(host, device.activations_up)
    assert back.stride() == t.stride()
    device.activations_up.copy(back, host)
    assert torch.equal(back, t)
    whole = torch.zeros(4)
    device.compute.fill(whole, 255)
    assert whole.isnan().all()
    whole.zero_()
    device.compute.poison(whole)
    assert whole.eq(0).all()


def test_abort_reset_and_close(device: CudaDevice) -> None:
    event = device.compute.record()
    device.abort()
    for call in (event.wait, device.compute.record, device.weights_up.synchronize):
        with pytest.raises(StreamAborted, match="aborted"):
            call()
    with pytest.raises(StreamAborted), device.permit():
        pass
    fake_of(device.weights_up).busy = True
    device.reset()
    assert not fake_of(device.weights_up).busy, "reset must wait for what the GPU still does"
    event.wait()
    device.close()
    device.close()
    with pytest.raises(StreamAborted, match="closed"):
        event.wait()


def test_workers_of_one_gpu_share_its_lock(device: CudaDevice) -> None:
    other = CudaDevice(1, torch.device("cpu", 0), "off", sharers=2)
    assert other.generator_lock is device.generator_lock
    assert other.generator is device.generator
    assert cuda._generator_locks[0] is device.generator_lock
    other.close()
