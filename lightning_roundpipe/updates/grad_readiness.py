"""Reports when a step's gradients are complete, bucket by bucket, while its backward is still running.

A bucket is *ready* when the step neither needs its weights nor adds to its gradients any more:

    all slots that hold it have passed it ── [1]    the downloads of its gradients are enqueued, its uploads are over
    user code does not read it, or all microbatches have ended ── [2]

A slot has passed a bucket when it is closed, or when its last microbatch has run the backward of all calls of the
bucket's layers and their gradients are on their way.

A bucket is *uploaded*, before that, when the step's last upload of it has finished. The source of the copies may then
be overwritten.

    the uploads of all its slots are enqueued, and waited for ── [3]

`GradReadiness.take` returns buckets in the order in which they become ready. Of several ready ones `AsyncOptimizer`
steps the first in forward order first, as the next forward needs it first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_roundpipe.devices import Event, StreamAborted, StreamError, intraop_threads
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.param_buckets import ParamBucket

_NEVER = -1
"""Stands for a layer without gradients, whose bucket is passed only when the slot is closed."""


class UploadedStage(Protocol):
    """A slot, as far as it concerns readiness.

    Attributes:
        layers: the layers that are uploaded for it.
        sums: the host sums that it adds gradients to, by call.
        readiness: is told of its uploads, its gradients and its end.
    """

    layers: Sequence[HostLayer]
    sums: dict[int, HostGradSums]
    readiness: GradReadiness | None


class Dropped(Exception):
    """Raised in place of gradients that will not come, as the step has failed."""


@dataclass(frozen=True)
class _Uploading:
    """A bucket whose uploads are all enqueued, with the ends of those uploads."""

    bucket: ParamBucket
    uploads: list[Event]


class GradReadiness:
    """The readiness of the buckets in one step. Several threads report to it; the optimizer's thread takes from it.

    Args:
        buckets: all buckets of the model.
        reports_uploads: whether `take` tells which buckets are uploaded, before they are ready [3].
    """

    def __init__(self, buckets: Sequence[ParamBucket], *, reports_uploads: bool = False) -> None:
        self._reports_uploads = reports_uploads
        self._lock = threading.Lock()
        self._open = dict.fromkeys(buckets, 0)
        self._calls_left: dict[UploadedStage, dict[ParamBucket, set[int]]] = {}
        """By slot, and by bucket in it: the calls whose gradients are not on their way yet."""
        self._read: Collection[ParamBucket] | None = None
        self._ended = False
        self._coming = set(buckets)
        self._unused = 0
        self._uploads_left = dict.fromkeys(buckets, 0)
        self._uploads: dict[ParamBucket, list[Event]] = {bucket: [] for bucket in buckets}
        self._there: queue.SimpleQueue[ParamBucket | _Uploading | None] = queue.SimpleQueue()

    # -- the step -----------------------------------------------------------------------------------------------------

    def expect(self, slots: Iterable[UploadedStage]) -> None:
        """Add slots of the step. Call it before the first of them is closed, and for all slots before `set_read`."""
        with self._lock:
            for slot in slots:
                slot.readiness = self
                for bucket in _buckets(slot):
                    self._open[bucket] += 1
                for layer in slot.layers:
                    self._uploads_left[layer.bucket] += 1

    def uploading(self, bucket: ParamBucket, upload: Event) -> None:
        """Count the upload of a layer of ``bucket`` for one of the slots, which ends at ``upload`` [3]."""
        with self._lock:
            self._uploads_left[bucket] -= 1
            self._uploads[bucket].append(upload)
            self._look([bucket])

    def gradients_sent(self, slot: UploadedStage, call: int) -> None:
        """Note that the gradients of ``call`` are on their way from ``slot``: no microbatch will add to them [1]."""
        with self._lock:
            if slot not in self._calls_left:
                self._calls_left[slot] = _calls(slot)
            left = self._calls_left[slot]
            bucket = slot.sums[call].layer.bucket
            calls = left[bucket]
            calls.discard(call)
            if not calls:
                self._open[bucket] -= 1
                self._look([bucket])

    def closed(self, slot: UploadedStage) -> None:
        """Count a closed slot, whose gradient downloads are enqueued [1]."""
        with self._lock:
            left = self._calls_left.pop(slot, {})
            buckets = [bucket for bucket in _buckets(slot) if left.get(bucket, True)]
            for bucket in buckets:
                self._open[bucket] -= 1
            self._look(buckets)

    def set_read(self, read: Collection[ParamBucket]) -> None:
        """Set the buckets that user code has ``read``, once all microbatches have their loss."""
        with self._lock:
            self._read = read
            self._look(list(self._coming))

    def ended(self) -> None:
        """Note that all microbatches have ended, so user code reads nothing any more [2]."""
        with self._lock:
            self._ended = True
            self._look(list(self._coming))

    def fail(self) -> None:
        """Make `take` raise: the step has failed."""
        self._there.put(None)

    @property
    def has_ready(self) -> bool:
        """Whether a bucket is ready that the optimizer has not used yet."""
        return self._unused > 0

    def used(self) -> None:
        """Note that the optimizer has used the gradients of a bucket."""
        with self._lock:
            self._unused -= 1

    def _look(self, buckets: Iterable[ParamBucket]) -> None:
        for bucket in buckets:
            known = self._read is not None and (self._ended or bucket not in self._read)
            uploading = self._reports_uploads and not self._uploads_left[bucket]
            if known and uploading and self._uploads[bucket]:
                self._there.put(_Uploading(bucket, self._uploads[bucket]))
                self._uploads[bucket] = []
            if known and not self._open[bucket] and bucket in self._coming:
                self._coming.discard(bucket)
                self._unused += 1
                self._there.put(bucket)

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def take(self, *, wait: bool, uploaded: Callable[[ParamBucket], None] = lambda bucket: None) -> list[ParamBucket]:
        """Return the buckets that have become ready since the last call.

        Args:
            wait: whether to wait for at least one.
            uploaded: called with each bucket that has been uploaded.

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
            with contextlib.suppress(StreamAborted, StreamError):  # this step has failed, or the one behind it
                if isinstance(bucket, ParamBucket):
                    taken.append(bucket)
                    for upload in self._uploads[bucket]:  # of a layer that no microbatch has called, too
                        upload.wait()
                    continue
                for upload in bucket.uploads:
                    upload.wait()
                uploaded(bucket.bucket)


def _calls(slot: UploadedStage) -> dict[ParamBucket, set[int]]:
    """Return, by bucket, the calls that ``slot`` sends gradients of, and `_NEVER` for layers without any."""
    calls: dict[ParamBucket, set[int]] = {}
    for call, sums in slot.sums.items():
        calls.setdefault(sums.layer.bucket, set()).add(call)
    with_gradients = {sums.layer for sums in slot.sums.values()}
    for layer in slot.layers:
        if layer not in with_gradients:
            calls.setdefault(layer.bucket, set()).add(_NEVER)
    return calls


def _buckets(slot: UploadedStage) -> set[ParamBucket]:
    return {layer.bucket for layer in slot.layers} | {sums.layer.bucket for sums in slot.sums.values()}
