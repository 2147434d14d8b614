"""Devices for tests, closed at the end whatever happens."""

import pytest
import torch
from fake_cuda import trainers_on_gpus

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import make_devices


@pytest.fixture
def make_all():
    """``make_all(2, bandwidth=1e6)``: two emulated devices."""
    made = []

    def make(count, **emulation):
        devices = make_devices("cpu", [torch.device("cpu")] * count, Emulation.of(emulation))
        made.extend(devices)
        return devices

    yield make
    for device in made:
        device.close()


@pytest.fixture
def make(make_all):
    """``make(memory=1000)``: one emulated device."""
    return lambda **emulation: make_all(1, **emulation)[0]


@pytest.fixture
def gpus(monkeypatch):
    """Workers that believe they are on a GPU, made when a Trainer asks for devices. There is no limit of memory."""
    return trainers_on_gpus(monkeypatch)
