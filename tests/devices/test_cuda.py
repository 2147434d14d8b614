"""The façade on a real GPU: the same promises as the emulation's, as far as a GPU can show them."""

import threading
import time

import pytest
import torch

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import DeviceOutOfMemory, StreamAborted, make_devices
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def pair():
    """One GPU, listed twice."""
    devices = make_devices("cuda", [torch.device("cuda", 0)] * 2, Emulation(), "on")
    yield devices
    for device in devices:
        device.close()


def test_up_compute_down(pair):
    device = pair[0]
    up, down = device.host_buffer(4 * MIB), device.host_buffer(4 * MIB)
    assert up.is_pinned()
    up.view(torch.float32).normal_()
    arena = device.allocate(4 * MIB, "weights")
    assert arena.data_ptr() % 256 == 0
    with device.activate():
        for _ in range(20):  # of which a missing wait would get some wrong
            arena.zero_()
            device.weights_up.wait(device.compute.record())
            device.weights_up.copy(arena, up)
            device.compute.wait(device.weights_up.record())
            doubled = arena.view(torch.float32) * 2
            device.gradients_down.wait(device.compute.record())
            device.gradients_down.copy(down.view(torch.float32), doubled)
            del doubled  # its memory must not be reused before the copy is done
            torch.zeros(MIB, device="cuda")
            device.gradients_down.synchronize()
            assert torch.equal(down.view(torch.float32), up.view(torch.float32) * 2)
    assert device.resident_by_purpose()["weights"] == 4 * MIB
    device.free(arena)


def test_a_copy_in_a_thousand_chunks_is_the_whole(pair):
    """Each waits for the one before it on another stream, and no thread gives them to the driver."""
    device, nbytes = pair[0], 64 * MIB
    up, down, arena = device.host_buffer(nbytes), device.host_buffer(nbytes), device.allocate(nbytes, "weights")
    before = threading.active_count()
    up.view(torch.int32).random_()
    for stream in (device.weights_up, device.gradients_down):
        assert isinstance(stream, ChunkedCopyStream)
        stream.bytes_per_second = 0.0
    device.weights_up.copy(arena, up)
    device.gradients_down.wait(device.weights_up.record())
    device.gradients_down.copy(down, arena)
    device.gradients_down.synchronize()
    assert torch.equal(up, down)
    assert threading.active_count() == before
    device.free(arena)


def test_events_are_on_the_hosts_clock(pair):
    device = pair[0]
    early = device.compute.record(timed=True)
    early.wait()
    with device.activate():
        torch.cuda._sleep(10**8)
    late = device.compute.record(timed=True)
    assert not late.done()
    late.wait()
    seen = time.perf_counter()
    assert 0.01 < late.time() - early.time() < 1
    assert abs(seen - late.time()) < 0.005
    with pytest.raises(RuntimeError, match="timed=True"):
        device.compute.record().time()


def test_out_of_memory_is_explained(pair):
    device = pair[0]
    capacity = device.capacity()
    assert capacity is not None
    arena = device.allocate(MIB, "weights")
    with pytest.raises(
        DeviceOutOfMemory, match=r"CUDA device 0 .worker 0. is out of memory.*weights 1 MiB.*memory_budget"
    ):
        device.allocate(4 * capacity, "more weights")
    device.free(arena)


def test_abort_and_reset(pair):
    device = pair[0]
    event = device.compute.record()
    device.abort()
    for call in (event.wait, device.compute.record, device.weights_up.synchronize):
        with pytest.raises(StreamAborted):
            call()
    device.reset()
    event.wait()


def test_a_failed_registration_is_not_blamed_on_the_next_kernel(pair):
    from lightning_roundpipe.devices import pinned

    assert int(pinned._cudart().cudaHostRegister(0, 4096, 0)) != 0
    pinned._forget_last_error()
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
