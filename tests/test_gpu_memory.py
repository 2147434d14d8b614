"""What a worker holds, and what is pinned, is what was said beforehand: on a GPU, and the same on an emulated device.

``make test-gpu`` runs those on a GPU, with a model that is large beside what CUDA's libraries take for themselves.
"""

import copy
import mmap
import weakref

import pytest
import torch
from harness import Chain, halves, ours, run, single
from stress import all_reports
from torch import nn

from lightning_roundpipe.devices.cuda import CudaDevice, workspace_bytes
from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.memory.flat_params import aligned

WITHIN = 0.05
LAYERS = 6
EMULATED = pytest.param("cpu", id="emulated")
CUDA = pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(300)])
SIZES = {"cpu": (128, 64), "cuda": (4096, 8192)}
"""Width of the layers, and samples of a batch."""


class Layer(nn.Linear):
    """With its activation, so that no code lies between layers."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


def train(kind, steps, **options):
    width, samples = SIZES[kind]
    batch = torch.randn(samples, width, generator=torch.Generator().manual_seed(3))
    where = {"parallel_devices": [torch.device("cuda", 0)]} if kind == "cuda" else {}
    trainer = {"accelerator": "auto", "devices": "auto"} if kind == "cuda" else {}
    used = ours(num_microbatches=4, layers=["Layer"], **where, **options)
    run(used, Chain(Layer(width, width) for _ in range(LAYERS)), [copy.copy(batch)] * steps, watch=False, **trainer)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", [halves, single])
def test_the_peak_is_what_was_planned(plan):
    """Weights, gradients, activations, what waits, and cuBLAS's workspaces; `test_memory_forecast` has the others."""
    with all_reports() as made:
        train("cuda", 3, plan=plan(LAYERS, 4))
    reports = [report for make in made if not (report := make())["profiled"]]
    assert len(reports) == 2
    device = torch.device("cuda", 0)
    libraries = 6 * workspace_bytes(device)  # which cuBLAS takes where it needs them: an H200 had 3 of 6 workspaces
    # Of the last step, after which nothing has reset it.
    assert torch.cuda.max_memory_allocated(device) >= reports[-1]["peak_device_bytes"][0]
    for report in reports:
        peak, planned = report["peak_device_bytes"][0], report["planned_device_bytes"]
        assert (1 - WITHIN) * planned - libraries <= peak <= (1 + WITHIN) * planned


@pytest.mark.parametrize("kind", [EMULATED, CUDA])
def test_no_more_is_pinned_than_is_needed(kind, monkeypatch):
    """Weights and gradients of each layer, once at a time, and to the page where they are pinned."""
    device = CudaDevice if kind == "cuda" else EmulatedDevice
    real, asked, page = device.host_buffer, [], mmap.PAGESIZE if kind == "cuda" else 1
    storages = []

    def host_buffer(self, nbytes):
        made = real(self, nbytes)
        asked.append(nbytes)
        storages.append(weakref.ref(made.untyped_storage()))
        assert sum(storage() is not None for storage in storages) <= 2 * LAYERS
        assert made.untyped_storage().nbytes() == -(-nbytes // page) * page
        assert made.is_pinned() == (kind == "cuda")
        return made

    monkeypatch.setattr(device, "host_buffer", host_buffer)
    train(kind, 2, pin_memory="on" if kind == "cuda" else "auto", plan=halves(LAYERS, 4))
    width, _ = SIZES[kind]
    layer = aligned(4 * width * width) + aligned(4 * width)
    assert set(asked) == {layer} and len(asked) >= 2 * LAYERS
