"""Finds memory that one stream touches without having waited for another, whether or not it shows in the numbers.

An emulated device computes in the calling thread: what was asked of its compute stream is done at once, so a copy that
forgot to wait for it reads the right values all the same. On a GPU it would not. `Ordering` therefore takes nothing
from timing. It follows every copy and every torch operation of a step, and keeps for each stream which points of which
other streams it has waited for (a vector clock); two accesses to the same bytes, one of them a write, need a chain of
events between them:

    stream A: write ── record() ─► event ─► wait(event) ── stream B: read         ordered
    stream A: write                                        stream B: read         a fault, however late B comes

The host is one more party. What a host thread enqueues comes after whatever the host has waited for; host threads
among each other count as one, because who goes when is the business of turns (`turns`). Of what a worker computes the
host knows only what it has waited for: a GPU is as slow as it likes.
"""

import contextlib
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.devices.emulated import EmulatedDevice
from lightning_roundpipe.devices.emulated_streams import InlineStream, ThreadStream
from lightning_roundpipe.devices.queued import ThreadEvent
from lightning_roundpipe.engine.layer_calls import Tape
from lightning_roundpipe.engine.microbatch import CallingThread
from lightning_roundpipe.memory.in_flight import IN_FLIGHT, InFlight
from lightning_roundpipe.user_code.graph_cut import Boundary

HOST = "host"
PAGE = 12
"""Accesses are looked up by pages of 4096 bytes."""
SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::equal")
"""Operations that return a value to the host, which waits for it."""

_local = threading.local()


@dataclass(frozen=True)
class Access:
    start: int
    end: int
    stream: str
    tick: int
    writes: bool
    what: str


class Ordering:
    """Use as a context around a run; then ``faults`` says what was not ordered."""

    def __init__(self):
        self.faults = []
        self.accesses = 0
        self._clocks = {HOST: Counter()}
        self._pages = {}
        self._events = {}
        self._known = set()
        """Addresses of storages that live."""
        self._dead = deque()
        self._lock = threading.Lock()

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        _follow_streams(self, self._patch)
        _follow_operations(self, self._patch)
        self._main = following(self, HOST)
        self._main.__enter__()
        return self

    def __exit__(self, *error):
        self._main.__exit__(*error)
        self._patch.undo()
        self._pages.clear()
        self._known.clear()
        self._events.clear()

    # -- clocks

    def point(self, stream):
        """Everything that is ordered before what ``stream`` does next."""
        with self._lock:
            return self._clock(stream).copy()

    def recorded(self, event, stream):
        """``event`` is the point at which ``stream`` is."""
        self._events[id(event)] = event, self.point(stream)

    def point_of(self, event):
        """Everything that is ordered before ``event``."""
        return self._events[id(event)][1]

    def join(self, stream, point):
        """What ``stream`` does from here on comes after ``point``."""
        with self._lock:
            _join(self._clock(stream), point)

    def _clock(self, stream):
        return self._clocks.setdefault(stream, Counter())

    # -- accesses

    def access(self, stream, reads, writes, what):
        """``stream`` is asked now to read and write these."""
        with self._lock:
            self.accesses += 1
            self._bury()
            clock = self._clock(stream)
            if stream != HOST:
                _join(clock, self._clocks[HOST])
            clock[stream] += 1
            for tensors, writing in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if (span := self._span(tensor)) is not None:
                        self._one(Access(*span, stream, clock[stream], writing, what), clock)

    def operation(self, func, args, kwargs, result):
        """The calling thread has asked for a torch operation."""
        stream, name = getattr(_local, "stream", HOST), func._schema.name
        if stream is None or func.is_view or name.startswith(("aten::empty", "aten::new_empty", "aten::set_")):
            return
        reads, writes = _touched(func._schema, args, kwargs, result)
        if not any(map(self.was_computed, [*reads, *writes])):
            stream = HOST  # a batch, labels, a generator's state: where there are GPUs it would not be on one
        self.access(stream, reads, writes, name)
        if name in SYNCHRONIZES:
            self.join(HOST, self.point(stream))

    def was_computed(self, tensor):
        """Whether a stream has written ``tensor``; on a GPU it would be there, and a look at it would wait."""
        with self._lock:
            self._bury()
            start, end = self._span(tensor) or (0, 0)
            return any(
                old.writes and old.stream != HOST and old.start < end and start < old.end
                for old in self._pages.get(start >> PAGE, ())
            )

    def _span(self, tensor):
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        self._keep(tensor.untyped_storage())
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()

    def _keep(self, storage):
        """See to it that its address does not mean two things."""
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            start = storage.data_ptr()
            # Safe in a destructor, which may run while the lock is held.
            weakref.finalize(storage, self._dead.append, (key, start, start + storage.nbytes())).atexit = False

    def _bury(self):
        """Forget accesses to storages that have died, whose addresses others get."""
        while self._dead:
            key, start, end = self._dead.popleft()
            self._known.discard(key)
            for page in range(start >> PAGE, ((end - 1) >> PAGE) + 1):
                self._pages[page] = [old for old in self._pages.get(page, ()) if old.end <= start or end <= old.start]

    def _one(self, new, clock):
        for page in range(new.start >> PAGE, ((new.end - 1) >> PAGE) + 1):
            kept = []
            for old in self._pages.get(page, ()):
                apart = old.end <= new.start or new.end <= old.start
                if not apart and (old.writes or new.writes) and clock[old.stream] < old.tick:
                    self._fault(old, new)
                covered = new.start <= old.start and old.end <= new.end
                if not (covered and (new.writes or (not old.writes and old.stream == new.stream))):
                    kept.append(old)
            self._pages[page] = [*kept, new]

    def _fault(self, old, new):
        text = f"{new.what} on {new.stream} does not wait for {old.what} on {old.stream}"
        if text not in self.faults:
            self.faults.append(text)


def _join(clock, point):
    for stream, tick in point.items():
        clock[stream] = max(clock[stream], tick)


def _follow_streams(ordering, patch):
    for kind in (InlineStream, ThreadStream):
        _follow_stream(kind, ordering, patch)
    real_wait, real_activate = ThreadEvent.wait, EmulatedDevice.activate

    def wait(self):
        real_wait(self)
        ordering.join(HOST, ordering.point_of(self))

    def keep(self, *_):
        # As on a GPU that is as far behind as the host lets it be. Emulated devices let go of tensors at once.
        behind = self.__dict__.setdefault("_behind", deque())
        behind.append(ordering.point_of(self.device.compute.record()))
        if len(behind) > IN_FLIGHT:
            ordering.join(HOST, behind.popleft())

    @contextlib.contextmanager
    def activate(self):
        with real_activate(self), following(ordering, self.compute.name):
            yield

    def backward(ctx, *incoming):
        # Autograd runs it in the stream of the call, which it lets wait for those that have made the gradients.
        if (home := ctx.gradients.home) is not None and (stream := getattr(_local, "stream", HOST)) is not None:
            ordering.join(home.compute.name, ordering.point(stream))
        return real_backward(ctx, *incoming)

    def moved(self, tensor, device, to):
        if to is None:  # as on a GPU, whose tensors the host waits for
            ordering.join(HOST, ordering.point(device.compute.name))
        return real_moved(self, tensor, device, to)

    @contextlib.contextmanager
    def in_backward(self, home, where):
        # Autograd adds a section's gradients of the stand-ins to those of the sections before, in one place.
        stand_ins = any(proxy.grad is not None for _, proxy in self.weights.mode.proxies._known.values())
        if stand_ins and (before := self.__dict__.get("_section_before")) is not None:
            ordering.join(home.compute.name, before)
        with real_in_backward(self, home, where):
            yield
        self._section_before = ordering.point(home.compute.name)

    real_backward, real_moved = Boundary.backward, Tape.moved
    real_in_backward = Tape._user_code
    patch.setattr(Tape, "moved", moved)
    patch.setattr(Tape, "_user_code", in_backward)
    patch.setattr(Boundary, "backward", staticmethod(backward))
    patch.setattr(ThreadEvent, "wait", wait)
    patch.setattr(InFlight, "keep", keep)
    patch.setattr(EmulatedDevice, "activate", activate)


def _follow_stream(kind, ordering, patch):
    real_record, real_wait, real_copy, real_poison = kind.record, kind.wait, kind.copy, kind.poison

    def record(self, *, timed=False):
        event = real_record(self, timed=timed)
        ordering.recorded(event, self.name)
        return event

    def wait(self, event):
        real_wait(self, event)
        ordering.join(self.name, ordering.point_of(event))

    def copy(self, dst, src):
        ordering.access(self.name, [src], [dst], "a copy")
        with unfollowed():
            real_copy(self, dst, src)

    def poison(self, buffer):
        if self._poisons:
            ordering.access(self.name, [], [buffer], "poison")
        with unfollowed():
            real_poison(self, buffer)

    def running(self):
        return following(ordering, self.name)

    replacements = {"record": record, "wait": wait, "copy": copy, "poison": poison, "running": running}
    for name, replacement in replacements.items():
        patch.setattr(kind, name, replacement)


class _Operations(TorchDispatchMode):
    """Every torch operation of the thread, as an access of the stream that the thread is on."""

    def __init__(self, ordering):
        super().__init__()
        self._ordering = ordering

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._ordering.operation(func, args, kwargs or {}, result)
        return result


def _touched(schema, args, kwargs, result):
    reads = []
    writes = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(_tensors(value))
    results = result if isinstance(result, (tuple, list)) and len(schema.returns) > 1 else [result]
    for value, returned in zip(results, schema.returns, strict=False):
        if returned.alias_info is None:
            writes.extend(_tensors(value))
    return reads, writes


def _tensors(value):
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, (list, tuple)) else []


@contextlib.contextmanager
def following(ordering, stream):
    """Torch operations of this thread belong to ``stream``."""
    before, _local.stream = getattr(_local, "stream", HOST), stream
    nested, _local.followed = getattr(_local, "followed", False), True
    try:
        with contextlib.nullcontext() if nested else _Operations(ordering):
            yield
    finally:
        _local.stream, _local.followed = before, nested


@contextlib.contextmanager
def unfollowed():
    """What a stream does itself has been counted."""
    before, _local.stream = getattr(_local, "stream", HOST), None
    try:
        yield
    finally:
        _local.stream = before


def _follow_operations(ordering, patch):
    def follow(kind, name):
        real = getattr(kind, name)

        def followed(self, *args):
            with following(ordering, HOST):
                real(self, *args)

        patch.setattr(kind, name, followed)

    follow(CallingThread, "run")
