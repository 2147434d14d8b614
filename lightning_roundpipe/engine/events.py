"""Records what ran in a step: every call and copy with its times, for the report, the timeline and the plan's costs."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_roundpipe.devices import Event

COMPUTE = ("forward", "recompute", "backward")
UPLOADS = ("upload_weights", "upload_activations", "upload_gradients")
DOWNLOADS = ("download_activations", "download_gradients")


class EventSource(NamedTuple):
    """The slot, phase, call and layer that an event belongs to; -1 and empty where there is none.

    `Recorder.add` takes it as a plain tuple, which a call need not make an object of.
    """

    slot: int = -1
    phase: str = ""
    call: int = -1
    layer: str = ""


NOWHERE = EventSource()


class Recorder:
    """Collects events during a step, from any thread. Read them when the step is over.

    Attributes:
        nominal_seconds: the nominal durations that `count` has recorded, by the keys of `call_seconds`.
    """

    def __init__(self) -> None:
        self._items: list[tuple[Any, ...]] = []
        """Kind, worker, start, end, microbatch, bytes and the fields of the source: one object for each event, as the
        garbage collector walks through all that live as long as a step."""
        self._waits: list[tuple[int, Event, Event]] = []
        self._counting = threading.Lock()
        self.nominal_seconds: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def add(
        self, kind: str, worker: int, start: Event, end: Event, microbatch: int = -1, nbytes: int = 0,
        where: tuple[int, str, int, str] = NOWHERE,
    ) -> None:  # fmt: skip
        self._items.append((kind, worker, start, end, microbatch, nbytes, *where))

    def waited(self, worker: int, start: Event, end: Event) -> None:
        """Record a stall: a worker waited from ``start`` to ``end`` for a copy that its next computation needs."""
        self._waits.append((worker, start, end))

    def count(self, kind: str, microbatch: int, call: int, seconds: float) -> None:
        """Record the nominal time of a call's computation: computed from its shapes, not measured."""
        with self._counting:
            self.nominal_seconds[kind, microbatch, call].append(seconds)

    def stalls(self, origin: float) -> list[dict[str, Any]]:
        """Return the finished stalls, with times in seconds from ``origin`` as in `rows`.

        What lies before ``origin``, beside the step before, is left out.
        """
        return [
            {"worker": worker, "start_s": max(0.0, start.time() - origin), "end_s": end.time() - origin}
            for worker, start, end in self._waits
            if end.done() and end.time() > origin
        ]

    def nbytes(self, kinds: tuple[str, ...], workers: int) -> list[int]:
        """Return the bytes that events of ``kinds`` moved, per worker."""
        total = [0] * workers
        for kind, worker, _, _, _, nbytes, *_ in self._items:
            if kind in kinds:
                total[worker] += nbytes
        return total

    def bytes_per_s(self, kinds: tuple[str, ...]) -> float:
        """Return the rate of the largest copy of ``kinds`` that is over; infinite if there is none."""
        copies = (
            (nbytes, end.time() - start.time())
            for kind, _, start, end, _, nbytes, *_ in self._items
            if kind in kinds and nbytes and end.done()
        )
        return max(((nbytes, nbytes / seconds) for nbytes, seconds in copies if seconds > 0), default=(0, math.inf))[1]

    def rows(self, origin: float) -> list[dict[str, Any]]:
        """Return the events in order of their start, with times in seconds from ``origin``.

        Waits for events that are not over: gradient downloads may outlive the step.

        ``origin``: a time of ``time.perf_counter()``. Uploads that were prefetched before it have negative times.
        """
        rows: list[dict[str, Any]] = []
        for kind, worker, start, end, microbatch, nbytes, *source in self._items:
            where = EventSource(*source)
            try:
                if not end.done():
                    end.wait()
                times = start.time(), end.time()
            except RuntimeError:  # a later step failed and aborted this copy
                continue
            row = {"kind": kind, "worker": worker, **where._asdict(), "microbatch": microbatch, "nbytes": nbytes}
            rows.append({**row, "start_s": times[0] - origin, "end_s": times[1] - origin})
        return sorted(rows, key=lambda r: r["start_s"])

    def call_seconds(self, speeds: Sequence[float] = ()) -> dict[tuple[str, int, int], list[float]]:
        """Return the durations of computations in seconds, by (kind, microbatch, call).

        ``speeds``: of the workers, if they are not equal: durations are those of a worker with speed 1.
        """
        found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        for kind, worker, microbatch, where, seconds in self.computations():
            found[kind, microbatch, where.call].append((speeds[worker] if speeds else 1.0) * seconds)
        return found

    def computations(self) -> Iterator[tuple[str, int, int, EventSource, float]]:
        """Yield kind, worker, microbatch, source and duration in seconds of each computation."""
        for kind, worker, start, end, microbatch, _, *source in self._items:
            if kind in COMPUTE:
                yield kind, worker, microbatch, EventSource(*source), end.time() - start.time()


def bubble_percent(rows: list[dict[str, Any]], workers: int) -> float:
    """Return 100 (1 - compute time / (workers x span of the step))."""
    span = span_of(rows)
    busy = sum(r["end_s"] - r["start_s"] for r in rows if r["kind"] in COMPUTE)
    return 100.0 * (1.0 - busy / (workers * span)) if span > 0 else 0.0


def span_of(rows: list[dict[str, Any]]) -> float:
    """Return the seconds from the start of the first computation to the end of the last."""
    compute = [r for r in rows if r["kind"] in COMPUTE]
    return max((r["end_s"] for r in compute), default=0.0) - min((r["start_s"] for r in compute), default=0.0)
