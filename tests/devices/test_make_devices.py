"""Making devices, and refusing to."""

import subprocess
import sys

import pytest
import torch

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import make_devices

CPU = torch.device("cpu")


def test_devices_are_numbered_and_emulated_as_asked():
    devices = make_devices("cpu", [CPU, CPU, CPU], Emulation(memory="1KiB"))
    try:
        assert [device.index for device in devices] == [0, 1, 2]
        assert all(device.torch_device == CPU and device.capacity() == 1024 for device in devices)
        assert [s.name for s in devices[1].streams] == [
            f"roundpipe-dev1-{name}"
            for name in ("compute", "weights_up", "activations_up", "arrivals_up", "activations_down", "gradients_down")
        ]
        with devices[0].activate(), devices[0].compute.running(), devices[0].weights_up.running():
            assert torch.ones(1).device == CPU
    finally:
        for device in devices:
            device.close()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no GPU 0, torch sees 0 CUDA.*accelerator='cpu'"):
        make_devices("cuda", [torch.device("cuda")], Emulation())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="no GPU 2, torch sees 2"):
        make_devices("cuda", [torch.device("cuda", 1), torch.device("cuda", 2)], Emulation())


@pytest.mark.slow
def test_importing_the_cuda_half_starts_no_cuda():
    code = "import torch, lightning_roundpipe.devices.cuda; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
