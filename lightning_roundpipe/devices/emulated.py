"""Emulated devices: they run the same engine on a machine without a GPU.

All memory is host memory. A `Ledger` emulates the memory limit, and copy threads emulate asynchronous copies and
bandwidth. On request, random delays and poison make missing waits show.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import core_semaphore, intraop_threads
from lightning_roundpipe.devices.abort import AbortSwitch
from lightning_roundpipe.devices.alike import empty_alike
from lightning_roundpipe.devices.base import POISON, Device, Stream, TrackedTensors
from lightning_roundpipe.devices.emulated_link import Delays, Link
from lightning_roundpipe.devices.emulated_streams import InlineStream, ThreadStream
from lightning_roundpipe.devices.heap import share_heap
from lightning_roundpipe.devices.ledger import Ledger, LedgerTrackedTensors
from lightning_roundpipe.devices.saved import counting_paused_in_transforms, saved_for_backward

ALIGNMENT = 256
"""Bytes. The least alignment of a GPU's allocator, which vectorised kernels rely on."""
_NOTHING = nullcontext()


class EmulatedDevice(Device):
    """One of several devices that share this machine's cores and memory."""

    def __init__(self, index: int, torch_device: torch.device, emulation: Emulation) -> None:
        share_heap()
        self.index, self.torch_device = index, torch_device
        self.generator = torch.default_generator
        self.lead_bytes = 0  # an enqueued call has run already
        self.backward_needs_interpreter = True
        self._emulation = emulation
        self._switch = AbortSwitch(f"Device {index}")
        self._closed = False
        limit = emulation.memory
        assert limit is None or isinstance(limit, int)  # Emulation has parsed it
        self._ledger = Ledger(f"Emulated CUDA device {index}", limit)
        self._arenas: dict[int, tuple[Tensor, str]] = {}
        self._arena_keys: set[int] = set()
        """Ledger keys of the arenas' storages."""
        self._saved_for_backward = saved_for_backward(self._ledger, self._arena_keys)
        self._core_semaphore = core_semaphore.semaphore()
        self._core_delays = self._delays("acquire_core")
        bandwidth = None if emulation.bandwidth is None else float(emulation.bandwidth)
        self._up = Link(bandwidth, emulation.latency, self._switch)
        self._down = Link(bandwidth, emulation.latency, self._switch)
        self._user_code_delays = self._delays("user code")
        name = f"roundpipe-dev{index}-compute"
        self.compute = InlineStream(name, self._switch, emulation.poison, self._delays("compute"))
        self.weights_up = self._copy_stream("weights_up", self._up, first=False)
        self.activations_up = self._copy_stream("activations_up", self._up, first=True)
        self.arrivals_up = self._copy_stream("arrivals_up", self._up, first=True)
        self.activations_down = self._copy_stream("activations_down", self._down, first=True)
        self.gradients_down = self._copy_stream("gradients_down", self._down, first=False)

    def _delays(self, name: str) -> Delays | None:
        seed = self._emulation.delay_seed
        return None if seed is None else Delays(seed, f"{self.index}/{name}")

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
        self._arenas[id(arena)] = (arena, purpose)
        self._arena_keys.add(arena.untyped_storage()._cdata)
        return self._poison(arena)  # makes a read before the first write show

    def free(self, buffer: Tensor) -> None:
        arena, purpose = self._arenas.pop(id(buffer), (None, ""))
        if arena is None:
            raise ValueError(
                f"this tensor of {buffer.numel()} elements is not an arena of device {self.index}, or not any more."
            )
        self._poison(arena)
        self._arena_keys.discard(arena.untyped_storage()._cdata)
        self._ledger.end(arena.untyped_storage()._cdata, purpose)

    def _poison(self, fresh: Tensor) -> Tensor:
        """Overwrite fresh memory, to show reads before the first write.

        Reused memory often still holds the right values, those of the step before.
        """
        if self._emulation.poison:
            ctypes.memset(fresh.untyped_storage().data_ptr(), POISON, fresh.untyped_storage().nbytes())
        return fresh

    def host_buffer(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return self._poison(torch.empty(nbytes, dtype=torch.uint8))

    def host_like(self, t: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.host_like(t)
        return self._poison(empty_alike(t, self.torch_device))

    def device_like(self, t: Tensor, filled_on: Stream, *, lent: bool = False) -> Tensor:
        return self.host_like(t)  # all memory is the host's

    def track(self, tensors: Iterable[Tensor], purpose: str) -> TrackedTensors:
        return LedgerTrackedTensors(self._ledger, tensors, purpose)

    def track_until_freed(self, tensors: Iterable[Tensor], purpose: str) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._arena_keys:
                    self._ledger.track_until_freed(storage, purpose)

    def saved_for_backward(self) -> AbstractContextManager[None]:
        return self._saved_for_backward  # stateless, so calls may share it and nest

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
        if self._core_delays is not None:
            self._switch.sleep(self._core_delays.next())
        self._switch.check()
        return core_semaphore.HeldCore(self._core_semaphore)

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        with intraop_threads.limit_num_threads(), counting_paused_in_transforms():
            yield

    def activate(self) -> AbstractContextManager[None]:
        if self._user_code_delays is not None:
            time.sleep(self._user_code_delays.next())
        return _NOTHING

    # -- ending

    def abort(self) -> None:
        if not self._closed:
            self._switch.throw("aborted because another thread failed")

    def reset(self) -> None:
        assert not self._closed, f"device {self.index} is closed"
        self._switch.throw("being reset")
        for stream in self._threads():
            stream.settle()
        self._up.clear()
        self._down.clear()
        self._switch.clear()

    def close(self) -> None:
        self._closed = True
        self._switch.throw("closed")
        for stream in self._threads():
            stream.join()
        for arena, _ in list(self._arenas.values()):
            self.free(arena)

    def _threads(self) -> list[ThreadStream]:
        return [stream for stream in self.streams if isinstance(stream, ThreadStream)]


def make_emulated(torch_devices: Iterable[torch.device], emulation: Emulation) -> list[Device]:
    """Create one device per entry. They share cores, generator and memory."""
    return [EmulatedDevice(index, torch_device, emulation) for index, torch_device in enumerate(torch_devices)]
