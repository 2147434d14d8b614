"""One worker: a device, the thread that layers run on, and the arenas that hold what is resident.

    open slot i:  bind the copies' parameters to arena A ── [1]     upload slot i+N into arena B ── [2]
    run:          each call waits for its own layer's upload only ── [3]
    close slot i: gradients go down from their arena ── [4]         arena A is free for slot i+2N ── [5]

All of this happens on the worker's own thread, in the order in which it was asked for, so nothing here needs a lock.
What may be asked for when is decided by turns (`turns`).
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.model.rounded import RoundedWeight
from lightning_roundpipe.runtime.core.activation_store import PrefetchBudget
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.memory.grad_buffers import DeviceGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.module_buffers import ReplicaBuffers
from lightning_roundpipe.runtime.reporting.events import EventSource
from lightning_roundpipe.runtime.threads.sync import CancelScope, Waiter
from lightning_roundpipe.runtime.threads.task_thread import Task, TaskThread

T = TypeVar("T")

IN_FLIGHT = 2
"""Calls that the host may enqueue on a device before the first of them is done, whatever they hold."""


class InFlight:
    """Calls that the host has enqueued on a device, oldest first, and the tensors that each keeps until it is done.

    Attributes:
        nbytes: of their tensors' storages, each once.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._calls: deque[tuple[Event, Any, list[UntypedStorage]]] = deque()
        self._holders = Counter[int]()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def oldest(self) -> Event:
        """The end of the first call."""
        return self._calls[0][0]

    def add(self, end: Event, tensors: Any, *, counted: bool) -> None:
        """``tensors`` belong to what is enqueued up to ``end``. Their bytes are ``counted`` where there is a limit."""
        storages = _storages(_flat(tensors)) if counted else []
        self._calls.append((end, tensors, storages))
        for storage in storages:
            self._holders[storage._cdata] += 1
            if self._holders[storage._cdata] == 1:
                self.nbytes += storage.nbytes()

    def land(self) -> None:
        """The first call is done."""
        _, _, storages = self._calls.popleft()
        for storage in storages:
            self._holders[storage._cdata] -= 1
            if not self._holders[storage._cdata]:
                del self._holders[storage._cdata]
                self.nbytes -= storage.nbytes()


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


class Arena:
    """A device buffer that is used again and again. ``last_use`` is the end of the compute that read it last."""

    def __init__(self, device: Device, purpose: str) -> None:
        self._device = device
        self._purpose = purpose
        self.buffer: Tensor | None = None
        self.last_use: Event | None = None

    def has(self, nbytes: int) -> bool:
        """Whether it need not grow for ``nbytes``."""
        return self.buffer is not None and self.buffer.numel() >= nbytes

    def make(self, nbytes: int) -> None:
        assert self.buffer is None, f"{self._purpose} made twice"
        self.buffer = self._device.allocate(nbytes, self._purpose)

    def release(self) -> None:
        """Give the memory back, once what was enqueued on it is done: a gradient may still be on its way down."""
        if self.last_use is not None:
            self.last_use.wait()
        if self.buffer is not None:
            self._device.free(self.buffer)
        self.buffer = None
        self.last_use = None

    def cut(self, sizes: Iterable[int]) -> list[Tensor]:
        assert self.buffer is not None, f"{self._purpose} used before it was allocated"
        parts, start = [], 0
        for size in sizes:
            parts.append(self.buffer[start : start + size])
            start += size
        assert start <= self.buffer.numel(), f"{start} bytes do not fit the {self._purpose}"
        return parts

    def contains(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the arena, and would change with the next slot."""
        if self.buffer is None:
            return False
        return tensor.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()


class Worker:
    """Runs the calls of its slots, one at a time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.index = device.index
        self.weights = [Arena(device, "weights"), Arena(device, "weights of the next stage")]
        self.gradients = [Arena(device, "gradients"), Arena(device, "gradients of the last stage")]
        self.room = PrefetchBudget()
        """For what is brought to it before it is needed."""
        self._turn = 0
        self._gradient_turn = 0
        self._replicas: dict[int, tuple[Replica, ReplicaBuffers]] = {}
        self._device_gradients: dict[int, DeviceGradSums] = {}
        self._segments: dict[int, Tensor] = {}
        self.lead = 0
        """Bytes of calls that may be in flight."""
        self._in_flight = InFlight()
        self.thread = TaskThread(f"roundpipe-worker{self.index}", device.activate)
        self._warming: Task[None] | None = None
        self.warm_up()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Let the device warm up before anything else is run."""
        self._warming = self.thread.submit(self.device.warm_up)

    def run(self, function: Callable[[], T], cancel_scope: CancelScope) -> T:
        """Run ``function`` on the worker's thread and wait for its result; its exceptions are raised here."""
        task = self.thread.submit(functools.partial(self._warmed, function))
        cancel_scope.wait(task.waiter)
        return task.result()

    def post(self, function: Callable[[], None], cancel_scope: CancelScope) -> None:
        """Run ``function`` on the worker's thread later; its exceptions fail the step."""

        def guarded() -> None:
            if cancel_scope.failed:
                return
            try:
                self._warmed(function)
            except BaseException as error:
                cancel_scope.fail(error)

        self.thread.submit(guarded)

    def _warmed(self, function: Callable[[], T]) -> T:
        """On the thread: if the device did not warm up, whoever asks for something first learns why."""
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.result()
        return function()

    def fence(self) -> Waiter:
        """Woken when the thread has done everything asked of it so far."""
        return self.thread.submit(lambda: None).waiter

    def close(self, deadline: float | None = None) -> None:
        """Stop the thread and give the arenas back.

        Args:
            deadline: for a thread that may be stuck (monotonic time): if it is not joined by then, it keeps them.
        """
        self.thread.stop()
        if not self.thread.join(deadline):
            return
        self.forget()
        for arena in (*self.weights, *self.gradients):
            if deadline is not None:
                arena.last_use = None  # what was on its way will not arrive
            arena.release()

    # -- slots --------------------------------------------------------------------------------------------------------

    def reserve(self, weights: int, gradients: int, room: int | None = 0, lead: int = 0) -> None:
        """Make the arenas as large as the largest stage needs (bytes). Drained.

        Args:
            weights: of that stage.
            gradients: of that stage.
            room: what the budget leaves beside all that the plan needs; None: no limit.
            lead: what it leaves for calls in flight beside that.
        """
        self.room.limit, self.lead = room, lead
        needed = [(arena, weights) for arena in self.weights]
        needed += [(arena, gradients) for arena in self.gradients if gradients]
        growing = [(arena, nbytes) for arena, nbytes in needed if not arena.has(nbytes)]
        if growing:
            self.forget()  # copies of layers would hold what is given back
        for arena, _ in growing:  # all of them first: there may be no room for old and new ones
            arena.release()
        for arena, nbytes in growing:
            arena.make(nbytes)

    def prepare(self, slot: Slot) -> None:
        """Enqueue the uploads of a slot's weights into the arena that is free [2].

        A layer that is still being updated is uploaded by whoever publishes it: this thread has other things to do
        until then, on which that update may depend.
        """
        slot.arena = self._turn
        self._turn = 1 - self._turn
        arena = self.weights[slot.arena]
        stream = self.device.weights_up
        if arena.last_use is not None:
            stream.wait(arena.last_use)
        for layer, segment in zip(slot.layers, arena.cut(layer.nbytes for layer in slot.layers), strict=True):
            later = _LaterUpload(self, slot, layer, segment)
            if layer.bucket.when(slot.version, later.finish, later.part):
                slot.awaited[layer.index] = later.waiter
            else:
                self.upload(slot, layer, segment)

    def upload(
        self, slot: Slot, layer: HostLayer, segment: Tensor, begun: Event | None = None,
        sent: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Enqueue the upload of a layer's weights, or of what is left of it.

        Args:
            slot: that they are for.
            layer: whose.
            segment: of the slot's arena.
            begun: when that began, if some were sent already.
            sent: which; see `HostLayer.upload`.
        """
        stream = self.device.weights_up
        start = begun or stream.record(timed=True)
        layer.upload(stream, segment, sent)
        end = stream.record(timed=True)
        slot.uploaded[layer.index] = end
        where = EventSource(slot.index, slot.phase, -1, layer.name)
        slot.recorder.add("upload_weights", self.index, start, end, -1, layer.nbytes, where)
        if slot.readiness is not None:
            slot.readiness.uploading(layer.bucket, end)

    def cancel(self, slot: Slot) -> None:
        """Take back `prepare`: the slot will not come. The next upload is in the same stream, so behind this one's."""
        assert slot.arena == 1 - self._turn, "only what was prepared last can be taken back"
        with slot.uploading:
            slot.cancelled = True
        self._turn = slot.arena
        slot.arena = None

    def open(self, slot: Slot, following: Slot | None = None) -> bool:
        """Make ``slot`` the resident one, and begin to upload the one after it, which may be of the next step.

        Returns:
            Whether nobody is going to run in it, so that it is to be closed again.
        """
        if slot.arena is None:
            self.prepare(slot)
        assert slot.arena is not None
        arena = self.weights[slot.arena]
        cuts = arena.cut(layer.nbytes for layer in slot.layers)
        self._segments = {layer.index: cut for layer, cut in zip(slot.layers, cuts, strict=True)}
        for layer in slot.layers:
            whole = functools.partial(self._whole, slot, layer)
            self.replica(layer).bind(layer.views(self._segments[layer.index]), layer.trainable(), whole)  # [1]
        slot.wait_for_predecessor(slot.cancel_scope)
        self._open_gradients(slot)
        if following is not None and following.arena is None:
            self.prepare(following)
        return slot.open()

    def _open_gradients(self, slot: Slot) -> None:
        sums = {call: s for call, s in slot.sums.items() if s.layout.nbytes}
        self._device_gradients = {}
        if not sums:
            return
        arena = self.gradients[self._gradient_turn]
        stream = self.device.weights_up
        if arena.last_use is not None:
            self.device.compute.wait(arena.last_use)
            stream.wait(arena.last_use)
        for (call, host), segment in zip(sums.items(), arena.cut(s.layout.nbytes for s in sums.values()), strict=True):
            gradients = self._device_gradients[call] = DeviceGradSums(host, segment)
            if any(gradients.present):
                if host.arrived is not None:
                    stream.wait(host.arrived)
                start = stream.record(timed=True)
                gradients.upload(stream)
                end = stream.record(timed=True)
                self.device.compute.wait(end)
                where = EventSource(slot.index, slot.phase, call, host.layer.name)
                slot.recorder.add("upload_gradients", self.index, start, end, -1, host.layout.nbytes, where)

    def close_slot(self, slot: Slot) -> None:
        """Send the gradients down [4] and let the arena go [5]."""
        for layer in slot.layers:  # those that were not called, too
            self.device.compute.wait(self._upload_of(slot, layer))
        done = self.device.compute.record()
        if self._device_gradients:
            self._send_gradients(slot)
        assert slot.arena is not None
        arena = self.weights[slot.arena]
        arena.last_use = done
        if arena.buffer is not None:
            self.device.compute.poison(arena.buffer)
            arena.last_use = self.device.compute.record()
        self._segments = {}
        slot.close()

    def _send_gradients(self, slot: Slot) -> None:
        stream = self.device.gradients_down
        for gradients in self._device_gradients.values():
            gradients.narrow()
        stream.wait(self.device.compute.record())
        for call, gradients in self._device_gradients.items():
            if not any(gradients.present):
                continue
            gradients.host.make_room(slot.cancel_scope)
            start = stream.record(timed=True)
            gradients.download(stream)
            end = stream.record(timed=True)
            where = EventSource(slot.index, slot.phase, call, gradients.host.layer.name)
            nbytes = gradients.host.layout.travel_nbytes
            slot.recorder.add("download_gradients", self.index, start, end, -1, nbytes, where)
        arena = self.gradients[self._gradient_turn]
        if arena.buffer is not None:
            stream.poison(arena.buffer)
        arena.last_use = stream.record()
        self._gradient_turn = 1 - self._gradient_turn
        self._device_gradients = {}

    # -- calls --------------------------------------------------------------------------------------------------------

    def replica(self, layer: HostLayer) -> Replica:
        """The worker's copy of ``layer``; its parameters mean something only while a slot that holds it is open."""
        return self._copy(layer)[0]

    def buffers(self, layer: HostLayer) -> ReplicaBuffers:
        return self._copy(layer)[1]

    def _copy(self, layer: HostLayer) -> tuple[Replica, ReplicaBuffers]:
        known = self._replicas.get(layer.index)
        if known is None:
            replica = Replica(layer.module, self.device.torch_device, layer.state, layer.rounded)
            known = self._replicas[layer.index] = (
                replica,
                ReplicaBuffers(layer.name, layer.buffers, layer.mutable_buffers, replica, self.device),
            )
        return known

    def _whole(self, slot: Slot, layer: HostLayer, position: int) -> Tensor:
        """A weight that has arrived rounded as it was before: somebody does something else with it than to cast it.

        Nobody writes to it while its slot is open, unless updates are published as soon as all is uploaded.
        """
        layer.uses.otherwise([position])
        master = layer.masters[position]
        if slot.readiness is not None:
            name = next(name for name, parameter in layer.module.named_parameters() if parameter is master)
            raise RoundPipeError(
                f"layer {layer.name!r} uses its weight {name!r} otherwise than in the first batch, where autocast cast "
                "it each time, so that it is sent cast; and with staleness=1 it may have changed since. Set "
                "staleness=0, or let the first batch use it so, too."
            )
        return layer.read(master).detach().to(self.device.torch_device, copy=True)

    def gradients_of(self, call: int) -> DeviceGradSums | None:
        return self._device_gradients.get(call)

    def ready(self, slot: Slot, layer: HostLayer) -> Event:
        """Order the compute stream after the upload of ``layer`` [3].

        Returns:
            Where it could have gone on if there were nothing to wait for.
        """
        self.device.drop_finished()
        upload = self._upload_of(slot, layer)
        could = self.device.compute.record(timed=True)
        self.device.compute.wait(upload)
        return could

    def _upload_of(self, slot: Slot, layer: HostLayer) -> Event:
        """Where a stream can wait for an upload, once that has been enqueued."""
        if (waiter := slot.awaited.get(layer.index)) is not None:
            slot.cancel_scope.wait(waiter)
        return slot.uploaded[layer.index]

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in an arena and must be copied before it may outlive its slot."""
        if isinstance(tensor, RoundedWeight):
            return True
        return any(arena.contains(tensor) for arena in (*self.weights, *self.gradients))

    def keep_until_computed(self, *tensors: Any) -> None:
        """Keep ``tensors`` until the compute enqueued so far is done, and do not let the host run too far ahead.

        Each call that is enqueued adds boundary tensors to what the device holds. So there are `IN_FLIGHT` calls, or as
        many more as the plan has left memory for.
        """
        flying = self._in_flight
        flying.add(self.device.compute.record(), tensors, counted=self.lead > 0)
        while flying and flying.oldest.done():
            flying.land()
        while len(flying) > IN_FLIGHT and (not self.lead or flying.nbytes > self.lead):
            # Before its tensors go, and not after.
            flying.oldest.wait()
            flying.land()

    def release(self) -> None:
        """Give the arenas back: other sizes are needed. Drained."""
        self.forget()
        for arena in (*self.weights, *self.gradients):
            arena.release()

    def forget(self) -> None:
        """Drop what the last step left: copies of layers keep nothing of the arenas, and nothing is in flight."""
        for replica, _ in self._replicas.values():
            replica.unbind()
        self._replicas.clear()
        self._device_gradients.clear()
        self._segments.clear()
        self._in_flight = InFlight()

    def abandon(self) -> None:
        """After a failure, when the device is at rest: what was enqueued on the arenas will not happen any more."""
        self.forget()
        for arena in (*self.weights, *self.gradients):
            arena.last_use = None


def _flat(nested: Iterable[Any]) -> list[Tensor]:
    """The tensors in lists, and in lists in lists."""
    found: list[Tensor] = []
    for item in nested:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _flat(item)
    return found


class _LaterUpload:
    """The upload of a layer that is still being updated. The optimizer's thread enqueues it, with parts of the weights
    as soon as they are there, if they are updated in parts.

    Args:
        worker: that the weights go to.
        slot: that they are for.
        layer: whose.
        segment: of the slot's arena.
    """

    def __init__(self, worker: Worker, slot: Slot, layer: HostLayer, segment: Tensor) -> None:
        self._worker, self._slot, self._layer, self._segment = worker, slot, layer, segment
        self._begun: Event | None = None
        self._sent: list[tuple[int, int]] = []
        self.waiter = Waiter()
        """Woken when all of it is enqueued."""

    def part(self, master: nn.Parameter, start: int, end: int) -> None:
        """The numbers ``start`` to ``end`` of ``master`` are there."""

        def enqueue() -> None:
            stream = self._worker.device.weights_up
            begun = self._begun or stream.record(timed=True)
            if (span := self._layer.upload_part(stream, self._segment, master, start, end)) is not None:
                self._begun = begun
                self._sent.append(span)

        self._enqueue(enqueue)

    def finish(self) -> None:
        """All weights are there."""
        self._enqueue(
            lambda: self._worker.upload(self._slot, self._layer, self._segment, self._begun, _merged(self._sent))
        )
        self.waiter.wake()

    def _enqueue(self, work: Callable[[], None]) -> None:
        slot = self._slot
        try:
            with slot.uploading:
                if not slot.cancelled and not slot.cancel_scope.failed:
                    with self._worker.device.activate():
                        work()
        except BaseException as error:
            slot.cancel_scope.fail(error)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans, which do not overlap, in order, those that follow each other as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged
