"""What counts as resident on an emulated device, and what happens when it does not fit."""

import sys

import pytest
import torch

from lightning_roundpipe.devices import DeviceOutOfMemory


def test_allocate_counts_aligns_and_gives_back(make):
    device = make(memory=10_000)
    assert device.capacity() == 10_000
    a, b = device.allocate(4_000, "weights"), device.allocate(5_000, "gradients")
    for arena, nbytes in ((a, 4_000), (b, 5_000)):
        assert arena.shape == (nbytes,)
        assert arena.dtype == torch.uint8
        assert arena.data_ptr() % 256 == 0
    assert device.resident_bytes() == 9_000
    device.free(a)
    assert device.resident_bytes() == 5_000
    assert device.peak_bytes() == 9_000
    device.reset_peak()
    assert device.peak_bytes() == 5_000
    device.free(b)
    assert device.resident_bytes() == 0
    assert device.allocate(0, "nothing").numel() == 0
    device.allocate(100, "left behind")
    device.close()
    assert device.resident_bytes() == 0


def test_out_of_memory_says_what_is_there_and_what_helps(make):
    device = make(memory="8KiB")
    arena = device.allocate(4096, "weights of the slot")
    tracked = device.track([torch.zeros(256)], "boundary")
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(4096, "weights of the next slot")
    message = str(caught.value)
    for part in (
        "Emulated CUDA device 0 is out of memory: 4 KiB for weights of the next slot",
        "5 KiB of 8 KiB",
        "weights of the slot 4 KiB, boundary 1 KiB",
        "Use smaller microbatches (half the batch size, or twice num_microbatches), shorter sequences",
        "Or raise memory= of emulation=",
    ):
        assert part in message
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert device.resident_by_purpose() == {"weights of the slot": 4096, "boundary": 1024}
    tracked.release()
    device.allocate(4096, "weights of the next slot")
    device.free(arena)


def test_a_storage_counts_once_and_until_its_last_reason_is_gone(make):
    device = make()
    x = torch.zeros(100)
    arena = device.allocate(400, "weights")
    parameter = arena.view(torch.float32)[:50].requires_grad_()
    first = device.track([x, x[:10], x.t(), parameter, parameter.data], "boundary")
    assert device.resident_bytes() == 800
    second = device.track([x.view(10, 10)], "input")
    assert device.resident_bytes() == 800
    first.release()
    first.release()
    assert device.resident_by_purpose() == {"weights": 400, "input": 400}
    second.release()
    assert device.resident_bytes() == 400


def test_a_storage_that_is_tracked_until_it_is_freed_runs_no_python_then(make):
    """What is raised there, such as a KeyboardInterrupt, Python would print and drop."""
    device, called = make(), list[str]()
    tensor = torch.ones(256)
    device.track_until_freed([tensor, tensor[:3]], "outputs")
    device.track_until_freed([tensor], "outputs")
    assert device.resident_bytes() == 1024
    sys.setprofile(lambda frame, event, arg: called.append(f"{event} {frame.f_code.co_name}"))
    del tensor
    sys.setprofile(None)
    assert not [line for line in called if line.startswith("call ")]
    assert device.resident_bytes() == 0


@pytest.mark.parametrize("poison", [False, True])
def test_poison_of_allocated_and_freed_arenas(make, poison):
    device = make(poison=poison)
    arena = device.allocate(64, "weights")
    weights = arena.view(torch.float32)
    if poison:
        assert weights.isnan().all(), "a read before the first write must show"
    weights.fill_(1)
    device.free(arena)
    assert weights.isnan().all().item() is poison
