"""Uploads of weights: a stage's layers go up to the worker's arena while the stage before runs.

    prepare slot i+N: it gets its place in the arena ── [1]
    the place of a layer is free, or a slot that lies there is closed: enqueue the layer's upload ── [2]
    a layer whose update is not published yet: the optimizer's thread enqueues its upload when it publishes it ── [3]
    ... and if the slot before waits for the same layer, behind all that the slot before waits for ── [4]
    cancel: a slot that was prepared will not open, and the next one takes its place ── [5]

The worker waits for the upload of a layer when that is called (`Worker.ready`), and says when a place is free again
(`Worker.close_slot`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.core.arenas import Region, StageArena
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.reporting.events import EventSource


class WeightUploads:
    """Uploads the weights of one worker's slots. Runs on the worker's thread.

    Args:
        device: the worker's device.
        arena: the worker's arena.
    """

    def __init__(self, device: Device, arena: StageArena) -> None:
        self.device = device
        self._arena = arena
        self._prepared: Slot | None = None
        self._left: deque[tuple[HostLayer, tuple[int, int]]] = deque()
        """The layers of the prepared slot whose uploads are not enqueued, and their places, in the order of use."""
        self._passed: list[Region] = []
        """The regions whose last use the prepared slot's uploads come after."""
        self._ahead: dict[int, Waiter] = {}
        self._awaited: dict[int, Waiter] = {}
        """What the slot before the one that was prepared last waits for, and what that one does: see `Slot.awaited`."""
        self._deferred: list[LaterUpload] = []
        self._deferring = threading.Lock()

    def prepare(self, slot: Slot) -> None:
        """Give a slot its place [1], and enqueue the uploads of its weights as far as that is free.

        If a layer is still being updated, the optimizer's thread enqueues its upload when it publishes the update. This
        thread must not wait for that, as the update may depend on work that this thread has yet to do.

        Nothing happens if the arena is too small for the slot: it is prepared when it opens.
        """
        assert not self._left, "one slot is prepared at a time"
        sizes = [layer.nbytes for layer in slot.layers]
        if not self._arena.has(sum(sizes)):
            return
        slot.place = self._arena.enter(sizes)
        self._prepared = slot
        self._ahead, self._awaited = self._awaited, slot.awaited
        self._left.extend(zip(slot.layers, slot.place.weights.parts, strict=True))
        self._passed.clear()
        self.proceed()

    def proceed(self) -> None:
        """Enqueue the uploads of the prepared slot whose places are free [2]."""
        slot, stream = self._prepared, self.device.weights_up
        while self._left and slot is not None and slot.place is not None:
            layer, (start, end) = self._left[0]
            if (before := self._arena.before(start, end, slot.place)) is None:
                return
            for region in before:
                if region.last_use is not None and region not in self._passed:
                    stream.wait(region.last_use)
                    self._passed.append(region)
            self._left.popleft()
            segment = self._arena.bytes_of(start, end)
            ahead = self._ahead.values() if layer.index in self._ahead else ()
            later = LaterUpload(self, slot, layer, segment, ahead)
            if layer.bucket.when(slot.version, later.finish, later.part):
                slot.awaited[layer.index] = later.waiter
            else:
                self.upload(slot, layer, segment)
        self.forget()

    def upload(
        self, slot: Slot, layer: HostLayer, segment: Tensor, begun: Event | None = None,
        sent: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Enqueue the upload of a layer's weights, or of the rest of them.

        Args:
            slot: slot that needs them.
            layer: the layer.
            segment: the layer's part of the slot's place.
            begun: start of the upload, if parts have been uploaded already.
            sent: byte ranges that have been uploaded already; see `HostLayer.upload`.
        """
        stream = self.device.weights_up
        start = begun or stream.record(timed=True)
        layer.upload(stream, segment, sent)
        end = stream.record(timed=True)
        slot.uploaded[layer.index] = end
        where = EventSource(slot.index, slot.phase, -1, layer.name)
        slot.recorder.add("upload_weights", self.device.index, start, end, -1, layer.nbytes, where)
        if slot.readiness is not None:
            slot.readiness.uploading(layer.bucket, end)

    def defers(self, later: LaterUpload) -> bool:
        """Return whether ``later`` has to wait for other uploads [4]. `released` then returns it after these."""
        with self._deferring:
            if later.is_behind:
                self._deferred.append(later)
                return True
            return False

    def released(self) -> list[LaterUpload]:
        """Return the deferred uploads that need not wait any more."""
        with self._deferring:
            released = [later for later in self._deferred if not later.is_behind]
            self._deferred = [later for later in self._deferred if later.is_behind]
        return released

    def cancel(self, slot: Slot) -> None:
        """Undo `prepare` for a slot that will not open [5].

        The next slot reuses the place. Its uploads run on the same stream, so they overwrite those of this one.
        """
        if slot.place is None:
            return  # the arena was too small
        with slot.uploading:
            slot.cancelled = True
        self.forget()
        self._arena.leave(slot.place, self.device.weights_up.record())
        slot.place = None

    def forget(self) -> None:
        """Drop the uploads that are not enqueued."""
        self._prepared = None
        self._left.clear()
        self._passed.clear()


class LaterUpload:
    """The upload of a layer that is still being updated; the optimizer's thread enqueues it [3].

    If the layer is updated in parts, each part is uploaded as soon as it is updated.

    Args:
        uploads: uploads of the worker.
        slot: slot that needs the weights.
        layer: the layer.
        segment: the layer's part of the slot's place.
        ahead: woken when the uploads are enqueued that come before this one [4].
    """

    def __init__(
        self, uploads: WeightUploads, slot: Slot, layer: HostLayer, segment: Tensor, ahead: Collection[Waiter]
    ) -> None:
        self._uploads, self._slot, self._layer, self._segment = uploads, slot, layer, segment
        self._ahead = ahead
        self._begun: Event | None = None
        self._sent: list[tuple[int, int]] = []
        self.waiter = Waiter()
        """Woken when the whole upload is enqueued."""

    @property
    def is_behind(self) -> bool:
        """Whether uploads that come before this one are not enqueued yet."""
        return not all(waiter.woken for waiter in self._ahead)

    def part(self, master: nn.Parameter, start: int, end: int) -> None:
        """Enqueue the upload of elements ``start`` to ``end`` of ``master``, which are updated.

        Where others come before, the rest of the upload includes them.
        """
        if self.is_behind:
            return

        def enqueue() -> None:
            stream = self._uploads.device.weights_up
            begun = self._begun or stream.record(timed=True)
            if (span := self._layer.upload_part(stream, self._segment, master, start, end)) is not None:
                self._begun = begun
                self._sent.append(span)

        self._enqueue(enqueue)

    def finish(self) -> None:
        """Enqueue the rest of the upload: all weights are updated."""
        uploads = self._uploads
        if uploads.defers(self):
            return
        self._enqueue(lambda: uploads.upload(self._slot, self._layer, self._segment, self._begun, self._sent))
        self.waiter.wake()
        for later in uploads.released():
            later.finish()

    def _enqueue(self, work: Callable[[], None]) -> None:
        slot = self._slot
        try:
            with slot.uploading:
                if not slot.cancelled and not slot.cancel_scope.failed:
                    with self._uploads.device.activate():
                        work()
        except BaseException as error:
            slot.cancel_scope.fail(error)
