"""CUDA devices: the façade over CUDA's streams, events and memory.

Small on purpose: emulated devices test all that can be decided above the façade. Here is what only a GPU needs: clocks,
and lifetimes (the allocator must not hand out memory that a copy on another stream still uses).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_roundpipe.devices import interpreter, intraop_threads, pinned
from lightning_roundpipe.devices.alike import empty_alike
from lightning_roundpipe.devices.base import Device, Stream
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream
from lightning_roundpipe.devices.cuda_streams import CudaStream, EventClock, begin_on
from lightning_roundpipe.devices.errors import out_of_memory
from lightning_roundpipe.devices.host_memory import worth_copying
from lightning_roundpipe.devices.waiter import AbortSwitch

_open: WeakSet[CudaDevice] = WeakSet()
"""The open devices of all strategies in the process."""


_THREADS = 2
"""Threads that multiply for one microbatch: its own and autograd's, which workers on one GPU share in fact."""
_KIB = 1024
_USUAL, _SINCE_HOPPER = (2 * 4096 + 8 * 16) * _KIB, 8 * 4096 * _KIB
"""torch's default sizes of cuBLAS's workspaces, used when ``CUBLAS_WORKSPACE_CONFIG`` is not set."""

LEAD_BYTES = 64 << 20
"""Bytes of calls that the host may enqueue ahead of a GPU, beyond the two calls that are always allowed.

The boundary tensors of 12 ms on an RTX 4090, for layers of width 2,048.
"""


class CudaDevice(Device):
    """One worker on a GPU, ``torch_device``.

    Args:
        index: the worker's number.
        pin_memory: see `pinned.host_buffer`.
        sharers: how many workers use this GPU. They share one compute stream: user code carries tensors from one worker
            to the next, and frees them without knowing of another stream that may still read them.
        turn: the worker's number among the sharers. Each has its own copy streams.
    """

    lead_bytes = LEAD_BYTES
    backward_needs_interpreter = False

    def __init__(self, index: int, torch_device: torch.device, pin_memory: str, sharers: int, turn: int = 0) -> None:
        super().__init__(index, torch_device)
        self.generator = torch.cuda.default_generators[torch_device.index]
        self._pin_memory, self._sharers = pin_memory, sharers
        self.others: list[CudaStream] = []
        """The compute streams of the other GPUs."""
        self._multiplying = 0
        """How many threads multiply matrices beside one microbatch's and autograd's, see `settle_libraries`."""
        self._clock = EventClock(torch_device)
        self.compute: CudaStream = self._stream("compute")
        self.weights_up = self._chunked("weights_up", turn)
        self.activations_up = self._stream("activations_up", turn)
        self.arrivals_up = self._stream("arrivals_up", turn)
        self.activations_down = self._stream("activations_down", turn)
        self.gradients_down = self._chunked("gradients_down", turn)
        updating = AbortSwitch(f"Device {index}")
        self.updates = self._stream("updates", turn, updating)
        self.updates_copy = self._chunked("updates_copy", turn, updating)
        _open.add(self)

    def _stream(self, name: str, turn: int | None = None, switch: AbortSwitch | None = None) -> CudaStream:
        role, switch = name if turn is None else f"{name} {turn}", switch or self._switch
        return CudaStream(f"roundpipe-dev{self.index}-{name}", self.torch_device, role, self._clock, switch)

    def _chunked(self, name: str, turn: int, switch: AbortSwitch | None = None) -> ChunkedCopyStream:
        switch = switch or self._switch
        lanes = [self._stream(f"{lane}-{name}", turn, switch) for lane in ("even", "odd")]
        return ChunkedCopyStream(f"roundpipe-dev{self.index}-{name}", lanes, switch)

    # -- memory

    def allocate(self, nbytes: int, purpose: str) -> Tensor:
        with self.compute.running(), self._explaining(nbytes, purpose), torch.inference_mode(False):
            arena = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        # Earlier work of `compute` may still use this memory, and other streams do not wait for it by themselves.
        reusable = self.compute.record()
        for stream in self.streams[1:]:
            stream.wait(reusable)
        return self._add_arena(arena, purpose)

    def _freed(self, arena: Tensor, purpose: str) -> None:
        self.drop_finished()

    def host_buffer(self, nbytes: int) -> Tensor:
        return pinned.host_buffer(nbytes, self._pin_memory)

    def reserve_host(self, nbytes: int) -> None:
        pinned.reserve(nbytes, self._pin_memory)

    def worth_copying(self, nbytes: int) -> bool:
        return worth_copying(nbytes, self._pin_memory)

    def host_like(self, t: Tensor) -> Tensor:
        return pinned.host_like(t, self._pin_memory)

    def device_like(self, t: Tensor, filled_on: Stream, *, lent: bool = False) -> Tensor:
        nbytes = t.numel() * t.element_size()
        owner = filled_on if lent else self.compute
        with owner.running(), self._explaining(nbytes, "activations"), torch.inference_mode(False):
            new = empty_alike(t, self.torch_device)
        if owner is not filled_on:  # earlier work of `owner` may still use this memory
            filled_on.wait(owner.record())
        return new

    def free_after_compute(self, tensors: Iterable[Tensor]) -> None:
        self.compute.keep(*tensors)

    def drop_finished(self) -> None:
        for stream in self.all_streams:
            stream.drop_finished()

    @contextmanager
    def named(self, *name: object) -> Iterator[None]:
        torch.cuda.nvtx.range_push(" ".join(map(str, name)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    @contextmanager
    def _explaining(self, nbytes: int, purpose: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            name = f"CUDA device {self.torch_device.index} (worker {self.index})"
            resident = self.resident_by_purpose()
            raise out_of_memory(name, nbytes, purpose, resident, self.capacity(), emulated=False) from error

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_alloc_retries", 0))

    def resident_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def resident_by_purpose(self) -> dict[str, int]:
        sums = Counter[str]()
        for arena, purpose in list(self._arenas.values()):
            sums[purpose] += arena.numel()
        sums["other tensors"] = self.resident_bytes() - sums.total()
        return dict(sums)

    @property
    def kind(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def capacity(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        usable = free + torch.cuda.memory_reserved(self.torch_device)
        share = torch.cuda.get_per_process_memory_fraction(self.torch_device)  # torch refuses allocations beyond
        return min(usable, int(share * total)) // self._sharers

    def library_bytes(self) -> int:
        return (_THREADS + -(-self._multiplying // self._sharers)) * workspace_bytes(self.torch_device)

    def warm_up(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(16, 16, device=self.torch_device, requires_grad=True)
            torch.autograd.backward((x @ x).sum())

    def settle_libraries(self, devices: Sequence[Device], threads: int) -> None:
        run = [device for device in devices if isinstance(device, CudaDevice)]
        if _open.difference(run):  # threads of another strategy may be multiplying
            return
        _clear_workspaces()
        for device in run:
            device._multiplying = threads - 1 + bool(device.update_bytes)

    # -- computing

    @contextmanager
    def acquire_core(self) -> Iterator[None]:
        self._switch.check()
        yield

    def follow_caller(self) -> None:
        self.compute.follow(torch.cuda.current_stream(self.torch_device))

    def process_settings(self) -> AbstractContextManager[None]:
        return interpreter.quick_switches()

    def host_thread_settings(self) -> AbstractContextManager[None]:
        # One core per GPU, so that its worker launches without delay. This counts GPUs without a worker too: the number
        # of intra-op threads decides how sums round, and results must be the same for any number of workers.
        return intraop_threads.reserve_cores(max(1, torch.cuda.device_count()))

    @contextmanager
    def activate(self) -> Iterator[None]:
        begin_on(self.torch_device)
        with ExitStack() as around:
            for other in self.others:  # user code may use tensors of other GPUs, if only to copy them here
                around.enter_context(other.running())
            around.enter_context(torch.cuda.device(self.torch_device))
            around.enter_context(self.compute.running())
            yield

    # -- ending

    def close(self) -> None:
        if not self._switch.closed:
            self._switch.close()
            self._arenas.clear()
            with ExitStack() as rest:  # runs in reverse order, every callback even if the GPU fails
                rest.callback(pinned.give_back)
                rest.callback(self._clear_if_last)
                for end in ("join", "settle"):
                    for stream in reversed(self.all_streams):
                        rest.callback(getattr(stream, end))

    def _clear_if_last(self) -> None:
        _open.discard(self)
        if not _open:  # threads of other devices may be using the workspaces
            _clear_workspaces()


def workspace_bytes(torch_device: torch.device) -> int:
    """Return the bytes of a cuBLAS workspace. torch keeps one for each thread and stream that multiplies.

    cuBLASLt uses it, too. The allocator counts workspaces, but torch does not free them by itself.
    """
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))  # such as :4096:2:16:8
    if said:
        return sum(int(size) * int(count) * _KIB for size, count in said)
    return _SINCE_HOPPER if torch.cuda.get_device_properties(torch_device).major >= 9 else _USUAL


def _clear_workspaces() -> None:
    """Free the workspaces of all threads on all GPUs. No thread may be multiplying: it would lose its own."""
    torch._C._cuda_clearCublasWorkspaces()


def make_cuda(torch_devices: Sequence[torch.device], pin_memory: str) -> list[Device]:
    """Create one device per entry. Entries that name the same GPU are workers that share its memory and generator."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    numbers = [d.index or 0 for d in torch_devices]
    for number in numbers:
        if number >= count:
            raise ValueError(
                f"devices: there is no GPU {number}, torch sees {count} CUDA device(s). List others, check the driver "
                "and CUDA_VISIBLE_DEVICES, or set accelerator='cpu' to run on emulated devices."
            )
    torch.cuda.init()  # type: ignore[no-untyped-call]  # creates the default generators
    return share_out([torch.device("cuda", number) for number in numbers], pin_memory)


def share_out(torch_devices: list[torch.device], pin_memory: str) -> list[Device]:
    """Create the devices of `make_cuda`, after its checks."""
    made: list[CudaDevice] = []
    for index, gpu in enumerate(torch_devices):
        made.append(CudaDevice(index, gpu, pin_memory, torch_devices.count(gpu), torch_devices[:index].count(gpu)))
    computing = {device.torch_device: device.compute for device in made}
    for device in made:
        device.others = [stream for gpu, stream in computing.items() if gpu != device.torch_device]
    return [*made]
