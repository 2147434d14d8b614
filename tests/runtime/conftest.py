"""One emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, make_devices


@pytest.fixture
def device() -> Iterator[Device]:
    [made] = make_devices("cpu", [torch.device("cpu")], Emulation())
    yield made
    made.close()
