"""The memory of slots, and uploads to it: a slot's layers go up to the arena while the slot before it runs.

    a slot gets its place in the arena ── its layers queue up ── [1]
    the first of the queue: its place is free ── its weights are published ── its upload is enqueued ── the next ── [2]
    the slot is opened ── it gets memory for gradients; sums that an earlier slot has begun go up ── [3]

What is missing in [2] continues the queue when it comes: a slot that closes, or the optimizer, which publishes a
bucket. So the queue is advanced by several threads, under a lock of its own, and nobody waits in it.
"""

from __future__ import annotations

import threading
from collections import deque

from lightning_roundpipe.devices import Device, Event, Stream
from lightning_roundpipe.engine.events import EventSource
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.sync import Signal
from lightning_roundpipe.memory.arenas import Place, StageArena
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums
from lightning_roundpipe.memory.host_layer import HostLayer


class SlotMemory:
    """An arena for slots of one worker, and the queue of uploads to it.

    Attributes:
        lock: held while anything looks at its regions.
        last: reached once the gradients of the slot that was closed last are on their way.
    """

    def __init__(self, device: Device) -> None:
        self._device, self.arena = device, StageArena(device)
        self.lock = threading.RLock()
        self.last: Signal | None = None
        self._queue: deque[tuple[Slot, HostLayer, tuple[int, int]]] = deque()
        self._awaited: tuple[int, int] | None = None
        """Bucket and version that the first of the queue waits for."""

    def prepare(self, slot: Slot) -> bool:
        """Give a slot its place [1]. False if the arena is too small for it."""
        layers = [] if slot.weights.shares else slot.layers
        sizes = [layer.weights.nbytes for layer in layers]
        with self.lock:
            if not self.arena.has(sum(sizes)):
                return False
            slot.weights.place = self.arena.enter(sizes)
            for layer, part in zip(layers, slot.weights.place.weights.parts, strict=True):
                slot.weights.uploads[layer.index].segment = self.arena.bytes_of(*part)
                self._queue.append((slot, layer, part))
            self.proceed()
        return True

    def proceed(self) -> None:
        """Enqueue the uploads that nothing is missing for [2]. Any thread may call this."""
        with self.lock:
            while self._queue:
                slot, layer, (start, end) = self._queue[0]
                if slot.spec.scope.failed:
                    self._queue.popleft()
                    continue
                assert slot.weights.place is not None
                if (before := self.arena.before(start, end, slot.weights.place)) is None:
                    return
                wanted = layer.bucket.index, slot.spec.version
                if not layer.bucket.has(slot.spec.version):
                    if self._awaited == wanted:
                        return
                    self._awaited = wanted
                    if layer.bucket.when(slot.spec.version, self._published):
                        return
                self._awaited = None
                self._queue.popleft()
                self._upload(slot, layer, [region.last_use for region in before if region.last_use is not None])

    def _published(self) -> None:
        with self._device.activate():
            self.proceed()

    def _upload(self, slot: Slot, layer: HostLayer, before: list[Event]) -> None:
        upload = slot.weights.uploads[layer.index]
        try:
            assert upload.segment is not None
            stream = self._device.weights_up
            for event in before:
                stream.wait(event)
            start = stream.record(timed=True)
            layer.weights.upload(stream, upload.segment)
            end = stream.record(timed=True)
        except BaseException as error:
            slot.spec.scope.fail(error)
            return
        upload.end = end
        where = EventSource(slot.index, slot.phase, -1, layer.name)
        slot.spec.recorder.add("upload_weights", self._device.index, start, end, -1, layer.weights.nbytes, where)
        slot.report_upload(layer, end)
        upload.enqueued.set()

    def grow(self, needed: int) -> None:
        """Make room for a slot of ``needed`` bytes, and the next one."""
        with self.lock:
            self.arena.grow(2 * needed)

    def open_gradients(self, slot: Slot) -> None:
        """Give a slot memory for its sums of gradients [3]. The baton is held."""
        sums = {call: s for call, s in slot.gradients.sums.items() if s.layout.nbytes}
        if not sums:
            return
        assert slot.weights.place is not None
        with self.lock:
            region = self.arena.add_gradients(slot.weights.place, [host.layout.nbytes for host in sums.values()])
            before = self.arena.before(region.start, region.end, slot.weights.place) or []
            segments, events = self.arena.tensors(region), [r.last_use for r in before if r.last_use is not None]
        slot.gradients.free = list(events)
        stream = self._device.weights_up
        for (call, host), segment in zip(sums.items(), segments, strict=True):
            gradients = slot.gradients.on_worker[call] = DeviceGradSums(host, segment)
            if any(gradients.present):  # a sum that an earlier slot has begun goes on
                for event in (*events, *([host.arrived] if host.arrived is not None else ())):
                    stream.wait(event)
                start = stream.record(timed=True)
                gradients.upload(stream)
                end = stream.record(timed=True)
                slot.gradients.free.append(end)
                where = EventSource(slot.index, slot.phase, call, host.layer.name)
                nbytes = host.layout.nbytes
                slot.spec.recorder.add("upload_gradients", self._device.index, start, end, -1, nbytes, where)

    def retire(self, place: Place, stream: Stream) -> None:
        """Free the weights of a closed slot behind what ``stream`` does now."""
        with self.lock:
            place.weights.last_use = stream.record()
            self.arena.retire(place)

    def free_gradients(self, place: Place, stream: Stream) -> None:
        """Free the memory for gradients of a closed slot, likewise."""
        if (region := place.gradients) is not None:
            with self.lock:
                stream.poison(self.arena.bytes_of(region.start, region.end))
                region.last_use = stream.record()

    def forget(self) -> None:
        """Drop what is queued, after a failure."""
        with self.lock:
            self._queue.clear()
            self._awaited = None
