"""Devices: the streams, events, memory and generators of the workers, behind one façade for GPUs and emulated devices.

The engine imports from here and never asks which of the two kinds it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices.base import POISON, Device, Event, Stream, TrackedTensors
from lightning_roundpipe.devices.core_semaphore import emulated_work
from lightning_roundpipe.devices.errors import DeviceOutOfMemory, StreamAborted, StreamError

__all__ = [
    "POISON",
    "Device",
    "DeviceOutOfMemory",
    "Event",
    "Stream",
    "StreamAborted",
    "StreamError",
    "TrackedTensors",
    "emulated_work",
    "make_devices",
]


def make_devices(
    kind: Literal["cpu", "cuda"], torch_devices: Sequence[torch.device], emulation: Emulation, pin_memory: str = "auto"
) -> list[Device]:
    """Create one device per worker, numbered in the order of ``torch_devices``.

    Args:
        kind: ``"cpu"`` for emulated devices, ``"cuda"`` for GPUs.
        torch_devices: one entry per worker; entries may repeat.
        emulation: how emulated devices behave. GPUs accept the default only.
        pin_memory: whether host buffers of GPUs are pinned: ``"auto"``, ``"on"`` or ``"off"``.

    Raises:
        ValueError: a GPU does not exist, or ``emulation`` is not the default for GPUs.
    """
    if kind == "cuda":
        if emulation != Emulation():
            raise ValueError(
                f"emulation={emulation} says how emulated devices behave, and these are GPUs: leave emulation= out, or "
                "set accelerator='cpu'."
            )
        from lightning_roundpipe.devices.cuda import make_cuda

        return make_cuda(torch_devices, pin_memory)
    from lightning_roundpipe.devices.emulated import make_emulated

    return make_emulated(torch_devices, emulation)
