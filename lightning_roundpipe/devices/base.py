"""The device façade: all that the engine knows about a worker's hardware.

The engine never asks which kind of device it runs on. An emulated device has the streams, events and memory limit of a
GPU, built from threads and a `Ledger`. Every ordering rule can thus be tested without a GPU, and a GPU runs the same
code.

Both kinds keep three rules, and rely on them:

* An event exists only once it has been recorded. Waiting for a CUDA event that was never recorded returns at once, so
  the façade cannot create one. Hand an event to another thread only after ``record()`` has returned it.
* Only work on the same stream is ordered. To read what another stream writes, wait for an event of that stream.
* Nothing blocks for ever. ``abort()`` wakes all threads that wait for a device, so the failure of one thread ends the
  others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_roundpipe.devices.waiter import AbortSwitch

NOTHING = nullcontext()
"""A context that does nothing. Any number of threads may be in it."""
POISON = 0xFF
"""The byte that overwrites freed buffers. Two or four of them are a NaN in bf16, fp16 and fp32."""
MAX_WAIT_S = 1e-3
"""Longest time, in seconds, that activations wait on the link for a chunk of weights or gradients."""


class TrackedTensors(AbstractContextManager["TrackedTensors"]):
    """Tensors that count as resident on a device until `release`, the end of the block, or this object's deletion."""

    def release(self) -> None:
        """Stop counting the tensors. Idempotent."""

    def __exit__(self, *error: object) -> None:
        self.release()


class Event(ABC):
    """A point in a stream's work."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the stream has reached this point.

        Raises:
            StreamAborted: the event's device was aborted or closed, before or during the wait.
            StreamError: earlier work on the stream failed. (CUDA raises its own errors.)
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether ``wait()`` would return or raise without blocking."""

    @abstractmethod
    def time(self) -> float:
        """Return when the stream reached this point, in seconds on the clock of ``time.perf_counter()``.

        Raises:
            RuntimeError: the event was recorded without ``timed=True``, is not done, or its stream failed.
        """


class Stream(ABC):
    """A queue of work that runs in order."""

    name: str

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """Return an event that is done when all work now on the stream is done. ``timed``: for `Event.time`."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let all work enqueued from now on run after ``event``, of any device of the same kind.

        Blocks the caller on an emulated ``compute`` stream, which is the calling thread itself, and on a GPU until
        ``event`` is recorded, which a stream with a thread of its own does late.
        """

    @abstractmethod
    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue ``dst <- src``, hidden from autograd: it records nothing and no version counter changes.

        The stream keeps both tensors alive until the copy is done. The copy reads ``src`` when it runs, not when it is
        enqueued, so wait for a later event before you write ``src`` or read ``dst``.

        Raises:
            ValueError: shapes or dtypes differ, or ``dst`` is expanded along a dimension where ``src`` is not.
        """

    def poison(self, buffer: Tensor) -> None:
        """Enqueue setting every byte of the contiguous ``buffer`` to ``POISON`` if the emulation asks for it.

        Call it where the content of an arena dies but the arena stays, so that a late reader computes NaN.
        """
        return

    def running(self) -> AbstractContextManager[None]:
        """Run the calling thread's torch operations on this stream. Emulated devices run them at once."""
        return NOTHING

    def synchronize(self) -> None:
        """Block until all work enqueued so far is done."""
        self.record().wait()

    def drop_finished(self) -> None:
        """Release the tensors that are kept for work that is done by now."""
        return

    def settle(self) -> None:
        """Wait for all work, even after an abort, and clear the stream's error. The abort switch must be thrown."""
        return

    def join(self) -> None:
        """End the stream's thread, if it has one, once its work is done. The abort switch must be thrown."""
        return


class Device(ABC):
    """One worker's device: streams, memory, and the random generator of the layers that run on it.

    What only some hardware needs does nothing by default. Layers run on ``compute``. The five copy streams are
    independent of each other except for the link: the ``_up`` streams share the direction to the device, both ``_down``
    streams the other. A worker is idle until its activations arrive, while weights and gradients are needed a stage
    later, so activations go first on the link. A copy that has started cannot be interrupted, so all other copies go in
    chunks, for one of which activations wait at most `MAX_WAIT_S`. Activations that are still on their way to the host
    go up on ``arrivals_up``, so that those that are there do not wait behind them.
    """

    compute: Stream
    weights_up: Stream
    activations_up: Stream
    arrivals_up: Stream
    activations_down: Stream
    gradients_down: Stream
    updates: Stream
    updates_copy: Stream
    """Streams of optimizer steps on this device. `abort` leaves them alone, as an update that has begun is to end."""
    update_bytes: int = 0
    """How many bytes optimizer steps may take beside the layers."""
    generator: torch.Generator
    """The default generator of layers that run on this device."""
    lead_bytes: int
    """How many bytes of calls the host may enqueue ahead of the device, memory permitting."""
    backward_needs_interpreter: bool
    """Whether autograd runs backward on the thread that calls it, as on the host, and not on one of its own."""

    def __init__(self, index: int, torch_device: torch.device) -> None:
        self.index, self.torch_device = index, torch_device
        self._switch = AbortSwitch(f"Device {index}")
        self._arenas: dict[int, tuple[Tensor, str]] = {}
        """Arenas, with their purposes, by the keys of their storages."""

    @property
    def kind(self) -> str:
        """Name of the hardware. Devices of one kind are equally fast, as all emulated ones are."""
        return ""

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The six streams of layers, ``compute`` first."""
        return (
            self.compute, self.weights_up, self.activations_up, self.arrivals_up, self.activations_down,
            self.gradients_down,
        )  # fmt: skip

    @property
    def all_streams(self) -> tuple[Stream, ...]:
        """Also those of optimizer steps."""
        return (*self.streams, self.updates, self.updates_copy)

    @abstractmethod
    def allocate(self, nbytes: int, purpose: str) -> Tensor:
        """Allocate an arena: uninitialised device memory, shape ``(nbytes,)``, uint8, 256-byte aligned.

        The device keeps it until `free`. ``purpose`` names it in out-of-memory errors.

        Raises:
            DeviceOutOfMemory: it does not fit.
        """

    def _add_arena(self, arena: Tensor, purpose: str) -> Tensor:
        self._arenas[arena.untyped_storage()._cdata] = arena, purpose
        return arena

    def free(self, buffer: Tensor) -> None:
        """Free an arena, the tensor that `allocate` returned. Work that uses it must be done."""
        key = buffer.untyped_storage()._cdata
        arena, purpose = self._arenas.get(key, (None, ""))
        assert arena is buffer, f"this is not an arena of device {self.index}, or not any more"
        del self._arenas[key]
        self._freed(arena, purpose)

    @abstractmethod
    def _freed(self, arena: Tensor, purpose: str) -> None:
        """Do what there is to do when an arena is freed."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> Tensor:
        """Return host memory of shape ``(nbytes,)``, uint8, for asynchronous copies. Freed with its last view."""

    def reserve_host(self, nbytes: int) -> None:
        """Page-lock that much memory for `host_like` ahead of time, because doing so during a step stalls the step."""
        return

    def worth_copying(self, nbytes: int) -> bool:
        """Return whether a copy of ``nbytes`` in `host_buffer` makes uploads from mapped files faster, and fits."""
        return False

    @abstractmethod
    def host_like(self, t: Tensor) -> Tensor:
        """Return a host tensor like ``t`` (shape, dtype, strides) to hold ``t``. Expanded dimensions take no memory."""

    @abstractmethod
    def device_like(self, t: Tensor, filled_on: Stream, *, lent: bool = False) -> Tensor:
        """Return a device tensor like ``t`` (shape, dtype, strides), written on ``filled_on`` and used on ``compute``.

        Allocate such tensors here only: other memory may still be in use by earlier work of another stream. A ``lent``
        tensor goes to `free_after_compute` in the end. Its memory belongs to ``filled_on``, which need not wait for
        ``compute``. Other memory belongs to ``compute``, and the tensor may be deleted at any time.

        Raises:
            DeviceOutOfMemory: it does not fit. (Emulated devices count it when it is tracked.)
        """

    def free_after_compute(self, tensors: Iterable[Tensor]) -> None:
        """Keep ``lent`` tensors, whose stream does not wait for ``compute``, until its present work is done."""
        return

    def drop_finished(self) -> None:
        """Release what streams keep for work that is done by now, rather than at their next calls."""
        return

    def named(self, *name: object) -> AbstractContextManager[None]:
        """Return the context that marks the work enqueued inside for a profiler, by the words of ``name``."""
        return NOTHING

    def track(self, tensors: Iterable[Tensor], purpose: str) -> TrackedTensors:
        """Count the tensors' storages as resident until the returned object is released.

        A storage counts once, however many tensors or `TrackedTensors` share it. The result keeps the storages alive,
        but not the tensors or their autograd graph. Does nothing on a GPU, whose allocator counts.

        Raises:
            DeviceOutOfMemory: they do not fit. Then none of them is counted.
        """
        return TrackedTensors()

    def track_until_freed(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count the tensors' storages, except arenas, as long as they live, or raise `DeviceOutOfMemory`."""
        return

    def saved_for_backward(self) -> AbstractContextManager[None]:
        """Count what autograd saves inside until its graph is freed; `DeviceOutOfMemory` inside if it does not fit."""
        return NOTHING

    def saved_between_layers(self, present: Callable[[], Device | None]) -> AbstractContextManager[None]:
        """Count what autograd saves inside on the device that ``present`` returns then; None: on the host, uncounted.

        To be entered around all code between layers: hooks of that code lie inside and take precedence.
        """
        return NOTHING

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the device's resident bytes include the tensor's storage."""
        return tensor.device == self.torch_device

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak of resident bytes since the start or ``reset_peak()``. Workers of a GPU report their sum."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at the bytes resident now."""

    def allocation_retries(self) -> int:
        """Return how often the allocator has emptied its cache to find room. Workers of a GPU report their sum."""
        return 0

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the bytes resident now."""

    @abstractmethod
    def resident_by_purpose(self) -> dict[str, int]:
        """Return the bytes resident now by purpose, for messages."""

    @abstractmethod
    def capacity(self) -> int | None:
        """Return how many bytes this worker may use, including those in use; ``None`` if there is no limit."""

    def library_bytes(self) -> int:
        """Return how many bytes libraries (cuBLAS) keep on the device beside our tensors, as far as it is known."""
        return 0

    def warm_up(self) -> None:
        """Let libraries allocate that memory now, in the calling thread, or it would count as the first layer's."""
        return

    def settle_libraries(self, devices: Sequence[Device], threads: int) -> None:
        """Free what libraries keep, while nothing runs. From now on, `library_bytes` counts each microbatch's thread.

        Args:
            devices: all devices of the run, including this one.
            threads: how many microbatches there are.
        """
        return

    @abstractmethod
    def acquire_core(self) -> AbstractContextManager[None]:
        """Return the context in which a layer computes. Not reentrant; nothing may wait inside (`core_semaphore`)."""

    def process_settings(self) -> AbstractContextManager[None]:
        """Return the context of this kind's process-wide settings. The main thread enters it."""
        return NOTHING

    def follow_caller(self) -> None:
        """Let ``compute`` wait for what the calling thread, in user code between steps, has enqueued on its own stream.

        What that writes is read by the next step, and what it reads is memory that ``compute`` may use again.
        """
        return

    def host_thread_settings(self) -> AbstractContextManager[None]:
        """Return the context of the settings of a thread that computes on the host beside devices of this kind."""
        return NOTHING

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make this the calling thread's current device, and ``compute`` its current stream."""

    def abort(self) -> None:
        """Make all waits and stream calls, of any thread, raise ``StreamAborted`` until `reset`.

        Queued work is dropped where possible, so the content of buffers is undefined afterwards.
        """
        self._switch.throw("aborted because another thread failed")

    def reset(self) -> None:
        """End an abort and clear stream errors, after all enqueued work. No other thread may use the device."""
        assert not self._switch.closed, f"device {self.index} is closed"
        self._switch.throw("being reset")
        for stream in self.streams:
            stream.settle()
        self._switch.clear()

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and free the memory. Idempotent. Queued work may be dropped, so synchronize first."""


def check_copy(dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair to pass to ``copy_``, which by itself would broadcast and convert silently.

    An expanded dimension (attention masks often have one) is narrowed to its one element, because torch refuses to
    write a tensor whose elements share memory.
    """
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(
            f"copy needs equal shapes and dtypes, not {src.dtype} {tuple(src.shape)} "
            f"into {dst.dtype} {tuple(dst.shape)}."
        )
    dst, src = dst.data, src.data
    for dim, stride in enumerate(dst.stride()):
        if stride == 0 and dst.shape[dim] > 1:
            if src.stride(dim) != 0:
                raise ValueError(
                    f"copy into dimension {dim} of an expanded tensor needs a source that is expanded alike."
                )
            dst, src = dst.narrow(dim, 0, 1), src.narrow(dim, 0, 1)
    return dst, src


def chunks(dst: Tensor, src: Tensor, nbytes: float) -> list[tuple[Tensor, Tensor]]:
    """Split ``dst <- src``, a pair of `check_copy`, into copies of at most ``nbytes`` (but at least one element) each.

    Tensors that are not contiguous stay whole; large ones rarely are.
    """
    if not (dst.is_contiguous() and src.is_contiguous()) or dst.numel() * dst.element_size() <= nbytes:
        return [(dst, src)]
    elements = max(1, int(nbytes) // dst.element_size())
    return list(zip(torch.split(dst.view(-1), elements), torch.split(src.view(-1), elements), strict=True))


def stage(tensor: Tensor, device: Device) -> Tensor:
    """Return a copy of a host tensor, where possible in memory from which ``device`` copies without blocking the host.

    It is an ordinary clone if the tensor is not strided, or if torch refuses to write to it, as its elements overlap.
    """
    if tensor.layout is not torch.strided:
        return tensor.clone()
    return filled(device.host_like(tensor), tensor)


def filled(copy: Tensor, tensor: Tensor) -> Tensor:
    """Return ``copy`` with the values of ``tensor``, or a clone if torch refuses to write to it as elements overlap."""
    to, of = check_copy(copy, tensor)
    try:
        to.copy_(of)
    except RuntimeError:
        return tensor.clone()
    return copy
