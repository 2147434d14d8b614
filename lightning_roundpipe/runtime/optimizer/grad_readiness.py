"""When a batch's gradients are complete, bucket by bucket, while its backward is still under way.

A bucket is there when nothing of the step needs its weights or adds to its gradients any more:

    the slots that hold it are closed ── [1]     its gradients are on their way to the host, its uploads are over
    user code does not read it, or all microbatches have ended ── [2]

Before that, a bucket has been sent: all that the step uploads of it is on the devices, and what it was copied from may
be written to.

    its slots' uploads are enqueued, and waited for ── [3]

Whoever steps takes buckets in the order in which they come, and of several that are there the first in forward order:
it is what the next forward asks for first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_roundpipe.devices import Event, StreamAborted, StreamError, intraop_threads
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket


class UploadedStage(Protocol):
    """What a slot needs and adds to: ``layers`` are uploaded for it, and gradients are added to ``sums``."""

    layers: Sequence[HostLayer]
    sums: dict[int, HostGradSums]
    readiness: GradReadiness | None
    """Is told of its uploads."""


class Dropped(Exception):
    """The step failed: no more gradients will come."""


@dataclass(frozen=True)
class _Sent:
    """A bucket whose uploads are all on their way."""

    bucket: ParamBucket
    uploads: list[Event]


class GradReadiness:
    """Of one step.

    Args:
        buckets: all of them.
    """

    def __init__(self, buckets: Sequence[ParamBucket]) -> None:
        self._lock = threading.Lock()
        self._open = dict.fromkeys(buckets, 0)
        self._read: Collection[ParamBucket] | None = None
        self._ended = False
        self._coming = set(buckets)
        self._unsent = dict.fromkeys(buckets, 0)
        self._uploads: dict[ParamBucket, list[Event]] = {bucket: [] for bucket in buckets}
        self._there: queue.SimpleQueue[ParamBucket | _Sent | None] = queue.SimpleQueue()

    # -- the step -----------------------------------------------------------------------------------------------------

    def expect(self, slots: Iterable[UploadedStage], *, uploads: bool = True) -> None:
        """Slots of the step, before the first of them is closed. All are known when its losses are.

        Args:
            uploads: whether somebody wants to know when buckets have been sent [3].
        """
        with self._lock:
            for slot in slots:
                for bucket in _buckets(slot):
                    self._open[bucket] += 1
                if uploads:
                    slot.readiness = self
                    for layer in slot.layers:
                        self._unsent[layer.bucket] += 1

    def uploading(self, bucket: ParamBucket, upload: Event) -> None:
        """The weights of a layer of ``bucket`` are on their way to one of the slots, until ``upload`` [3]."""
        with self._lock:
            self._unsent[bucket] -= 1
            self._uploads[bucket].append(upload)
            self._look([bucket])

    def closed(self, slot: UploadedStage) -> None:
        """The slot's gradients are on their way [1]."""
        with self._lock:
            for bucket in _buckets(slot):
                self._open[bucket] -= 1
            self._look(_buckets(slot))

    def passed(self, read: Collection[ParamBucket]) -> None:
        """All microbatches have their loss, so it is known which buckets user code has ``read``."""
        with self._lock:
            self._read = read
            self._look(list(self._coming))

    def ended(self) -> None:
        """All microbatches have ended [2]."""
        with self._lock:
            self._ended = True
            self._look(list(self._coming))

    def fail(self) -> None:
        """What has not come will not come."""
        self._there.put(None)

    def _look(self, buckets: Iterable[ParamBucket]) -> None:
        for bucket in buckets:
            known = self._read is not None and (self._ended or bucket not in self._read)
            if known and not self._unsent[bucket] and self._uploads[bucket]:
                self._there.put(_Sent(bucket, self._uploads[bucket]))
                self._uploads[bucket] = []
            if known and not self._open[bucket] and bucket in self._coming:
                self._coming.discard(bucket)
                self._there.put(bucket)

    # -- who steps ----------------------------------------------------------------------------------------------------

    def take(self, *, wait: bool, sent: Callable[[ParamBucket], None] = lambda bucket: None) -> list[ParamBucket]:
        """Buckets that have come since the last time.

        Args:
            wait: for at least one.
            sent: called with each bucket that has been sent.

        Raises:
            Dropped: if the step has failed.
        """
        taken: list[ParamBucket] = []
        if wait:
            intraop_threads.release_intraop_threads()
        while True:
            try:
                bucket = self._there.get(block=wait and not taken)
            except queue.Empty:
                return taken
            if bucket is None:
                raise Dropped
            if isinstance(bucket, ParamBucket):
                taken.append(bucket)
                continue
            with contextlib.suppress(StreamAborted, StreamError):  # a step has failed: this one, or the one behind it
                for upload in bucket.uploads:
                    upload.wait()
                sent(bucket.bucket)


def _buckets(slot: UploadedStage) -> set[ParamBucket]:
    return {layer.bucket for layer in slot.layers} | {sums.layer.bucket for sums in slot.sums.values()}
