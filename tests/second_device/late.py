"""The device type with asynchronous execution: what is enqueued on a stream is done later, in a thread of its own.

    operation, copy ── its shapes are found, memory is taken, and it is queued on the thread's current stream ── [1]
    a stream's queue ── in order; which of the streams goes on is drawn by lot, and so is how long nothing does;
                        or nothing is done until the host waits for something; or streams of one role are done
                        only as far as something waits for them, and all others at once ── [2]
    the host reads a number, or waits for an event ── until the queue has come that far ── [3]
    a tensor dies ── its memory is what its stream takes next, though other streams may still read it ── [4]

A wait that the package forgets shows in the numbers, as nothing is in order by itself. What is queued holds no tensor
of the device: only where it was. Where torch cannot tell a result's shape before it is computed, the host waits.
"""

import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.devices import cuda_streams
from second_device import backend


class Mark:
    """A point in a stream's queue."""

    __slots__ = ("at",)

    def __init__(self):
        self.at = None
        """When it was reached."""


class Streams:
    """The queues, and the thread that works on them.

    ``order`` is "random", "newest first" or "idle"; or, such as "compute last", it names the streams that are held:
    they go on only as far as the host, or a stream that is not held, waits for them.
    """

    def __init__(self, order):
        self._drawn, self._order = random.Random(0), order
        self._held = order.removesuffix(" last") if order.endswith(" last") else None
        self._queues = {}
        self._changed = threading.Condition()
        self._waiting = []
        self._error = None
        self._ends = False
        self.done = self.delays = 0
        """Operations that were done, and how often nothing was, while something could be."""
        self._thread = threading.Thread(target=self._serve, name="played device", daemon=True)
        self._thread.start()

    def add(self, key, what):
        """Queue an operation; a mark to be reached; or, in a tuple, one to be waited for."""
        with self._changed:
            if key not in self._queues and self._order == "newest first":
                self._queues = {key: deque(), **self._queues}
            self._queues.setdefault(key, deque()).append(what)
            self._changed.notify_all()

    def mark(self, key):
        mark = Mark()
        self.add(key, mark)
        return mark

    def wait(self, mark):
        """Let the host wait [3]."""
        with self._changed:
            self._waiting.append(mark)
            self._changed.notify_all()
            while mark.at is None and self._error is None:
                self._changed.wait()
            self._waiting.remove(mark)
            if self._error is not None:
                raise RuntimeError("an operation failed on the device") from self._error

    def end(self):
        """Do what is left, and stop."""
        for key in list(self._queues):
            self.wait(self.mark(key))
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self):
        torch.set_num_threads(1)
        with torch.inference_mode():  # in which both inference tensors and others may be written
            while (operation := self._next()) is not None:
                try:
                    operation()
                    self.done += 1
                except BaseException as error:
                    with self._changed:
                        self._error = error
                        self._changed.notify_all()
                    return

    def _next(self):
        """The operation that is to be done next [2]."""
        with self._changed:
            while not self._ends:
                self._advance()
                ready = self._ready()
                drawn = self._order == "random"
                if ready and (self._held or self._waiting or (drawn and self._drawn.random() < 0.5)):
                    slow = not drawn or self._drawn.random() < 0.8  # so that one stream is often far behind the others
                    queue = ready[0] if slow else self._drawn.choice(ready)
                    if drawn and slow and self._drawn.random() < 0.02:
                        self._shuffle()
                    return queue.popleft()
                self.delays += bool(ready)
                self._changed.wait(timeout=self._drawn.random() * 1e-3 if ready else None)
        return None

    def _ready(self):
        """The queues of which an operation may be done."""
        ready = {key: queue for key, queue in self._queues.items() if queue and callable(queue[0])}
        if self._held is None:
            return list(ready.values())
        if free := [queue for key, queue in ready.items() if not self._is_held(key)]:
            return free
        wanted = self._wanted()
        return [queue for queue in ready.values() if not wanted.isdisjoint(queue)]

    def _is_held(self, key):
        roles = [role for (_, role), stream in list(cuda_streams._streams.items()) if stream.key == key]
        return bool(roles) and roles[0].startswith(self._held)

    def _wanted(self):
        """The marks that the host and streams that are not held wait for, and those that are waited for on the way."""
        wanted, found = set(), set(self._waiting)
        while found - wanted:
            wanted |= found
            found = {
                queue[0][0]
                for key, queue in self._queues.items()
                if queue and type(queue[0]) is tuple and not (self._is_held(key) and wanted.isdisjoint(queue))
            }
        return wanted

    def _shuffle(self):
        keys = list(self._queues)
        self._drawn.shuffle(keys)
        self._queues = {key: self._queues[key] for key in keys}

    def _advance(self):
        """Reach marks, and pass those that were waited for."""
        moved = True
        while moved:
            moved = False
            for queue in self._queues.values():
                while queue and not callable(head := queue[0]):
                    if isinstance(head, Mark):
                        head.at = time.perf_counter()
                    elif head[0].at is None:
                        break
                    queue.popleft()
                    moved = True
        self._changed.notify_all()


class _Ref(NamedTuple):
    """Where a tensor of the device was when an operation with it was queued."""

    start: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def to(tensor):
        storage = tensor.untyped_storage()
        return _Ref(
            storage.data_ptr(), storage.nbytes(), tensor.dtype, tensor.storage_offset(), tuple(tensor.size()),
            tensor.stride(),
        )  # fmt: skip

    def tensor(self):
        """A host tensor of that memory, which may be another tensor's by now."""
        empty = torch.empty(0, dtype=self.dtype)
        if not self.nbytes:
            return empty.new_empty(self.size)
        memory = torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.start), dtype=torch.uint8)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Seed(NamedTuple):
    """What an operation draws from, as it was drawn when the operation was queued."""

    seed: int


def _resolved(value):
    if isinstance(value, _Ref):
        return value.tensor()
    if isinstance(value, _Seed):
        return torch.Generator().manual_seed(value.seed)
    return [_resolved(v) for v in value] if type(value) is list else value


class Late:
    """The device type with queues."""

    def __init__(self, order):
        self.streams = Streams(order)
        self.synchronous = {}
        """Operations for which the host waited, as their results' shapes are not known before."""

    def key(self, index):
        return index, int(backend.library().played_stream(index))

    def drain(self, index):
        """Wait for the thread's current stream."""
        self.streams.wait(self.streams.mark(self.key(index)))

    def empty(self, size, stride, dtype, index):
        needed = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
        storage = torch.UntypedStorage(needed, device=torch.device(backend.NAME, index))
        fresh = backend.on_device(torch.empty(0, dtype=dtype), index)
        return backend._SET.redispatch(backend._KEYS, fresh, storage, 0, size, stride)

    def placed(self, host, index):
        """A tensor of the device with the numbers of ``host``, to which nothing else writes.

        The copy is queued. Another thread may have used the memory last, in the same stream, and not be done with it.
        """
        there = self.empty(host.size(), host.stride(), host.dtype, index)
        target = _Ref.to(there)
        self.streams.add(self.key(index), lambda: target.tensor().copy_(host))
        return there

    def compute(self, op, name, args, kwargs, index):
        """Queue an operation [1]; NotImplemented if its results are not known before it is done."""
        if name in ("empty", "empty_strided"):
            meta = op(*args, **kwargs | {"device": "meta", "pin_memory": None})
            return self.empty(meta.size(), meta.stride(), meta.dtype, index)
        schema = op._schema
        written = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
        grown = any(k.startswith("out") and isinstance(v, Tensor) and not v.numel() for k, v in kwargs.items())
        if name in backend._READS or grown or backend._counts(name, args):
            return NotImplemented
        results = []
        if not all(written):
            try:
                found = op(*_as_meta(args), **{k: _as_meta(v) for k, v in kwargs.items() if k != "generator"})
            except Exception:
                self.synchronous[name] = self.synchronous.get(name, 0) + 1
                return NotImplemented
            results = [found] if len(schema.returns) == 1 else list(found)
        given = {key: self._captured(value) for key, value in kwargs.items()}
        if any(a.name == "generator" for a in schema.arguments):
            generator = kwargs.get("generator") or backend.generators()[index]
            given["generator"] = _Seed(int(torch.randint(2**62, (1,), generator=generator)))
        made = [
            backend._written(schema, r.alias_info.before_set, args, kwargs) if w else self._like(results[i], index)
            for i, (r, w) in enumerate(zip(schema.returns, written, strict=True))
        ]
        targets = [None if w else _refs(value) for value, w in zip(made, written, strict=True)]
        queued = [self._captured(value) for value in args]
        if all(written):  # few of these take a number in place of a tensor
            queued = [
                torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
                if type(value) in (bool, int, float) and str(argument.type) == "Tensor"
                else value
                for argument, value in zip(schema.arguments, queued, strict=False)
            ]

        def run():
            result = op(*map(_resolved, queued), **{key: _resolved(value) for key, value in given.items()})
            for target, value in zip(targets, [result] if len(targets) == 1 else result or (), strict=True):
                _store(target, value)

        self.streams.add(self.key(index), run)
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    def _like(self, meta, index):
        if isinstance(meta, Tensor):
            return self.empty(meta.size(), meta.stride(), meta.dtype, index)
        return [self._like(m, index) for m in meta] if isinstance(meta, list | tuple) else meta

    def _captured(self, value):
        """An argument as it is now, without keeping memory of the device."""
        if isinstance(value, Tensor):
            return _Ref.to(value) if backend._is_ours(value) else value.detach().clone()
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return [self._captured(v) for v in value] if isinstance(value, list | tuple) else value

    def copy(self, to, of, waits):
        """Queue a copy; of memory that is not pinned the numbers are taken at once."""
        ours = [t for t in (to, of) if backend._is_ours(t)]
        index = ours[-1].device.index
        before, after = (self.key(t.device.index) for t in (ours[0], ours[-1]))
        source = _Ref.to(of) if backend._is_ours(of) else of.data if of.is_pinned() else of.detach().clone()
        target = _Ref.to(to) if backend._is_ours(to) else to.data
        if before != after:  # between devices: behind both streams, in one of them
            self.streams.add(after, (self.streams.mark(before),))
        self.streams.add(after, lambda: _tensor(target).copy_(_tensor(source)))
        if before != after:
            self.streams.add(before, (self.streams.mark(after),))
        if waits:
            self.drain(index)


def _store(target, value):
    """Put a result, or several, where they are to be."""
    if isinstance(target, _Ref):
        if value.numel():  # the CPU's batch norm leaves statistics out where it takes those that are known
            target.tensor().copy_(value)
    elif isinstance(target, list):
        for one, part in zip(target, value, strict=True):
            _store(one, part)


def _tensor(value):
    return value.tensor() if isinstance(value, _Ref) else value


def _refs(value):
    if isinstance(value, Tensor):
        return _Ref.to(value)
    return [_refs(v) for v in value] if isinstance(value, list | tuple) else None


def _as_meta(value):
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return type(value)(map(_as_meta, value)) if type(value) in (list, tuple) else value


class _Later(ctypes.Structure):
    _fields_ = [
        ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_int64)),
        ("block", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)),
        ("passed", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("wait", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
    ]


@contextlib.contextmanager
def late(order="random"):
    """Within, what is enqueued on the device type is done later."""
    made = Late(order)
    numbers, marks = itertools.count(1), dict[int, Mark]()

    def record(index, stream):
        number = next(numbers)
        marks[number] = made.streams.mark((index, stream))
        return number

    functions = dict(_Later._fields_)
    later = _Later(
        functions["record"](record),
        functions["block"](lambda event, index, stream: made.streams.add((index, stream), (marks[event],))),
        functions["passed"](lambda event: int(marks[event].at is not None)),
        functions["wait"](lambda event: made.streams.wait(marks[event])),
    )
    library = backend.library()
    library.played_later.argtypes = [_Later]
    library.played_later(later)
    backend.LATE.append(made)
    try:
        yield made
    finally:
        try:
            made.streams.end()
        finally:
            backend.LATE.clear()
            library.played_later(_Later())
