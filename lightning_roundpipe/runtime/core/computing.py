"""`Computing`: the context of a layer's computation on a worker."""

from __future__ import annotations

import time
from typing import Any

from lightning_roundpipe.devices import Event, interpreter_lease
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.planning.meter import Counter
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.reporting.events import EventSource
from lightning_roundpipe.runtime.user_code.interception import Inside


class Computing:
    """Context manager around a call's compute: holds the core, names the call for a profiler, and records its times.

    Layers that the layer's code calls are sent to ``inside``, which refuses them. A layer whose code takes
    long runs without the interpreter's lease, and so does a backward that autograd runs on threads of its own.

    Args:
        worker: worker that the call runs on.
        slot: slot that it runs in.
        kind: kind of event to record; empty records none.
        call: position of the call in the trace.
        layer: the called layer.
        microbatch: number of the microbatch.
        inside: the context of layer calls in the layer's code.
        counter: counts the call's operations; None counts none.

    Attributes:
        end: end of the compute; None until then, or after an error.
    """

    __slots__ = (
        "_began", "_calling", "_core", "_counter", "_index", "_kind", "_layer", "_leased", "_microbatch", "_name",
        "_slot", "_start", "_worker", "end",
    )  # fmt: skip

    def __init__(
        self, worker: Worker, slot: Slot, kind: str, call: int, layer: HostLayer, microbatch: int, inside: Inside,
        counter: Counter | None = None,
    ) -> None:  # fmt: skip
        self._worker, self._slot, self._kind, self._index, self._layer = worker, slot, kind, call, layer
        self._microbatch, self._counter = microbatch, counter
        self._calling = working(inside)  # layer calls go to it
        self.end: Event | None = None

    def __enter__(self) -> None:
        interpreter_lease.renew()  # not while the core is held
        device = self._worker.device
        core = self._core = device.acquire_core()
        name = self._name = device.named(self._kind, "slot", self._slot.index, self._layer.name, "of", self._microbatch)
        core.__enter__()
        if name is not None:
            name.__enter__()
        try:
            self._start = device.compute.record(timed=True)
        except BaseException:  # the device was aborted
            if name is not None:
                name.__exit__(None, None, None)
            core.__exit__(None, None, None)
            raise
        elsewhere = self._kind == "backward" and not device.backward_needs_interpreter
        alone = elsewhere or self._layer.launch_seconds >= interpreter_lease.TERM_S
        self._leased = alone and interpreter_lease.release()
        self._began = time.perf_counter()
        if self._counter is not None:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._calling.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._calling.__exit__(kind, error, traceback)
            if self._counter is not None:
                self._counter.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            if error is None:
                self.end = self._worker.device.compute.record(timed=True)
        finally:
            if self._kind in ("forward", "recompute"):
                self._layer.launched(time.perf_counter() - self._began)
            if self._name is not None:
                self._name.__exit__(kind, error, traceback)
            self._core.__exit__(kind, error, traceback)
            if self._leased:
                interpreter_lease.acquire()
        if self.end is not None and self._kind:
            slot, recorder = self._slot, self._slot.recorder
            where = EventSource(slot.index, slot.phase, self._index, self._layer.name)
            recorder.add(self._kind, self._worker.index, self._start, self.end, self._microbatch, 0, where)
            if self._counter is not None:
                recorder.count(self._kind, self._microbatch, self._index, self._counter.work.seconds)
