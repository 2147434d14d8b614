"""Uploads of weights: a stage's layers go up to one of the worker's arenas, while the stage before runs from the other.

    prepare slot i+N: enqueue the uploads of its layers into the free arena ── [1]
    a layer whose update is not published yet: the optimizer's thread enqueues its upload when it publishes it ── [2]
    cancel: a slot that was prepared will not open, and the next one takes its arena ── [3]

The worker waits for the upload of a layer when that is called (`Worker.ready`), and says when an arena is free again
(`Worker.close_slot`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.core.arenas import Arena
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.reporting.events import EventSource


class WeightUploads:
    """Uploads the weights of one worker's slots. Runs on the worker's thread.

    Args:
        device: the worker's device.

    Attributes:
        arenas: of the open slot and of the next one.
        used: number of arenas that the plan uses.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arenas = [Arena(device, "weights"), Arena(device, "weights of the next stage")]
        self.used = len(self.arenas)
        self._turn = 0

    def use(self, number: int) -> None:
        """Use ``number`` arenas from now on."""
        self.used, self._turn = number, 0

    @property
    def free_arena(self) -> Arena:
        """The arena that the next slot is prepared in."""
        return self.arenas[self._turn]

    def prepare(self, slot: Slot, *, is_open: bool = False) -> None:
        """Enqueue the uploads of a slot's weights into the free arena [1].

        If a layer is still being updated, the optimizer's thread enqueues its upload when it publishes the update. This
        thread must not wait for that, as the update may depend on work that this thread has yet to do.

        With a single arena that an open slot uses, nothing happens: the slot is prepared when it opens.

        Args:
            slot: the slot.
            is_open: whether another slot is open on the worker.
        """
        if is_open and self.used == 1:
            return
        slot.arena = self._turn
        self._turn = (self._turn + 1) % self.used
        arena = self.arenas[slot.arena]
        stream = self.device.weights_up
        if arena.last_use is not None:
            stream.wait(arena.last_use)
        for layer, segment in zip(slot.layers, arena.cut(layer.nbytes for layer in slot.layers), strict=True):
            later = LaterUpload(self, slot, layer, segment)
            if layer.bucket.when(slot.version, later.finish, later.part):
                slot.awaited[layer.index] = later.waiter
            else:
                self.upload(slot, layer, segment)

    def upload(
        self, slot: Slot, layer: HostLayer, segment: Tensor, begun: Event | None = None,
        sent: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Enqueue the upload of a layer's weights, or of the rest of them.

        Args:
            slot: slot that needs them.
            layer: the layer.
            segment: the layer's part of the slot's arena.
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

    def cancel(self, slot: Slot) -> None:
        """Undo `prepare` for a slot that will not open [3].

        The next slot reuses the arena. Its uploads run on the same stream, so they overwrite those of this one.
        """
        if slot.arena is None:
            return  # there was no free arena
        assert slot.arena == (self._turn - 1) % self.used, "only what was prepared last can be taken back"
        with slot.uploading:
            slot.cancelled = True
        self._turn = slot.arena
        slot.arena = None


class LaterUpload:
    """The upload of a layer that is still being updated; the optimizer's thread enqueues it [2].

    If the layer is updated in parts, each part is uploaded as soon as it is updated.

    Args:
        uploads: uploads of the worker.
        slot: slot that needs the weights.
        layer: the layer.
        segment: the layer's part of the slot's arena.
    """

    def __init__(self, uploads: WeightUploads, slot: Slot, layer: HostLayer, segment: Tensor) -> None:
        self._uploads, self._slot, self._layer, self._segment = uploads, slot, layer, segment
        self._begun: Event | None = None
        self._sent: list[tuple[int, int]] = []
        self.waiter = Waiter()
        """Woken when the whole upload is enqueued."""

    def part(self, master: nn.Parameter, start: int, end: int) -> None:
        """Enqueue the upload of elements ``start`` to ``end`` of ``master``, which are updated."""

        def enqueue() -> None:
            stream = self._uploads.device.weights_up
            begun = self._begun or stream.record(timed=True)
            if (span := self._layer.upload_part(stream, self._segment, master, start, end)) is not None:
                self._begun = begun
                self._sent.append(span)

        self._enqueue(enqueue)

    def finish(self) -> None:
        """Enqueue the rest of the upload: all weights are updated."""
        self._enqueue(lambda: self._uploads.upload(self._slot, self._layer, self._segment, self._begun, self._sent))
        self.waiter.wake()

    def _enqueue(self, work: Callable[[], None]) -> None:
        slot = self._slot
        try:
            with slot.uploading:
                if not slot.cancelled and not slot.cancel_scope.failed:
                    with self._uploads.device.activate():
                        work()
        except BaseException as error:
            slot.cancel_scope.fail(error)
