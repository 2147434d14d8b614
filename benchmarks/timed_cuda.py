"""A CUDA that takes time and computes nothing: streams, events and copy engines with clocks of their own.

Work that is launched begins when its stream, the events that it waits for and, for a copy, the link are ready, or when
it is launched if that is later. So the host runs ahead of a device, or the device waits for the host, as on a GPU; and
what a device does takes no core. Values are computed at once, on the CPU, by whatever launches them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_roundpipe import strategy
from lightning_roundpipe.devices import cuda_chunks, cuda_libraries, cuda_streams
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_streams import CudaStream

_local = threading.local()
_MIB = 2**20


class Event:
    """Reached when its stream has done all that came before."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = max(time.perf_counter(), stream.done_at, stream.ready_at)

    def synchronize(self) -> None:
        while (left := self.at - time.perf_counter()) > 0:
            time.sleep(left)

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


class Stream:
    """A queue of work, as the times at which it is done.

    Attributes:
        done_at: the end of its last work.
        ready_at: when all that it waits for has come.
        starved_s: for how long its next kernel could have run and had not been launched.
        step: in which its last kernel was launched.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.device = torch_device
        self.done_at = self.ready_at = self.starved_s = 0.0
        self.step = -1

    def wait_event(self, event: Event) -> None:
        self.ready_at = max(self.ready_at, event.at)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class TimedCuda:
    """Use as a context: Trainers then have such devices, one for each worker.

    Args:
        bandwidth: of each link, bytes a second.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._streams: set[Stream] = set()
        self._free_at: dict[str, float] = {}
        """When each link has done what it has been given, by device and direction."""
        self._step = 0
        self._lock = threading.Lock()

    @property
    def starved_s(self) -> float:
        """Seconds in which a device's next kernel could have run and had not been launched, of all devices."""
        return sum(stream.starved_s for stream in list(self._streams))

    def begin(self) -> None:
        """Begin a step: what a device does between two steps does not count."""
        self._step += 1

    def launch(self, seconds: float) -> None:
        """A kernel of so many seconds, on the calling thread's current stream."""
        stream: Stream = _local.stream
        now, ready = time.perf_counter(), max(stream.done_at, stream.ready_at)
        if stream.step == self._step:
            stream.starved_s += max(0.0, now - ready)
        else:
            stream.step = self._step
            self._streams.add(stream)
        stream.done_at = max(now, ready) + seconds

    def _move(self, copying: CudaStream, to: Tensor, of: Tensor) -> None:
        to.copy_(of)
        stream: Any = copying.stream
        # "roundpipe-dev0-even-weights_up": chunks of both lanes share the link of one direction. Activations do not
        # wait for it, as they go before chunks that have not begun.
        device, name = copying.name.split("-")[1], copying.name.rpartition("-")[2]
        first, link = name.startswith(("activations", "arrivals")), f"{device} {name.rpartition('_')[2]}"
        with self._lock:
            free_at = 0.0 if first else self._free_at.get(link, 0.0)
            begins = max(time.perf_counter(), stream.done_at, stream.ready_at, free_at)
            stream.done_at = begins + of.numel() * of.element_size() / self._bandwidth
            if not first:
                self._free_at[link] = stream.done_at

    @contextlib.contextmanager
    def played(self) -> Iterator[TimedCuda]:
        cuda, made = self, list[CudaDevice]()

        def make(kind: str, torch_devices: list[torch.device], *_: Any) -> list[CudaDevice]:
            made[:] = [CudaDevice(i, torch.device("cpu"), "off", 1) for i in range(len(torch_devices))]
            return [*made]

        fakes: dict[str, Any] = {
            "Event": Event,
            "Stream": Stream,
            "stream": _entered,
            "current_stream": Stream,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: contextlib.nullcontext(),
            "default_generators": {0: torch.Generator(), None: torch.Generator()},
            "mem_get_info": lambda device: (1024 * _MIB, 1024 * _MIB),
            "get_device_name": lambda device: "a GPU",
            "get_per_process_memory_fraction": lambda device: 1.0,
            "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 0,
            "max_memory_allocated": lambda device: 0,
            "reset_peak_memory_stats": lambda device: None,
            "memory_stats_as_nested_dict": lambda device: {},
        }
        with contextlib.ExitStack() as stack:
            for name, fake in fakes.items():
                stack.enter_context(patch.object(torch.cuda, name, fake))
            for owner, name, fake in (
                (torch.cuda.nvtx, "range_push", lambda name: None),
                (torch.cuda.nvtx, "range_pop", lambda: None),
                (torch.Tensor, "is_pinned", lambda tensor: True),
                (CudaStream, "move", lambda stream, to, of: cuda._move(stream, to, of)),
                (cuda_streams, "stream_of", lambda torch_device, role: Stream(torch_device)),
                (CudaDevice, "library_bytes", lambda device: 0),
                (CudaDevice, "settle_libraries", lambda device, devices, threads: None),
                (CudaDevice, "warm_up", lambda device: None),
                (cuda_chunks, "FIRST_GUESS", self._bandwidth),
                (cuda_libraries, "clear", lambda: None),
                (strategy, "make_devices", make),
            ):
                stack.enter_context(patch.object(owner, name, fake))
            stack.enter_context(patch.object(torch._C, "_cuda_hasPrimaryContext", lambda index: True, create=True))
            yield self


@contextlib.contextmanager
def _entered(stream: Stream) -> Iterator[None]:
    """What ``torch.cuda.stream`` is."""
    before, _local.stream = getattr(_local, "stream", None), stream
    try:
        yield
    finally:
        _local.stream = before
