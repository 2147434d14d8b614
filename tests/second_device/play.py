"""The part of ``torch.cuda`` that devices use, played by the device type of `backend`: Trainers then run on it."""

import contextlib
import itertools
import time

import fake_cuda
import torch

from lightning_roundpipe import strategy
from lightning_roundpipe.devices.cuda import share_out
from second_device import backend
from second_device.backend import Module
from second_device.late import Mark

ROOM = 8 << 30
"""Bytes that each device says it has."""
_numbers = itertools.count(1)
_seed_all = Module.manual_seed_all
"""What `play` puts something in front of; it may be called twice."""


class Event:
    """Reached as soon as it is recorded, or when its stream has come that far (`late`)."""

    def __init__(self, enable_timing=False, blocking=False):
        self.timed = enable_timing
        self.mark = None

    @property
    def at(self):
        return None if self.mark is None else self.mark.at

    def record(self, stream):
        if backend.LATE:
            self.mark = backend.LATE[0].streams.mark(stream.key)
        else:
            self.mark = Mark()
            self.mark.at = time.perf_counter()

    def synchronize(self):
        assert self.mark is not None, "waited for an event that was never recorded"
        if backend.LATE:
            backend.LATE[0].streams.wait(self.mark)

    def query(self):
        return self.at is not None

    def elapsed_time(self, later):
        assert self.timed and later.timed and self.at is not None and later.at is not None
        return (later.at - self.at) * 1e3


class Stream:
    """A stream of one device."""

    def __init__(self, torch_device):
        self.device, self.number = torch_device, next(_numbers)

    @property
    def key(self):
        return self.device.index, self.number

    def wait_event(self, event):
        assert event.mark is not None, "waited for an event that was never recorded"
        if backend.LATE:
            backend.LATE[0].streams.add(self.key, (event.mark,))

    def synchronize(self):
        if backend.LATE:
            backend.LATE[0].streams.wait(backend.LATE[0].streams.mark(self.key))


@contextlib.contextmanager
def stream(entered):
    """The calling thread's current stream, and its device the current one, as ``torch.cuda.stream`` does."""
    library, index = backend.library(), entered.device.index
    before = library.played_stream(index)
    with Module.device(entered.device):
        library.played_set_stream(index, entered.number)
        try:
            yield
        finally:
            library.played_set_stream(index, before)


def set_stream(entered):
    """As ``torch.cuda.set_stream`` does, for good."""
    Module.set_device(entered.device)
    backend.library().played_set_stream(entered.device.index, entered.number)


def current_stream(torch_device):
    """The calling thread's stream on a device: its default one, if it has entered no other."""
    found = object.__new__(Stream)
    found.device, found.number = torch_device, backend.library().played_stream(torch_device.index)
    return found


def play(patch):
    """Put the device type in the place of CUDA."""
    backend.register()
    fake_cuda.put_in_place(
        patch, Event=Event, Stream=Stream, stream=stream, set_stream=set_stream, current_stream=current_stream,
        device=Module.device, set_device=Module.set_device, current_device=Module.current_device,
        default_generators=backend.generators(),
        manual_seed=lambda seed: backend.generators()[Module.current_device()].manual_seed(seed),
        manual_seed_all=_seed_all, cudart=lambda: backend.CUDART, mem_get_info=lambda device: (ROOM, ROOM),
    )  # fmt: skip
    # torch.manual_seed calls this as it calls CUDA's.
    patch.setattr(Module, "manual_seed_all", staticmethod(lambda seed: torch.cuda.manual_seed_all(seed)))
    patch.setattr(
        torch._C,
        "_cuda_hasPrimaryContext",
        lambda index: index in set().union(*backend.MADE_CURRENT.values()),
        raising=False,
    )


def trainers_on_devices(patch, *, shared=False, first=0, pin_memory="on"):
    """Let Trainers have devices of `backend`; those that were made last are in what is returned.

    Args:
        patch: undoes it.
        shared: whether all workers share one. If not, each has its own.
        first: the number of the first device.
        pin_memory: see ``pinned.host_buffer``.
    """
    made = []

    def make(kind, torch_devices, *_):
        homes = [torch.device(backend.NAME, first if shared else first + i) for i in range(len(torch_devices))]
        made[:] = share_out(homes, pin_memory)
        return made

    play(patch)
    patch.setattr(strategy, "make_devices", make)
    return made
