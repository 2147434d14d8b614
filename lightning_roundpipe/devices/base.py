"""The device façade: all that the runtime knows about a worker's hardware.

The runtime never asks which device it is on. An emulated device has the same streams, events and memory limit as a
GPU, made of threads and a ledger, so that every ordering rule is tested on a laptop, and what passes there is what
runs on a GPU.

Three rules hold for both kinds, and both rely on them:

* An event exists only once it has been recorded. Waiting for a CUDA event that nobody has recorded yet is no wait at
  all, so there is no way to make such an event here; hand events to other threads only after ``record()`` has
  returned.
* A stream is in order, and nothing else is. Whoever reads what another stream writes waits for that stream's event.
* Nothing blocks for ever. ``abort()`` wakes whoever waits for a device, so a failing thread lets all others leave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_roundpipe.devices.generators import GeneratorLock

POISON = 0xFF
"""The byte of a freed buffer: four, or two, of it are a NaN in fp32, bf16 and fp16."""


class TrackedTensors(AbstractContextManager["TrackedTensors"]):
    """Tensors that count as resident on a device until ``release()``, leaving the ``with`` block, or its own death."""

    def release(self) -> None:
        """Stop counting. Doing it twice is harmless."""

    def __exit__(self, *error: object) -> None:
        self.release()


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the point is reached.

        Raises:
            StreamAborted: the event's device was aborted or closed, before or during the wait.
            StreamError: the work before this point failed (CUDA raises its own errors).
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait()`` would return, or raise, at once."""

    @abstractmethod
    def time(self) -> float:
        """When the point was reached: seconds on the clock of ``time.perf_counter()``.

        Raises:
            RuntimeError: the event was not recorded with ``timed=True``, is not done, or its stream failed.
        """


class Stream(ABC):
    """A queue of work that is done in order."""

    name: str

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """The event that is reached when all work that is on the stream now is done.

        Args:
            timed: whether ``Event.time()`` will be asked for.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let everything that is enqueued from now on come after ``event``, of any stream of any device of this kind.

        The caller is not blocked, except on an emulated ``compute`` stream, which is the calling thread itself.
        """

    @abstractmethod
    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue ``dst <- src``, past autograd: no version counter moves and nothing is recorded.

        Both are kept alive until it is done. What ``src`` holds when the copy *runs* is copied, so neither may be
        written or read on the strength of this call alone: wait for an event recorded after it.

        Raises:
            ValueError: shapes or dtypes differ, or elements of ``dst`` share memory where those of ``src`` do not.
        """

    @abstractmethod
    def fill(self, buffer: Tensor, byte: int) -> None:
        """Enqueue that every byte of the contiguous ``buffer`` becomes ``byte`` (0 to 255), past autograd too."""

    @abstractmethod
    def poison(self, buffer: Tensor) -> None:
        """Enqueue ``fill(buffer, POISON)`` where the emulation asks for poison; do nothing elsewhere.

        Call it where an arena's content ends its life while the arena lives on, so that a late reader computes NaN.
        """

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Torch operations of the calling thread run on this stream. An emulated device runs them at once, in it."""

    @abstractmethod
    def synchronize(self) -> None:
        """``record().wait()``: block until everything enqueued so far is done."""


class Device(ABC):
    """One worker's device: five streams, memory, and the random generator that layers on it draw from.

    ``compute`` is for layers; the four copy streams never hold each other up, except for the link: both ``_up``
    streams share the direction towards the device, both ``_down`` streams the other. There activations go first, and
    wait at most `copy_priority.MAX_WAIT_S` for a chunk of something else.
    """

    index: int
    """The worker's number. Two workers may share one physical GPU."""
    torch_device: torch.device
    """Where tensors of this device are made."""
    compute: Stream
    weights_up: Stream
    activations_up: Stream
    activations_down: Stream
    gradients_down: Stream
    generator: torch.Generator
    """What layers on this device draw from unless they bring their own."""
    lead_bytes: int
    """Bytes of calls that the host enqueues before the device has reached them, if there is memory for them."""
    generator_lock: GeneratorLock
    """Reentrant; shared by all devices that share ``generator``. Hold it from seeding until the draw is over."""

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All five, ``compute`` first."""
        return (self.compute, self.weights_up, self.activations_up, self.activations_down, self.gradients_down)

    @abstractmethod
    def allocate(self, nbytes: int, purpose: str) -> Tensor:
        """An arena: device memory, shape ``(nbytes,)``, uint8, uninitialised, 256-byte aligned, kept until ``free``.

        Args:
            nbytes: its size; 0 is fine.
            purpose: what an out-of-memory error calls it.

        Raises:
            DeviceOutOfMemory: it does not fit.
        """

    @abstractmethod
    def free(self, buffer: Tensor) -> None:
        """Give back what ``allocate`` returned (that tensor, not a view of it). Its work must be done.

        Raises:
            ValueError: it did not come from this device's ``allocate``, or was freed already.
        """

    @abstractmethod
    def host_buffer(self, nbytes: int) -> Tensor:
        """Host memory that copies asynchronously: shape ``(nbytes,)``, uint8; given back when its last view dies."""

    @abstractmethod
    def reserve_host(self, nbytes: int) -> None:
        """Prepare that much memory for `host_like` now, because to page-lock it within a step would stall the step."""

    @abstractmethod
    def worth_copying(self, nbytes: int) -> bool:
        """Whether what lies in files, in all so many bytes, is to be copied into `host_buffer` memory to be read from
        there: that must be faster, and there must be room for it."""

    @abstractmethod
    def host_like(self, t: Tensor) -> Tensor:
        """A host tensor of ``t``'s shape, dtype and strides, to save ``t`` in; expanded dimensions take no memory."""

    @abstractmethod
    def device_like(self, t: Tensor, filled_on: Stream, *, lent: bool = False) -> Tensor:
        """A device tensor of ``t``'s shape, dtype and strides, to be filled on ``filled_on`` and used on ``compute``.

        Made in the calling thread any other way, its memory may be in use still by earlier work of another stream.

        Args:
            t: what it is like.
            filled_on: the stream that writes it.
            lent: whether it is given to `free_after_compute` at the end. Its memory is ``filled_on``'s then, which need
                not wait for what ``compute`` is doing; else it is ``compute``'s, and the tensor may die at any time.

        Raises:
            DeviceOutOfMemory: it does not fit. (Emulated devices count it once it is tracked.)
        """

    @abstractmethod
    def free_after_compute(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors that were lent until ``compute`` has done what is on it now: their memory's stream would use it
        again without waiting for that."""

    @abstractmethod
    def drop_finished(self) -> None:
        """Keep no longer what streams are done with. Each does so by itself, but only when it is next asked for
        something, and for a download of the forward pass that may be in the next step."""

    @abstractmethod
    def named(self, *name: object) -> AbstractContextManager[None]:
        """What is enqueued inside bears this name, made of these words, for a profiler."""

    @abstractmethod
    def track(self, tensors: Iterable[Tensor], purpose: str) -> TrackedTensors:
        """Count the tensors' storages as resident, each storage once however many tensors or handles share it.

        The storages are kept alive until then (not the tensors, so no graph is). On CUDA, which counts by itself,
        this does nothing.

        Raises:
            DeviceOutOfMemory: they do not fit. None of them is counted then.
        """

    @abstractmethod
    def track_until_freed(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count the tensors' storages as resident for as long as they live. What lies in an arena is counted there.

        Raises:
            DeviceOutOfMemory: one does not fit. Those before it are counted.
        """

    @abstractmethod
    def saved_for_backward(self) -> AbstractContextManager[None]:
        """Count what autograd saves inside, until the graph that saved it is gone.

        Raises (inside):
            DeviceOutOfMemory: it does not fit.
        """

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was resident since the start or ``reset_peak()``, in bytes. Shared GPUs report their sum."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new peak at what is resident now."""

    @abstractmethod
    def allocation_retries(self) -> int:
        """How often the allocator has given back all that it keeps to find room, since the process began. Shared GPUs
        report their sum."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """What is resident now, in bytes."""

    @abstractmethod
    def resident_by_purpose(self) -> dict[str, int]:
        """The same by purpose, for messages."""

    @abstractmethod
    def capacity(self) -> int | None:
        """Bytes that this worker may use in all, with what it uses already; ``None``: no limit."""

    @abstractmethod
    def library_bytes(self) -> int:
        """What libraries keep on the device for themselves, as far as that is known before: it is no tensor of ours."""

    @abstractmethod
    def warm_up(self) -> None:
        """Let libraries take that now, in the calling thread: else it would seem to be the first layer's."""

    @abstractmethod
    def settle_libraries(self, devices: Sequence[Device], threads: int) -> None:
        """Let libraries give back what they hold, and see whether it was more than `library_bytes` said.

        If so, code between layers uses them, too, and each of the threads that run it has a share from now on. Call it
        after the first batch, when nothing runs.

        Args:
            devices: all of the run's, this one among them.
            threads: that run code between layers.
        """

    @abstractmethod
    def acquire_core(self) -> AbstractContextManager[None]:
        """Held while a layer computes; never while waiting, which an emulated device checks. Not reentrant.

        Emulated devices share the machine's cores, and four forwards at once take longer than one after another. Layers
        that only pretend to compute give it back meanwhile (`emulated_work`).
        """

    @abstractmethod
    def process_settings(self) -> AbstractContextManager[None]:
        """What devices of this kind change for the whole process, as long as it is entered. For the main thread."""

    @abstractmethod
    def step_settings(self) -> AbstractContextManager[None]:
        """What devices of this kind change for the whole process while a step is on its way."""

    @abstractmethod
    def host_thread_settings(self) -> AbstractContextManager[None]:
        """What a thread that computes on the host beside devices of this kind changes for itself."""

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make this the calling thread's current device, and ``compute`` its current stream."""

    @abstractmethod
    def abort(self) -> None:
        """Make all present and future waits and stream calls raise ``StreamAborted`` until ``reset()``. Any thread may.

        Work that is queued is dropped where that is possible, so buffers hold anything afterwards.
        """

    @abstractmethod
    def reset(self) -> None:
        """End an abort, and forget a stream's error, once everything that was enqueued has come to rest.

        Call it when no other thread uses the device.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and give the memory back. Synchronize first: what is queued may be dropped. Idempotent."""


def check_copy(dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """The pair to hand to ``copy_``, which by itself would broadcast and convert silently.

    Expanded dimensions (an attention mask is often one) are narrowed to the one element that they are, because torch
    refuses to write a tensor whose elements share memory.
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


def stage(tensor: Tensor, device: Device) -> Tensor:
    """A copy of a host tensor in host memory that ``device`` copies from without the host waiting."""
    staged = device.host_like(tensor)
    to, of = check_copy(staged, tensor)
    to.copy_(of)
    return staged


def check_fill(buffer: Tensor, byte: int) -> Tensor:
    """``buffer`` as flat bytes, past autograd."""
    if not buffer.is_contiguous():
        raise ValueError(
            f"only contiguous memory can be filled, not strides {buffer.stride()} of {tuple(buffer.shape)}."
        )
    if not 0 <= byte <= 255:
        raise ValueError(f"a byte is 0 to 255, not {byte}.")
    return buffer.data.reshape(-1).view(torch.uint8)
