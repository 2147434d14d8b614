"""Finds races on a GPU that is played on the CPU: accesses, and memory that is used again, which no event orders.

As `ordering` does for emulated devices, but one floor lower: below our own streams, at the calls of ``torch.cuda``. So
it sees what only a GPU has:

* An event has been reached when somebody has waited for it and not before: a GPU is as slow as it likes. ``query()``
  says so, too.
* Memory belongs to the stream that was the current one when it was allocated. When its last reference is gone, that
  stream's next work may write to it, at once and without waiting for anybody: so by then all that other streams do with
  it must come before what that stream does next. What the host has allocated may be used again by the host.
* What is new may be old: who touches memory of another stream first must come after what that stream did before.

    compute: allocate ── write ── record() ─► event ─► wait(event) ── copy stream: read ── [1]   and in backward
    last reference dropped ── compute has waited for the read, or the host has ── [2]   else: a fault

Copies of weights and gradients go in chunks of some kilobytes, so that tensors of small models have several, too. Host
threads count as one, as in `ordering`. Autograd runs a node in the stream of its forward and puts waits between streams
itself; here it runs all of a backward in the caller's.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import FakeEvent, FakeStream
from ordering import HOST, PAGE, Access, Ordering, _local, _touched, following, unfollowed
from torch import Tensor

from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream
from lightning_roundpipe.devices.cuda_streams import CudaStream
from lightning_roundpipe.engine.step_slots import Turns
from lightning_roundpipe.memory.grad_buffers import GradientPool
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.user_code.mode import Proxies

SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")
"""Operations that return to the host what it waits for."""


CHUNK_BYTES = 4096

NOBODY = ""
"""Owns what the CPU has computed, of which a GPU's kernels would have been given a copy."""


@dataclass
class Memory:
    """A storage whose allocation was seen."""

    owner: str
    start: int
    end: int
    shared: bool = False
    """Whether others than its owner have used it."""


class HappensBefore(Ordering):
    """Use as a context around a run on fake GPUs; then ``faults`` says what was not ordered.

    Attributes:
        waits: (thread, what) of each time that the host waited for what an operation computed.
        reused: how often memory that several streams had used was given back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.reused = 0
        self._memory: dict[int, Memory] = {}
        self._kept: dict[int, Any] = {}
        """Storages whose allocation was not seen."""
        self._gone: deque[int] = deque()
        """Storages that have died since somebody looked."""

    def follow(self, patch: pytest.MonkeyPatch) -> None:
        _follow_cuda(self, patch)
        _follow_threads(self, patch)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._memory.clear()
        self._kept.clear()

    # -- clocks

    def join(self, stream: str, point: Counter[str]) -> None:
        with self._lock:
            self._look_for_freed()  # before anything else is ordered
        super().join(stream, point)

    def reached(self, event: FakeEvent) -> bool:
        """Whether the host knows that ``event`` is over."""
        with self._lock:
            host = self._clocks[HOST]
            return all(host[stream] >= tick for stream, tick in event.point.items())

    # -- memory

    def owner_of(self, tensor: Tensor) -> str:
        """The stream whose memory it is, as far as is known."""
        with self._lock:
            self._look_for_freed()
            memory = self._memory.get(_key(tensor))
            return NOBODY if memory is None else memory.owner

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        stream, name = getattr(_local, "stream", HOST), func._schema.name
        if stream is None or func.is_view:
            return
        reads, writes = _touched(func._schema, args, kwargs, result)
        new = self.allocated(stream, reads, writes)
        empty = name.startswith(("aten::empty", "aten::new_empty"))
        if not empty and not any(map(self._is_on_device, [*reads, *writes])):
            stream = HOST  # a batch, labels, a generator's state: where there are GPUs it would not be on one
            for memory in new:
                memory.owner = NOBODY
        else:
            for tensor in writes:  # zeros, say: made where they are written to
                if (memory := self._memory.get(_key(tensor))) is not None and memory.owner == NOBODY:
                    memory.owner = stream
        self.access(stream, reads, writes, name)
        if name in SYNCHRONIZES and stream != HOST:
            self.waits.append((threading.current_thread().name, name))
            self.join(HOST, self.point(stream))

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Whether it would be, if there were one; the host computes with what a copy has brought it as well."""
        memory = self._memory.get(_key(tensor))
        if memory is not None and memory.owner in (HOST, NOBODY):
            return False
        return self.was_computed(tensor)

    def allocated(self, stream: str, reads: list[Tensor], writes: list[Tensor]) -> list[Memory]:
        """Of ``writes``, what has not been seen is memory of ``stream``."""
        new: list[Memory] = []
        with self._lock:
            self._look_for_freed()
            known = {_key(t) for t in reads}
            for tensor in writes:
                if tensor.layout is not torch.strided or not tensor.numel():
                    continue
                storage = tensor.untyped_storage()
                if (key := storage._cdata) in self._memory or key in self._kept or key in known:
                    continue
                start = storage.data_ptr()
                self._purge(start, start + storage.nbytes())
                new.append(Memory(stream, start, start + storage.nbytes()))
                self._memory[key] = new[-1]
                # Safe in a destructor, which may run while the lock is held.
                weakref.finalize(storage, self._gone.append, key).atexit = False
        return new

    def _span(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.layout is torch.strided and tensor.numel():
            self._look_for_freed()  # or its address might mean two things
        return super()._span(tensor)

    def _keep(self, storage: Any) -> None:
        if storage._cdata not in self._memory:
            self._kept.setdefault(storage._cdata, storage)

    def access(self, stream: str, reads: Any, writes: Any, what: str) -> None:
        with self._lock:
            self._look_for_freed()
            for tensor in (*reads, *writes):
                memory = self._memory.get(_key(tensor)) if tensor.layout is torch.strided else None
                if memory is not None and memory.owner != stream:
                    memory.shared = True
        super().access(stream, reads, writes, what)

    def _look_for_freed(self) -> None:
        while self._gone:
            memory = self._memory.pop(self._gone.popleft())
            if memory.shared:
                self._freed(memory)
            self._purge(memory.start, memory.end)

    def _freed(self, memory: Memory) -> None:
        """Its owner's next work may write to it [2]."""
        if memory.owner == NOBODY:
            return
        self.reused += 1
        knows = self._clock(memory.owner).copy()
        for stream, tick in self._clocks[HOST].items():
            knows[stream] = max(knows[stream], tick)
        for old in self._within(memory.start, memory.end):
            if old.stream not in (memory.owner, HOST) and knows[old.stream] < old.tick:
                text = f"memory of {memory.owner} is given back before {old.what} on {old.stream} is over"
                if text not in self.faults:
                    self.faults.append(text)

    def _within(self, start: int, end: int) -> set[Access]:
        found: set[Access] = set()
        for page in range(start >> PAGE, ((end - 1) >> PAGE) + 1):
            found.update(old for old in self._pages.get(page, ()) if old.start < end and start < old.end)
        return found

    def _purge(self, start: int, end: int) -> None:
        for page in range(start >> PAGE, ((end - 1) >> PAGE) + 1):
            if page in self._pages:
                self._pages[page] = [old for old in self._pages[page] if old.end <= start or end <= old.start]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _follow_cuda(ordering: HappensBefore, patch: pytest.MonkeyPatch) -> None:
    real_init = CudaStream.__init__

    def init(self: Any, name: str, *args: Any) -> None:
        real_init(self, name, *args)
        self.stream.name = self.stream.name or name  # several may be one

    def record(self: FakeEvent, stream: FakeStream) -> None:
        real_record(self, stream)
        self.point = ordering.point(stream.name)

    def synchronize(self: FakeEvent) -> None:
        real_synchronize(self)
        ordering.join(HOST, self.point)

    def wait_event(self: FakeStream, event: FakeEvent) -> None:
        real_wait(self, event)
        ordering.join(self.name, event.point)

    def synchronize_stream(self: FakeStream) -> None:
        real_synchronize_stream(self)
        ordering.join(HOST, ordering.point(self.name))

    real_record, real_synchronize = FakeEvent.record, FakeEvent.synchronize
    real_wait, real_synchronize_stream = FakeStream.wait_event, FakeStream.synchronize
    patch.setattr(CudaStream, "__init__", init)
    patch.setattr(FakeEvent, "record", record)
    patch.setattr(FakeEvent, "synchronize", synchronize)
    patch.setattr(FakeEvent, "query", lambda self: ordering.reached(self))
    patch.setattr(FakeStream, "wait_event", wait_event)
    patch.setattr(FakeStream, "synchronize", synchronize_stream)
    patch.setattr(fake_cuda, "on_stream", lambda stream: following(ordering, stream.name))
    _follow_gradients_of_stand_ins(ordering, patch)
    for name in ("host_buffer", "host_like"):
        _follow_host_memory(CudaDevice, name, ordering, patch)
    for name in ("take", "take_landing", "take_wide"):  # narrowed gradients are added up in ordinary memory
        _follow_host_memory(GradientPool, name, ordering, patch)


def _follow_host_memory(cls: type, name: str, ordering: HappensBefore, patch: pytest.MonkeyPatch) -> None:
    real = getattr(cls, name)

    def made(self: Any, what: Any) -> Any:
        with unfollowed():
            memory = real(self, what)
        ordering.allocated(HOST, [], [getattr(memory, "flat", memory)])
        return memory

    patch.setattr(cls, name, made)


def _follow_gradients_of_stand_ins(ordering: HappensBefore, patch: pytest.MonkeyPatch) -> None:
    """Autograd copies them to the host, where the masters lie, and waits for that; here they stay what they are."""
    real = Proxies.gradients

    def gradients(self: Proxies, masters: Any = None) -> Any:
        if any(proxy.grad is not None for _, proxy in self._known.values()):
            for stream in [name for name in ordering._clocks if name.endswith("-compute")]:
                ordering.join(HOST, ordering.point(stream))
        return real(self, masters)

    patch.setattr(Proxies, "gradients", gradients)


def _follow_threads(ordering: HappensBefore, patch: pytest.MonkeyPatch) -> None:
    real = TaskThread._loop

    def loop(self: TaskThread) -> None:
        with following(ordering, HOST):
            real(self)

    patch.setattr(TaskThread, "_loop", loop)


@contextlib.contextmanager
def races(*, shared: bool = False) -> Iterator[HappensBefore]:
    """Trainers get fake GPUs, one for each worker or one that is ``shared``, and what runs inside is followed."""
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.trainers_on_gpus(patch, shared=shared)
        patch.setattr(ChunkedCopyStream, "chunk_bytes", CHUNK_BYTES)
        with HappensBefore() as found:
            if not shared:
                tell_apart(found, patch)
            yield found


def tell_apart(ordering: HappensBefore, patch: pytest.MonkeyPatch) -> None:
    """GPUs that are played are all the CPU to torch. Whether something is where it is needed goes by who owns it."""
    real = Turns.home_of

    def home_of(self: Turns, tensor: Tensor) -> Any:
        owner = ordering.owner_of(tensor)
        own = (device for device in self.context.pool.devices if owner.startswith(f"roundpipe-dev{device.index}-"))
        return next(own, None) or real(self, tensor)

    patch.setattr(Turns, "home_of", home_of)
