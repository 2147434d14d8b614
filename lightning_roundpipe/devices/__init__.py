"""Devices: streams, events, memory and generators of the workers, real or emulated, behind one façade.

The runtime imports from here, and never asks which kind it has got.
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
    kind: Literal["cpu", "cuda"],
    torch_devices: Sequence[torch.device],
    emulation: Emulation,
    pin_memory: str = "auto",
) -> list[Device]:
    """The workers' devices, numbered in the order given.

    Args:
        kind: ``"cpu"``: emulated devices; ``"cuda"``: GPUs.
        torch_devices: one for each worker; the same one may come several times.
        emulation: how emulated devices behave; GPUs must be given the default.
        pin_memory: whether GPUs' host buffers are pinned, ``"auto"``, ``"on"`` or ``"off"``; the emulation ignores it.

    Raises:
        ValueError: no devices, an unknown kind, a GPU that does not exist, or GPUs that are to be emulated.
    """
    if not torch_devices:
        raise ValueError("devices: RoundPipe needs at least one device.")
    if kind == "cuda":
        if emulation != Emulation():
            raise ValueError(
                f"emulation={emulation} says how emulated devices behave, and these are GPUs: leave emulation= out, or "
                "set accelerator='cpu'."
            )
        from lightning_roundpipe.devices.cuda import make_cuda

        return make_cuda(torch_devices, pin_memory)
    if kind == "cpu":
        from lightning_roundpipe.devices.emulated import make_emulated

        return make_emulated(torch_devices, emulation)
    raise ValueError(f"accelerator: there are no devices of kind {kind!r}, only 'cpu' (emulated) and 'cuda'.")
