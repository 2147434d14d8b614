"""Making devices, and refusing to."""

import subprocess
import sys

import pytest
import torch

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import make_devices


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
