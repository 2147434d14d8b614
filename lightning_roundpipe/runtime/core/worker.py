"""One worker: a device, the thread that runs layers, and the arena for weights and gradients.

    open slot i:  bind the replicas' parameters to the slot's place in the arena ── [1]
                  upload slot i+N to the other end of the arena, as far as that is free ── [2]
    run:          each call waits only for the upload of its own layer ── [3]
                  a stage that unpacks once keeps unpacked weights in an arena of their own, which only the compute
                  stream uses, so that the next slot needs to wait for nothing
    last microbatch: its backward of a call is the call's last ── download the call's gradients, and those of calls
                  before it that had to wait ── [4]
    close slot i: download the gradients that are left, and upload what is left of slot i+N ── [5]

Slot i+N overlaps slot i where the arena is smaller than both. Its gradients may also overlap those of slot i, which are
downloading: its first backward waits for them [6].

All of this runs on the worker's own thread, in the order of submission, so it needs no lock. The one exception is the
upload of a layer that is still being updated, which the optimizer's thread enqueues (`weight_uploads`). `turns` decides
which slot may be opened, and when.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.model.rounded import RoundedWeight
from lightning_roundpipe.planning.memory import Reserved
from lightning_roundpipe.runtime.core.activation_store import PrefetchBudget
from lightning_roundpipe.runtime.core.arenas import Arena, StageArena, address_of
from lightning_roundpipe.runtime.core.in_flight import IN_FLIGHT, InFlight
from lightning_roundpipe.runtime.core.offloading import Departures
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.weight_uploads import WeightUploads
from lightning_roundpipe.runtime.memory.grad_buffers import DeviceGradSums, HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.memory.module_buffers import ReplicaBuffers
from lightning_roundpipe.runtime.reporting.events import EventSource
from lightning_roundpipe.runtime.threads.caller_modes import without_caller_modes
from lightning_roundpipe.runtime.threads.sync import Cancelled, CancelScope
from lightning_roundpipe.runtime.threads.task_thread import Task, TaskThread

T = TypeVar("T")


class Worker:
    """Runs the calls of its slots, one at a time.

    The class uses many modules because it owns all long-lived memory on its device (arenas, replicas, device gradients,
    budgets), and each of these refers to its counterpart on the host.

    Args:
        device: the device.

    Attributes:
        arena: weights and gradients of the open slot, gradients of the last one, and weights of the next one.
        uploads: uploads of weights.
        thread: the thread on which everything here runs, except what `run_here` runs in its place.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.index = device.index
        self.arena = StageArena(device)
        self.uploads = WeightUploads(device, self.arena)
        self._late_gradients = Arena(device, "gradients")
        """For a slot that has more of them than when the arena was made."""
        self.copies = Arena(device, "unpacked weights")
        """For the open slot, where its stage keeps what it has unpacked."""
        self._arenas_of_all_kinds = (self.arena, self._late_gradients, self.copies)
        self.room = PrefetchBudget()
        """Budget for prefetched tensors."""
        self.departures = Departures()
        self._open: Slot | None = None
        self._gradients_free: list[Event] = []
        """Events that the first backward of the open slot waits for."""
        self._replicas: dict[int, tuple[Replica, ReplicaBuffers]] = {}
        self._device_gradients: dict[int, DeviceGradSums] = {}
        """By call: those of the open slot that are not on their way to the host yet."""
        self._final: dict[int, Event] = {}
        """Those among them that no microbatch will add to, in this order: events behind the last addition."""
        self._sent: set[int] = set()
        """The calls of the open slot whose gradients are on their way."""
        self._segments: dict[int, Tensor] = {}
        self._brought: dict[int, tuple[Arena, Event]] = {}
        """By layer, weights that no open slot has, and the end of their upload."""
        self.lead = 0
        """Bytes that calls beyond the first `IN_FLIGHT` may keep alive; 0 allows no such calls."""
        self._in_flight = InFlight()
        self.thread = TaskThread(f"roundpipe-worker{self.index}", device.activate, leases=True)
        self._warming: Task[None] | None = None
        self.warm_up()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Submit the device's warm-up to the thread."""
        self._warming = self.thread.submit(self.device.warm_up)

    def run(self, function: Callable[[], T], cancel_scope: CancelScope) -> T:
        """Run ``function`` on the worker's thread and wait.

        Returns:
            What ``function`` returned. Its exceptions are raised here.
        """
        first = self._warming is not None
        task = self.thread.submit(functools.partial(self._warmed, function) if first else function)
        cancel_scope.wait(task.waiter)
        return task.result()

    def run_here(self, function: Callable[[], T], cancel_scope: CancelScope) -> T:
        """Run ``function`` on the calling thread, or like `run` if the worker's thread has something to do.

        Args:
            function: may depend on the worker's device, but on nothing else that is local to the worker's thread.
            cancel_scope: the step's cancel scope.

        Returns:
            What ``function`` returned.
        """
        if self._warming is not None or not self.thread.take_turn():
            return self.run(function, cancel_scope)
        try:
            if cancel_scope.failed:
                raise Cancelled
            with self.device.activate(), without_caller_modes():
                result = function()
        finally:
            self.thread.end_turn()
        cancel_scope.progress += 1  # as after a wait
        if cancel_scope.failed:
            raise Cancelled
        return result

    def post(self, function: Callable[[], None], cancel_scope: CancelScope) -> None:
        """Submit ``function`` to the worker's thread without waiting. Its exceptions fail the step."""

        def guarded() -> None:
            if cancel_scope.failed:
                return
            try:
                self._warmed(function)
            except BaseException as error:
                cancel_scope.fail(error)

        self.thread.submit(guarded)

    def _warmed(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the thread. If the warm-up has failed, the first caller gets its error."""
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.result()
        return function()

    def fence(self) -> Waiter:
        """Return a waiter that wakes when the thread has done everything submitted so far."""
        return self.thread.submit(lambda: None).waiter

    def close(self, deadline: float | None = None) -> None:
        """Stop the thread and free the arenas.

        Args:
            deadline: time on the monotonic clock until which to wait for the thread. If it has not ended by then, it
                keeps the arenas. None waits without limit.
        """
        self.thread.stop()
        if not self.thread.join(deadline):
            return
        self.forget()
        for arena in self._arenas_of_all_kinds:
            if deadline is not None:
                arena.abandon()  # after a failure, work on the arena may never finish
            arena.release()

    # -- slots --------------------------------------------------------------------------------------------------------

    def reserve(self, reserved: Reserved, *, at_least: bool = False) -> None:
        """Make the arenas of the given sizes, and free the ones that there are first.

        No slot may be open or prepared.

        Args:
            reserved: what the plan has the worker reserve.
            at_least: whether larger arenas may stay.
        """
        assert self._open is None, "arenas of an open slot cannot be replaced"
        self.room.limit, self.lead = reserved.room, reserved.lead
        needed = {self.arena: reserved.arena, self.copies: reserved.copies}
        changing = [arena for arena, nbytes in needed.items() if not arena.suits(nbytes, at_least=at_least)]
        if changing or self._late_gradients.buffer is not None:
            self.forget()  # replicas hold views of the arenas
        self._late_gradients.release()
        for arena in changing:  # free all before allocating any: old and new may not fit together
            arena.release()
        for arena in changing:
            if needed[arena] or arena is self.arena:
                arena.make(needed[arena])

    def prepare(self, slot: Slot) -> None:
        """Enqueue the uploads of a slot's weights [2]."""
        self.uploads.prepare(slot)

    def cancel(self, slot: Slot) -> None:
        """Undo `prepare` for a slot that will not open."""
        self.uploads.cancel(slot)

    def open(self, slot: Slot, following: Slot | None = None) -> bool:
        """Make ``slot`` the open one, and start uploading the slot after it, which may belong to the next step.

        Args:
            slot: the slot to open.
            following: the slot to upload meanwhile; None for none.

        Returns:
            Whether all microbatches have left the slot already, so that the caller must close it.
        """
        self._give_up_open()
        if slot.place is None:
            if not self.arena.has(needed := sum(layer.nbytes for layer in slot.layers)):
                self._unbind()  # a layer that the plan does not have
                self.arena.grow(needed)
            self.prepare(slot)
        assert slot.place is not None
        self._open = slot
        cuts = self.arena.tensors(slot.place.weights)
        self._segments = {layer.index: cut for layer, cut in zip(slot.layers, cuts, strict=True)}
        for layer in slot.layers:
            whole = functools.partial(self._whole, slot, layer)
            self.replica(layer).bind(layer.views(self._segments[layer.index]), layer.trainable(), whole)  # [1]
        self._open_copies(slot)
        if not slot.side_by_side:
            slot.wait_for_predecessor(slot.cancel_scope)
        self._open_gradients(slot)
        if following is not None and following.place is None:
            self.prepare(following)
        return slot.open()

    def _open_copies(self, slot: Slot) -> None:
        """Give each layer room for its unpacked weights, if the slot's stage keeps them."""
        if not slot.unpacks_once or self.copies.buffer is None:
            return
        left = self.copies.buffer.numel()
        sizes = []
        for layer in slot.layers:  # those that have come to want more since the plan was made find what is left
            sizes.append(min(left, layer.copies_nbytes))
            left -= sizes[-1]
        for layer, room in zip(slot.layers, self.copies.cut(sizes), strict=True):
            self.replica(layer).copies.open(room)

    def _open_gradients(self, slot: Slot) -> None:
        sums = {call: s for call, s in slot.sums.items() if s.layout.nbytes}
        self._device_gradients, self._final, self._sent = {}, {}, set()
        if not sums:
            return
        stream, continues = self.device.weights_up, any(any(DeviceGradSums.continued(host)) for host in sums.values())
        segments, before = self._place_gradients(slot, [host.layout.nbytes for host in sums.values()])
        self._gradients_free.extend(before)  # [6]
        for event in before if continues else ():
            stream.wait(event)
        for (call, host), segment in zip(sums.items(), segments, strict=True):
            gradients = self._device_gradients[call] = DeviceGradSums(host, segment)
            if any(gradients.present):
                if host.arrived is not None:
                    stream.wait(host.arrived)
                start = stream.record(timed=True)
                gradients.upload(stream)
                end = stream.record(timed=True)
                self._gradients_free.append(end)
                where = EventSource(slot.index, slot.phase, call, host.layer.name)
                slot.recorder.add("upload_gradients", self.index, start, end, -1, host.layout.nbytes, where)

    def _place_gradients(self, slot: Slot, sizes: Sequence[int]) -> tuple[list[Tensor], list[Event]]:
        """Return memory for gradients, and the events after which it is free."""
        place, arena = slot.place, self.arena
        assert place is not None
        if arena.add_gradients(place, sizes):
            assert place.gradients is not None
            before = arena.before(place.gradients.start, place.gradients.end, place) or []
            return arena.tensors(place.gradients), [r.last_use for r in before if r.last_use is not None]
        late = self._late_gradients  # parameters that were frozen when arenas were reserved are trained now
        if not late.has(sum(sizes)):
            late.grow(sum(sizes))
        return late.cut(sizes), [] if late.last_use is None else [late.last_use]

    def close_slot(self, slot: Slot) -> None:
        """Enqueue the downloads of the gradients that are left, and free the slot's place behind the compute [5]."""
        for layer in slot.layers:  # also the layers that were not called: their uploads write to the arena
            self.device.compute.wait(self._upload_of(slot, layer))
        if self._device_gradients or self._sent:
            self._send_gradients(slot)
        assert slot.place is not None
        weights = slot.place.weights
        self.device.compute.poison(self.arena.bytes_of(weights.start, weights.end))
        weights.last_use = self.device.compute.record()
        self.arena.retire(slot.place)
        if slot.unpacks_once and self.copies.buffer is not None:
            for layer in slot.layers:
                self.replica(layer).copies.open(None)
            self.device.compute.poison(self.copies.buffer)
            self.copies.last_use = self.device.compute.record()
        self._segments = {}
        self._open = None
        self.uploads.proceed()
        slot.close()

    def _give_up_open(self) -> None:
        """Free the place of a slot that is not closed: a call has raised an error, which user code has caught."""
        slot, self._open = self._open, None
        if slot is None or slot.place is None:
            return
        self.device.compute.wait(self.device.weights_up.record())
        self.device.gradients_down.wait(self.device.compute.record())
        slot.place.weights.last_use = self.device.compute.record()
        if (gradients := slot.place.gradients) is not None:
            gradients.last_use = self.device.gradients_down.record()
        self.arena.retire(slot.place)
        self.uploads.proceed()

    def send_final(self, slot: Slot, call: int, microbatch: int) -> list[int]:
        """Enqueue the downloads of gradients that no other microbatch will add to [4].

        Not those that would have to wait: for the optimizer to take the gradients of the batch before, for sums on the
        host, or for the round before. The backward of each later call tries again.

        Args:
            slot: the open slot.
            call: the call whose backward has run.
            microbatch: the microbatch that it was run for.

        Returns:
            The calls whose downloads are enqueued now.
        """
        gradients = self._device_gradients.get(call)
        if gradients is not None and microbatch == slot.microbatches[-1] and any(gradients.present):
            self._final[call] = self._end(gradients)
        sent = [call for call in self._final if self._may_send(slot, self._device_gradients[call].host)]
        for ready in sent:
            self._send(slot, ready, self._final.pop(ready))
        return sent

    def _may_send(self, slot: Slot, host: HostGradSums) -> bool:
        """Return whether a download to ``host`` has its turn and need not wait. Others write to ``host`` before."""
        return slot.is_next_in(host) and host.has_room

    def _end(self, gradients: DeviceGradSums) -> Event:
        """Return the event behind which the sum, to which nothing more is added, can be downloaded."""
        gradients.narrow()
        return self.device.compute.record()

    def _send_gradients(self, slot: Slot) -> None:
        # Sums that no microbatch has added to are downloaded as they came.
        self._wait_for_gradients()
        for call, gradients in self._device_gradients.items():
            if call not in self._final and any(gradients.present):
                self._final[call] = self._end(gradients)
        for call, end in self._final.items():
            if slot.side_by_side:
                slot.wait_to_add_to(self._device_gradients[call].host, slot.cancel_scope)
            self._send(slot, call, end)
        stream, place = self.device.gradients_down, slot.place
        # What comes to the place next waits for this stream alone, also without any gradients.
        stream.wait(self.device.compute.record())
        if place is not None and (region := place.gradients) is not None:
            stream.poison(self.arena.bytes_of(region.start, region.end))
            region.last_use = stream.record()
        else:
            self._late_gradients.last_use = stream.record()
        self._device_gradients, self._final, self._sent = {}, {}, set()

    def _send(self, slot: Slot, call: int, end: Event) -> None:
        stream, gradients = self.device.gradients_down, self._device_gradients.pop(call)
        stream.wait(end)
        gradients.host.make_room(slot.cancel_scope)
        start = stream.record(timed=True)
        gradients.download(stream, self.index, lambda: slot.sent(gradients.host), slot.cancel_scope.fail)
        left = stream.record(timed=True)
        self._sent.add(call)
        where = EventSource(slot.index, slot.phase, call, gradients.host.layer.name)
        nbytes = gradients.host.layout.travel_nbytes
        slot.recorder.add("download_gradients", self.index, start, left, -1, nbytes, where)

    # -- calls --------------------------------------------------------------------------------------------------------

    def replica(self, layer: HostLayer) -> Replica:
        """Return the worker's copy of ``layer``. Its parameters are valid only while a slot with the layer is open."""
        return self.copy_of(layer)[0]

    def buffers(self, layer: HostLayer) -> ReplicaBuffers:
        return self.copy_of(layer)[1]

    def copy_of(self, layer: HostLayer) -> tuple[Replica, ReplicaBuffers]:
        """Return what `replica` and `buffers` do."""
        known = self._replicas.get(layer.index)
        if known is None:
            replica = Replica(layer.module, self.device.torch_device, layer.state, layer.rounded, layer.copies_wanted)
            known = self._replicas[layer.index] = (
                replica,
                ReplicaBuffers(
                    layer.name, layer.buffers, layer.mutable_buffers, layer.buffer_places, replica, self.device
                ),
            )
        return known

    def _whole(self, slot: Slot, layer: HostLayer, position: int) -> Tensor:
        """Return the unrounded values of a weight that was uploaded rounded, for a use other than autocast's cast.

        The use is remembered, so that the layer is learned anew before the next batch. Reading the master is safe
        because no update writes to it while the slot is open; with staleness 1 one may, so then it is an error.
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

    @contextlib.contextmanager
    def weights_of(self, layer: HostLayer, slot: Slot) -> Iterator[None]:
        """Context in which the replica of ``layer`` has its weights, also if no open slot has them.

        Then they are uploaded into memory of their own, which the host waits for at the end.

        Args:
            layer: the layer. The version of its weights that the step computes with must be there.
            slot: the slot that a call of the layer runs in.
        """
        if layer.index in self._segments:
            yield
            return
        arena = Arena(self.device, "weights of a call that no slot has")
        arena.make(layer.nbytes)
        assert arena.buffer is not None
        layer.upload(self.device.weights_up, arena.buffer)
        self._brought[layer.index] = arena, self.device.weights_up.record()
        whole = functools.partial(self._whole, slot, layer)
        self.replica(layer).bind(layer.views(arena.buffer), layer.trainable(), whole)
        try:
            yield
        finally:
            del self._brought[layer.index]
            self.replica(layer).unbind()
            arena.last_use = self.device.compute.record()
            arena.release()

    def gradients_of(self, call: int) -> DeviceGradSums | None:
        """Return the sum that a backward adds to. The compute stream waits until the arena is free for it."""
        assert not (call in self._final or call in self._sent), "a microbatch behind the last one adds to gradients"
        self._wait_for_gradients()
        return self._device_gradients.get(call)

    def _wait_for_gradients(self) -> None:
        for event in self._gradients_free:
            self.device.compute.wait(event)
        self._gradients_free = []

    def ready(self, slot: Slot, layer: HostLayer, leaves: Iterable[Any]) -> Event | None:
        """Make the compute stream wait for the upload of ``layer`` [3].

        Args:
            slot: the slot whose turn it is.
            layer: the layer.
            leaves: the call's arguments; the caller uploads each `HostTensor` among them next.

        Returns:
            Event recorded before the wait: the gap between it and the end of all uploads is stall time. None if there
            is nothing to wait for.
        """
        self.device.drop_finished()
        upload = self._upload_of(slot, layer)
        waits = not upload.done() or HostTensor in map(type, leaves)
        could = self.device.compute.record(timed=True) if waits else None
        self.device.compute.wait(upload)
        return could

    def _upload_of(self, slot: Slot, layer: HostLayer) -> Event:
        """Return the end of a layer's upload. If the optimizer's thread enqueues that, wait until it has."""
        if (brought := self._brought.get(layer.index)) is not None:
            return brought[1]
        if (waiter := slot.awaited.get(layer.index)) is not None:
            slot.cancel_scope.wait(waiter)
        return slot.uploaded[layer.index]

    def owns(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies in an arena, so that it must be copied to outlive its slot."""
        if isinstance(tensor, RoundedWeight):
            return True
        return address_of(tensor) in self.addresses

    @property
    def addresses(self) -> set[int]:
        """Addresses of the arenas that are allocated."""
        brought = (arena for arena, _ in self._brought.values())
        return {arena.address for arena in (*self._arenas_of_all_kinds, *brought)} - {0}

    def keep_until_computed(self, *tensors: Any, end: Event | None = None) -> None:
        """Keep ``tensors`` alive until the compute enqueued so far is done, and limit how far the host runs ahead.

        Each call that the device has not finished keeps its boundary tensors in device memory. At most `IN_FLIGHT` such
        calls are allowed, or more as long as they keep no more than ``lead`` bytes.

        Args:
            tensors: the tensors, in nested lists.
            end: event behind the last work that uses them, if there is one.
        """
        flying = self._in_flight
        end = end or self.device.compute.record()
        if not flying and end.done():
            return
        flying.add(end, tensors, counted=self.lead > 0)
        while flying and flying.oldest.done():
            flying.land()
        while len(flying) > IN_FLIGHT and (not self.lead or flying.nbytes > self.lead):
            # Wait first: the tensors may be freed only after the call is done.
            flying.oldest.wait()
            flying.land()

    def land(self) -> None:
        """Wait until nothing is in flight. No call may run meanwhile."""
        while self._in_flight:
            self._in_flight.oldest.wait()
            self._in_flight.land()

    def release(self) -> None:
        """Free the arenas, before other sizes are reserved. Nothing may be in flight."""
        self.forget()
        for arena in self._arenas_of_all_kinds:
            arena.release()

    def forget(self) -> None:
        """Drop the replicas, device gradients and calls in flight of the last step, which refer to the arenas."""
        self._unbind()
        self._replicas.clear()
        self._device_gradients.clear()
        self._final.clear()
        self._sent.clear()
        self._gradients_free.clear()
        self._segments.clear()
        self.uploads.forget()
        self._open = None
        self._in_flight = InFlight()
        self.departures.clear()

    def _unbind(self) -> None:
        for replica, _ in self._replicas.values():
            replica.unbind()

    def abandon(self) -> None:
        """Reset the worker after a failure, when the device is at rest and has dropped the work enqueued on arenas."""
        self.forget()
        for arena in self._arenas_of_all_kinds:
            arena.abandon()
