"""The memory that user code between calls takes on workers: what it makes and holds, and its peaks.

The first batch runs its microbatches one after another. While user code runs, nothing else changes what is resident on
the workers. So what a section of user code adds, beside the outputs of calls that it drops, is what it has made: on a
GPU all tensors between layers, and what autograd has saved of them. Emulated devices do not count these. What libraries
keep for the thread is not the section's: they allocate it before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.crossing import Crossing
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.core.worker_pool import WorkerPool
from lightning_roundpipe.runtime.memory.peak_memory import PeakMemoryMeter


class UserCodeMemory:
    """Measures one microbatch's sections of user code, while it is profiled.

    Args:
        worker_pool: all workers.
        crossing: knows the outputs of calls that are alive.

    Attributes:
        made_bytes: bytes that user code has made on workers and holds.
    """

    def __init__(self, worker_pool: WorkerPool, crossing: Crossing) -> None:
        self.made_bytes = 0
        self._worker_pool, self._crossing = worker_pool, crossing
        self._resident = self._outputs = 0
        self._meter: PeakMemoryMeter | None = None
        self._warm: set[tuple[Device, int]] = set()
        """Devices and threads for which libraries have allocated what they keep. Each call of a model has a thread."""

    def begin(self, device: Device | None) -> None:
        """Begin a section on ``device``; None: on the first one."""
        where = device or self._worker_pool.devices[0]
        if (thread := (where, threading.get_ident())) not in self._warm:
            self._warm.add(thread)
            with torch._C.DisableTorchFunction():  # it is none of the user's operations
                where.warm_up()
        self._meter = self.meter(where)
        self._resident, self._outputs = self._resident_bytes(), self._crossing.held_bytes()

    def end(self, calls: Sequence[TracedCall]) -> None:
        """End the section behind the last of ``calls``, if one was begun."""
        if self._meter is None:
            return
        peak, self._meter = self._meter.read(), None
        if calls:
            calls[-1].then(peak, self._outputs + self.made_bytes)
        dropped = self._outputs - self._crossing.held_bytes()
        self.made_bytes = max(0, self.made_bytes + self._resident_bytes() - self._resident + dropped)

    def meter(self, device: Device | None) -> PeakMemoryMeter:
        """Return a meter on ``device``, which begins when nothing is in flight anywhere: that would be freed later."""
        for worker in self._worker_pool.workers:
            worker.land()
            worker.device.activations_down.synchronize()
        return PeakMemoryMeter(device or self._worker_pool.devices[0], ())

    def _resident_bytes(self) -> int:
        """Return the bytes on all workers. Those of workers that share a GPU count once."""
        emulated = self._worker_pool.accelerator is None
        known = {each.index if emulated else each.torch_device: each for each in self._worker_pool.devices}
        return sum(device.resident_bytes() for device in known.values())
