"""The part of ``torch.cuda`` that devices use, played on the CPU: what is enqueued is done at once."""

import functools
import threading
import time
from contextlib import contextmanager
from weakref import WeakSet

import torch

from lightning_roundpipe import strategy
from lightning_roundpipe.devices import cuda, cuda_streams, thread_owner
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.engine import executor, layer_calls

GPU_CLOCK_AHEAD = 1234.5
"""Seconds by which the fake GPU's clock differs from the host's."""


DEAD = []
"""The number of a CUDA error after which every call fails with it."""


def refuse_if_dead():
    if DEAD:
        raise accelerator_error(DEAD[0])


def accelerator_error(number):
    """What torch raises for CUDA's error of that number."""
    error = torch.AcceleratorError(f"CUDA error: number {number}")
    error.error_code = number
    return error


class FakeEvent:
    """Reached as soon as it is recorded, unless its stream is busy."""

    def __init__(self, enable_timing=False, blocking=False):
        self.timed = enable_timing
        self.stream = None
        self.at = 0.0

    def record(self, stream):
        refuse_if_dead()
        self.stream, self.at = stream, time.perf_counter() + GPU_CLOCK_AHEAD

    def synchronize(self):
        refuse_if_dead()
        assert self.stream is not None, "waited for an event that was never recorded"
        self.stream.busy = False
        SYNCHRONIZED.append(threading.current_thread().name)

    def query(self):
        refuse_if_dead()
        return self.stream is not None and not self.stream.busy

    def elapsed_time(self, later):
        assert self.timed and later.timed
        return (later.at - self.at) * 1e3


class FakeStream:
    """Counts what it is asked to wait for, and is busy when a test says so."""

    def __init__(self, torch_device):
        self.device = torch.device("cuda", 0)
        self.busy = False
        self.waited = []

    def wait_event(self, event):
        refuse_if_dead()
        assert event.stream is not None
        self.waited.append(event)

    def synchronize(self):
        refuse_if_dead()
        self.busy = False
        SYNCHRONIZED.append(threading.current_thread().name)


SYNCHRONIZED = []
"""Threads that have waited for the GPU."""
GPU_GENERATOR = torch.Generator()
"""What nobody draws from, as layers compute on the CPU: not the host's, as on a GPU."""
RANGES = []
"""Names that a profiler would show."""
RETRIES = [0]
"""What the allocator says of how often it had to try again."""
CLEARED = []
"""How many devices were open when cuBLAS's workspaces were cleared, each time."""


@contextmanager
def nothing(*args):
    yield


_current = threading.local()


@contextmanager
def current_stream(stream):
    """What ``torch.cuda.stream`` is."""
    before, _current.stream = getattr(_current, "stream", None), stream
    try:
        yield
    finally:
        _current.stream = before


def no_record_stream(*args):
    raise AssertionError("when memory comes back would be up to the allocator")


class AutogradThread:
    """Runs backward as for tensors on a GPU: on a thread of autograd's own, one for all who use that GPU.

    It finds what torch hands to it and nothing else; that torch does so is tested in ``devices/test_thread_owner.py``.
    """

    def __init__(self):
        self._one_at_a_time = threading.Lock()
        self._own = None

    def runs(self, real):
        """``real``, which runs a backward, on this thread."""
        return functools.partial(self._run, real)

    def _run(self, real, *args, **kwargs):
        caller = threading.current_thread()
        if caller is self._own or not caller.name.startswith("roundpipe-"):  # the main thread's loss is on the host
            return real(*args, **kwargs)
        raised = []
        whom, grad, stream = (
            thread_owner.context_of_thread(),
            torch.is_grad_enabled(),
            getattr(_current, "stream", None),
        )

        def run():
            thread_owner._stash(whom)
            try:
                with torch.set_grad_enabled(grad), current_stream(stream):
                    real(*args, **kwargs)
            except BaseException as error:
                raised.append(error)

        with self._one_at_a_time:
            self._own = threading.Thread(target=run, name="autograd")
            self._own.start()
            self._own.join()
        if raised:
            raise raised.pop()


def put_in_place(patch, **fakes):
    """Put fakes in the place of ``torch.cuda``, beside what any fake says of memory and what it must not be asked."""
    readings = {
        "mem_get_info": lambda device: (600, 1000),
        "get_device_name": lambda device: "a GPU",
        "get_per_process_memory_fraction": lambda device: 1.0,
        "memory_reserved": lambda device: 200,
        "memory_allocated": lambda device: 150,
        "max_memory_allocated": lambda device: 180,
        "reset_peak_memory_stats": lambda device: None,
        "memory_stats_as_nested_dict": lambda device: {"num_alloc_retries": RETRIES[0]},
    }
    for name, fake in (readings | fakes).items():
        patch.setattr(torch.cuda, name, fake)
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1:4")  # KiB: the models that are trained are small
    patch.setattr(torch.cuda.nvtx, "range_push", RANGES.append)
    patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: CLEARED.append(len(cuda._open)), raising=False)
    patch.setattr(cuda, "_open", WeakSet())
    patch.setattr(cuda_streams, "_streams", {})
    patch.setattr(torch.Tensor, "record_stream", no_record_stream, raising=False)
    RETRIES[0] = 0
    for seen in (SYNCHRONIZED, RANGES, CLEARED, DEAD):
        seen.clear()


def play_cuda(patch):
    """Put fakes in the place of CUDA, for `CudaDevice` on a device of the CPU."""
    put_in_place(
        patch, Event=FakeEvent, Stream=FakeStream, stream=current_stream, current_stream=FakeStream, device=nothing,
        current_device=lambda: 0, default_generators={0: GPU_GENERATOR, None: GPU_GENERATOR},
    )  # fmt: skip
    autograd = AutogradThread()
    for owner, name in ((torch.autograd, "backward"), (executor, "run_backward"), (layer_calls, "run_backward")):
        patch.setattr(owner, name, autograd.runs(getattr(owner, name)))
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True, raising=False)
    patch.setattr(cuda_streams, "_thread", threading.local())
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)


def trainers_on_gpus(patch, *, limited=False):
    """Let Trainers have fake GPUs for devices, each worker its own; those that were made last are in what is returned.

    Tensors do not show which, though on real ones user code could not compute with tensors of two.

    Args:
        patch: undoes it.
        limited: whether the memory that the fake tells of is a limit.
    """
    made = []
    streams = {}

    def make_one(index, count):
        patch.setattr(cuda_streams, "_streams", streams.setdefault(index, {}))
        return CudaDevice(index, torch.device("cpu"), "off", count)

    def make(kind, torch_devices, *_):
        made[:] = [make_one(i, len(torch_devices)) for i in range(len(torch_devices))]
        return [*made]

    play_cuda(patch)
    if not limited:
        patch.setattr(CudaDevice, "capacity", lambda self: None)
    patch.setattr(strategy, "make_devices", make)
    return made
