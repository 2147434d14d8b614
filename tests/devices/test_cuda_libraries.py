"""Streams that last as long as the process, and cuBLAS's workspaces, of which there is one for a thread in a stream."""

import fake_cuda
import torch
from fake_cuda import play_cuda

from lightning_roundpipe.devices.cuda import CudaDevice, share_out

GPU = torch.device("cpu")


def streams(device):
    chunked = (device.weights_up, device.gradients_down)
    lanes = [lane for stream in chunked for lane in stream.lanes]
    return [stream.stream for stream in (device.compute, *lanes, device.activations_up, device.activations_down)]


def test_the_next_run_has_the_same_streams(monkeypatch):
    """What the allocator and cuBLAS keep for a stream would be lost with it; and two strategies may be open at once."""
    play_cuda(monkeypatch)
    found = []
    for _ in range(2):
        devices = share_out([GPU, GPU], "off")
        found.append([streams(device) for device in devices])
        for device in devices:
            device.close()
    assert found[0] == found[1]
    first, second = found[0]
    assert first[0] is second[0], "workers of one GPU compute in one stream"
    assert len({*first, *second}) == 13, "and copy in streams of their own"


def test_workspaces_are_cleared_with_the_last_device(monkeypatch):
    """Another strategy's threads may be multiplying, and would lose theirs."""
    play_cuda(monkeypatch)
    first, second = (CudaDevice(i, GPU, "off", sharers=1) for i in range(2))
    first.settle_libraries([first], threads=4)
    first.close()
    assert fake_cuda.CLEARED == []
    second.settle_libraries([second], threads=4)
    assert fake_cuda.CLEARED == [1]
    second.close()
    assert fake_cuda.CLEARED == [1, 0]
