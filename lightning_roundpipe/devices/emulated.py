"""Emulated devices: they run the same engine on a machine without a GPU.

All memory is host memory. A `Ledger` emulates the memory limit, and copy threads emulate asynchronous copies and
bandwidth. On request, random delays and poison make missing waits show.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import core_semaphore, intraop_threads
from lightning_roundpipe.devices.alike import empty_alike
from lightning_roundpipe.devices.base import NOTHING, POISON, Device, Stream, TrackedTensors
from lightning_roundpipe.devices.emulated_streams import Delays, InlineStream, Link, ThreadStream
from lightning_roundpipe.devices.ledger import Ledger, LedgerTrackedTensors
from lightning_roundpipe.devices.saved import (
    Pack,
    counting_paused_in_transforms,
    packing,
    saved_between_layers,
    saved_for_backward,
)
from lightning_roundpipe.devices.waiter import AbortSwitch
from lightning_roundpipe.heap import share_heap

ALIGNMENT = 256
"""Bytes. The least alignment of a GPU's allocator, which vectorised kernels rely on."""
MAX_DELAY = 0.002
"""Longest random delay, in seconds: longer than a small layer, short enough for tests with hundreds of copies."""


class EmulatedDevice(Device):
    """One of several devices that share this machine's cores and memory."""

    generator = torch.default_generator
    lead_bytes = 0  # an enqueued call has run already
    backward_needs_interpreter = True

    def __init__(self, index: int, torch_device: torch.device, emulation: Emulation) -> None:
        share_heap()
        super().__init__(index, torch_device)
        self._emulation = emulation
        limit, bandwidth = emulation.memory, emulation.bandwidth
        assert limit is None or isinstance(limit, int)  # Emulation has parsed it
        self._ledger = Ledger(f"Emulated CUDA device {index}", limit)
        self.pack = packing(self._ledger, self._arenas)
        self._saved_for_backward = saved_for_backward(self.pack)
        self._core = core_semaphore.semaphore(core_semaphore.concurrent_devices())
        self._thread_delays = self._delays("threads")
        rate = None if bandwidth is None else float(bandwidth)
        up, down = (Link(rate, emulation.latency, self._switch) for _ in range(2))
        name = f"roundpipe-dev{index}-compute"
        self.compute = InlineStream(name, self._switch, emulation.poison, self._delays("compute"))
        self.weights_up = self._copy_stream("weights_up", up, first=False)
        self.activations_up = self._copy_stream("activations_up", up, first=True)
        self.arrivals_up = self._copy_stream("arrivals_up", up, first=True)
        self.activations_down = self._copy_stream("activations_down", down, first=True)
        self.gradients_down = self._copy_stream("gradients_down", down, first=False)
        name, updating = f"roundpipe-dev{index}-updates", AbortSwitch(f"Device {index}")
        self.updates = self.updates_copy = InlineStream(name, updating, emulation.poison, self._delays("updates"))

    def _delays(self, name: str) -> Delays | None:
        seed = self._emulation.delay_seed
        return None if seed is None else partial(random.Random(f"{seed}/{self.index}/{name}").uniform, 0, MAX_DELAY)

    def _copy_stream(self, name: str, link: Link, *, first: bool) -> ThreadStream:
        full = f"roundpipe-dev{self.index}-{name}"
        return ThreadStream(full, link, self._switch, self._emulation.poison, self._delays(name), first=first)

    # -- memory

    def allocate(self, nbytes: int, purpose: str) -> Tensor:
        with torch.inference_mode(False):  # training also uses arenas that validation allocates
            room = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=self.torch_device)
            start = -room.data_ptr() % ALIGNMENT
            arena = room[start : start + nbytes]
        self._ledger.add(arena.untyped_storage()._cdata, nbytes, purpose)
        return self._poison(self._add_arena(arena, purpose))  # makes a read before the first write show

    def _freed(self, arena: Tensor, purpose: str) -> None:
        self._poison(arena)
        self._ledger.end(arena.untyped_storage()._cdata, purpose)

    def _poison(self, fresh: Tensor) -> Tensor:
        """Overwrite fresh memory, so that reads before the first write show: it may hold the right values."""
        if self._emulation.poison:
            ctypes.memset(fresh.untyped_storage().data_ptr(), POISON, fresh.untyped_storage().nbytes())
        return fresh

    def host_buffer(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return self._poison(torch.empty(nbytes, dtype=torch.uint8))

    def host_like(self, t: Tensor) -> Tensor:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING:
            return self._poison(empty_alike(t, self.torch_device))

    def device_like(self, t: Tensor, filled_on: Stream, *, lent: bool = False) -> Tensor:
        return self.host_like(t)  # all memory is the host's

    def track(self, tensors: Iterable[Tensor], purpose: str) -> TrackedTensors:
        return LedgerTrackedTensors(self._ledger, tensors, purpose)

    def track_until_freed(self, tensors: Iterable[Tensor], purpose: str) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._arenas:
                    self._ledger.track_until_freed(storage, purpose)

    def saved_for_backward(self) -> AbstractContextManager[None]:
        return self._saved_for_backward  # stateless, so calls may share it and nest

    def saved_between_layers(self, present: Callable[[], Device | None]) -> AbstractContextManager[None]:
        def pack() -> Pack | None:
            device = present()
            return device.pack if isinstance(device, EmulatedDevice) else None

        return saved_between_layers(pack)

    def holds(self, tensor: Tensor) -> bool:
        return self._ledger.holds(tensor.untyped_storage()._cdata)

    def peak_bytes(self) -> int:
        return self._ledger.peak()

    def reset_peak(self) -> None:
        self._ledger.reset_peak()

    def resident_bytes(self) -> int:
        return self._ledger.resident()

    def resident_by_purpose(self) -> dict[str, int]:
        return self._ledger.by_purpose()

    def capacity(self) -> int | None:
        return self._ledger.limit

    # -- computing

    def acquire_core(self) -> AbstractContextManager[None]:
        if self._thread_delays is not None:
            self._switch.sleep(self._thread_delays())
        self._switch.check()
        return self._core

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        with intraop_threads.limit_num_threads(), counting_paused_in_transforms():
            yield

    def activate(self) -> AbstractContextManager[None]:
        if self._thread_delays is not None:
            time.sleep(self._thread_delays())
        return NOTHING

    # -- ending

    def close(self) -> None:
        self._switch.close()
        for stream in self.streams:
            stream.join()
        for arena, _ in list(self._arenas.values()):
            self.free(arena)


def make_emulated(torch_devices: Iterable[torch.device], emulation: Emulation) -> list[Device]:
    """Create one device per entry. They share cores, generator and memory."""
    return [EmulatedDevice(index, torch_device, emulation) for index, torch_device in enumerate(torch_devices)]
