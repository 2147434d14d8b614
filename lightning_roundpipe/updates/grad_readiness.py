"""Reports when a step's gradients are complete, bucket by bucket, while its backward is still running.

A bucket is *ready* when the step neither needs its weights nor adds to its gradients any more:

    all calls whose gradients it gets, and slots that have its weights alone, have passed it ── [1]
    user code does not read it, or all microbatches have ended ── [2]

A call has passed its bucket when its gradients are on their way, and a slot when it is closed.

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

from lightning_roundpipe.devices import Event, StreamAborted, StreamError, intraop_threads
from lightning_roundpipe.memory.param_buckets import ParamBucket


class Dropped(Exception):
    """Raised in place of gradients that will not come, as the step has failed."""


class GradReadiness:
    """The readiness of the buckets in one step. Several threads report to it; the optimizer's thread takes from it.

    ``reports_uploads``: whether `take` tells which buckets are uploaded, before they are ready [3].
    """

    def __init__(self, buckets: Sequence[ParamBucket], *, reports_uploads: bool = False) -> None:
        self._reports_uploads = reports_uploads
        self._lock = threading.Lock()
        self._open = dict.fromkeys(buckets, 0)
        self._read: Collection[ParamBucket] | None = None
        self._ended = False
        self._coming = set(buckets)
        self._unused = 0
        self._uploads_left = dict.fromkeys(buckets, 0)
        self._uploads: dict[ParamBucket, list[Event]] = {bucket: [] for bucket in buckets}
        self._there: queue.SimpleQueue[tuple[ParamBucket, list[Event], bool] | None] = queue.SimpleQueue()
        """Buckets with the ends of their uploads, and whether they are ready; None: the step has failed."""

    # -- the step -----------------------------------------------------------------------------------------------------

    def expect(self, passing: Iterable[ParamBucket], uploads: Iterable[ParamBucket]) -> None:
        """Count what a slot will report: `passed` for each of ``passing``, `uploading` for each of ``uploads``."""
        with self._lock:
            for bucket in passing:
                self._open[bucket] += 1
            for bucket in uploads:
                self._uploads_left[bucket] += 1

    def uploading(self, bucket: ParamBucket, upload: Event) -> None:
        """Note the upload of a layer of ``bucket`` for a slot, which ends at ``upload`` [3]."""
        with self._lock:
            self._uploads_left[bucket] -= 1
            self._uploads[bucket].append(upload)
            self._queue([bucket])

    def passed(self, buckets: Sequence[ParamBucket]) -> None:
        """Note that a call or a slot has passed each of ``buckets`` [1]."""
        with self._lock:
            for bucket in buckets:
                self._open[bucket] -= 1
            self._queue(buckets)

    def forward_ended(self, read: Collection[ParamBucket]) -> None:
        """Note that all microbatches have their loss, and which buckets user code has ``read``."""
        with self._lock:
            self._read = read
            self._queue(list(self._coming))

    def ended(self) -> None:
        """Note that all microbatches have ended, so user code reads nothing any more [2]."""
        with self._lock:
            self._ended = True
            self._queue(list(self._coming))

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

    def _queue(self, buckets: Iterable[ParamBucket]) -> None:
        """Queue those of the ``buckets`` that have become uploaded or ready."""
        for bucket in buckets:
            known = self._read is not None and (self._ended or bucket not in self._read)
            uploading = self._reports_uploads and not self._uploads_left[bucket]
            if known and uploading and self._uploads[bucket]:
                self._there.put((bucket, self._uploads[bucket], False))
                self._uploads[bucket] = []
            if known and not self._open[bucket] and bucket in self._coming:
                self._coming.discard(bucket)
                self._unused += 1
                self._there.put((bucket, self._uploads[bucket], True))

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def take(self, *, wait: bool, uploaded: Callable[[ParamBucket], None] = lambda bucket: None) -> list[ParamBucket]:
        """Return the buckets that have become ready since the last call; with ``wait``, at least one.

        Calls ``uploaded`` with each bucket that has been uploaded. Raises `Dropped` if the step has failed.
        """
        taken: list[ParamBucket] = []
        if wait:
            intraop_threads.release_intraop_threads()
        while True:
            try:
                item = self._there.get(block=wait and not taken)
            except queue.Empty:
                return taken
            if item is None:
                raise Dropped
            bucket, uploads, ready = item
            if ready:
                taken.append(bucket)
            with contextlib.suppress(StreamAborted, StreamError):  # this step has failed, or the one behind it
                for upload in uploads:  # of a layer that no microbatch has called, too
                    upload.wait()
                if not ready:
                    uploaded(bucket)
