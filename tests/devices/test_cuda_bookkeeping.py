"""What the CUDA half does besides calling CUDA: lifetimes, clocks, messages. A fake on the CPU plays CUDA.

That the calls are the right ones only a GPU can tell; ``test_cuda.py`` asks one.
"""

import time
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeStream, play_cuda

from lightning_roundpipe.devices import DeviceOutOfMemory, StreamAborted, cuda_streams
from lightning_roundpipe.devices.cuda import CudaDevice, workspace_bytes
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream

NEAR_S = 10.0
"""Seconds that may pass between two looks at the clock: a machine may be busy."""


@pytest.fixture
def device(monkeypatch):
    play_cuda(monkeypatch)
    device = CudaDevice(0, torch.device("cpu", 0), "off", sharers=2)
    yield device
    device.close()


def fake_of(stream):
    if isinstance(stream, ChunkedCopyStream):
        stream = stream._last
    assert isinstance(stream, cuda_streams.CudaStream)
    fake = stream.stream
    assert isinstance(fake, FakeStream)
    return fake


def test_times_are_the_hosts(device, monkeypatch):
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


def test_memory_is_shared_out_and_explained(device, monkeypatch):
    assert device.capacity() == 400  # (600 free + 200 reserved) for two workers
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
        assert device.capacity() == 250  # torch gives no more than half of 1000, to both of them
    assert (device.resident_bytes(), device.peak_bytes()) == (150, 180)
    device.reset_peak()
    arena = device.allocate(100, "weights")
    assert device.resident_by_purpose() == {"weights": 100, "other tensors": 50}

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(300, "gradients")
    message = str(caught.value)
    assert "CUDA device 0 (worker 0) is out of memory: 300 bytes for gradients" in message
    assert "(weights 100 bytes, other tensors 50 bytes)" in message
    assert "memory_budget" in message
    assert "emulation" not in message
    device.free(arena)
    with pytest.raises(AssertionError, match="not an arena"):
        device.free(arena)


def test_abort_reset_and_close(device):
    event = device.compute.record()
    device.abort()
    for call in (event.wait, device.compute.record, device.weights_up.synchronize):
        with pytest.raises(StreamAborted, match="aborted"):
            call()
    with pytest.raises(StreamAborted), device.acquire_core():
        pass
    lanes = [lane.stream for stream in (device.weights_up, device.gradients_down) for lane in stream.lanes]
    for lane in lanes:
        lane.busy = True
    device.reset()
    assert not any(lane.busy for lane in lanes), "reset must wait for what the GPU still does"
    event.wait()
    device.close()
    device.close()
    with pytest.raises(StreamAborted, match="closed"):
        event.wait()


MIB = 2**20


@pytest.mark.parametrize(
    ("config", "major", "expected"),
    [
        ("", 8, 8.125 * MIB),
        ("", 9, 32 * MIB),
        (":4096:8", 8, 32 * MIB),
        (":16:8:4096:1", 9, 4.125 * MIB),
        ("?", 8, 8.125 * MIB),
        ("", 12, 32 * MIB),
    ],
)
def test_what_cublas_keeps(config, major, expected, monkeypatch):
    """For each thread that multiplies, as torch chooses it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert workspace_bytes(torch.device("cuda", 0)) == expected
