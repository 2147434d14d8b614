"""Gradient sums of one layer, with a pool of their own, outside of a step."""

from __future__ import annotations

from typing_extensions import override

from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.grad_buffers import GradientPool, HostGradBuffers, HostGradSums, Reduction
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.threads.cancel_scope import CancelScope


class _WithRoom(HostGradBuffers):
    """Sums that have their memory from the start."""

    @override
    def begin(self, *, apart: bool = False) -> HostGradSums:
        sums = super().begin(apart=apart)
        sums.make_room(CancelScope())
        return sums


def host_gradients(layer: HostLayer, device: Device, reduction: Reduction) -> HostGradBuffers:
    """Return the gradient memory of ``layer``, from a pool without a limit."""
    pool = GradientPool(device, limit=2**40)
    pool.keeps = True
    return _WithRoom(layer, pool, device, reduction)
