"""One worker: a device, its turns, its memory for weights and gradients, and its copies of layers.

    a slot becomes the first: it gets memory for gradients; prepare the slot behind it ── [1]
    a call: bind the copy of its layer to the slot's weights; wait for the upload of its own layer only ── [2]
    the last microbatch's backward of a call: its gradients go to the host ── [3]
    the slot is closed: gradients that are left go, too; its place is free behind them ── [4]

Microbatches call everything here with the baton held. A download of gradients may have to wait until the optimizer has
taken those of the step before; a thread of the worker does that [3].
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.engine.activations import Arriving, Room
from lightning_roundpipe.engine.events import EventSource
from lightning_roundpipe.engine.slots import Slot, TicketQueue
from lightning_roundpipe.engine.sync import Baton, GivenUp
from lightning_roundpipe.engine.uploads import SlotMemory
from lightning_roundpipe.memory.arenas import Arena
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.in_flight import IN_FLIGHT, InFlight
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.planning.memory import Reserved
from lightning_roundpipe.threads.task_thread import TaskThread


class GradientSender(TaskThread):
    """Sends the gradients of closed calls to the host, and frees the places of closed slots behind them.

    A thread of its own does what has to wait, and all that is behind it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(f"roundpipe-gradients{device.index}", device.activate)
        self.device = device

    def send(self, slot: Slot, calls: Iterable[int]) -> None:
        """Send the gradients of calls, which no microbatch adds to any more, to the host [3]."""
        for call in calls:
            gradients = slot.gradients.on_worker.pop(call)
            if not any(gradients.present):
                slot.gradients.left[call].set()
                slot.report_sent(call)
                continue
            with self.device.compute.running():  # who closes a slot may be on another device
                gradients.narrow()
            end = self.device.compute.record()
            # Room only in turn: others that come before may need it, and give it back only when they have had theirs.
            self._in_order(
                functools.partial(self._send, slot, call, gradients, end),
                functools.partial(self._has_room, slot, call, gradients),
            )

    @staticmethod
    def _has_room(slot: Slot, call: int, gradients: DeviceGradSums) -> bool:
        """Take room for gradients, if that waits for nothing."""
        before = any(not other.gradients.leaving(call).is_set for other in slot.gradients.after)
        return not before and gradients.host.make_room()

    def _in_order(self, work: Callable[[bool], None], ready: Callable[[], bool]) -> None:
        """Run ``work`` here if nothing comes before it and it is ``ready``, else on the sending thread.

        ``work`` is given whether it has to wait itself.
        """
        if not self.take_turn():
            self.submit(lambda: work(True))
            return
        try:
            if ready():
                work(False)
            else:
                self.submit(lambda: work(True))
        finally:
            self.end_turn()

    def _send(self, slot: Slot, call: int, gradients: DeviceGradSums, end: Event, waits: bool) -> None:
        scope = slot.spec.scope
        try:
            if scope.failed:
                return
            stream = self.device.gradients_down
            stream.wait(end)
            if waits:
                for other in slot.gradients.after:
                    other.gradients.leaving(call).wait(scope)
                gradients.host.make_room(scope)
            start = stream.record(timed=True)
            gradients.download(stream, self.device.index, slot.gradients.left[call].set, scope.fail)
            left = stream.record(timed=True)
            where = EventSource(slot.index, slot.phase, call, gradients.host.layer.name)
            nbytes = gradients.host.layout.travel_nbytes
            slot.spec.recorder.add("download_gradients", self.device.index, start, left, -1, nbytes, where)
            slot.report_sent(call)
        except BaseException as error:
            scope.fail(error)

    def free_place(self, slot: Slot, memory: SlotMemory, pending: list[int]) -> None:
        """Free the place of a slot behind all its gradients [4].

        Weights that no call has asked for may be ``pending``: not published yet, so that their upload is still to come.
        """
        memory.last = slot.gradients.sent
        end = self.device.compute.record()
        self._in_order(lambda waits: self._free_place(slot, memory, end, pending), lambda: not pending)

    def _free_place(self, slot: Slot, memory: SlotMemory, end: Event, pending: list[int]) -> None:
        try:
            if not slot.spec.scope.failed:
                stream, place = self.device.gradients_down, slot.weights.place
                stream.wait(end)  # what comes to the place next waits for this stream alone
                assert place is not None
                for layer in pending:
                    slot.weights.uploads[layer].enqueued.wait(slot.spec.scope)
                    stream.wait(slot.weights.uploads[layer].end)
                with memory.lock:
                    if pending:  # only now: what is uploaded to the place has found all that were there before it
                        place.weights.last_use = stream.record()
                        memory.arena.retire(place)
                    if (region := place.gradients) is not None:
                        stream.poison(memory.arena.bytes_of(region.start, region.end))
                        region.last_use = stream.record()
                memory.proceed()
                slot.report_closed()
        except BaseException as error:
            slot.spec.scope.fail(error)
        finally:
            slot.release()

    def fence(self) -> Waiter:
        """Return what is woken when all gradients are on their way."""
        return self.submit(lambda: None).waiter


class Worker:
    """See above.

    Args:
        prefetch: whether the slot behind the present one is prepared.

    Attributes:
        tickets: the order of its slots.
        planned: memory for slots in turn.
        spare: memory for calls that no slot in turn was made for.
        copies: memory for packed weights that the open slot unpacks once.
    """

    def __init__(self, device: Device, baton: Baton, *, prefetch: bool) -> None:
        self.device = device
        self._baton, self._prefetch = baton, prefetch
        self.tickets = TicketQueue(baton, self.close_slot)
        self.planned, self.spare = SlotMemory(device), SlotMemory(device)
        self.copies = Arena(device, "unpacked weights")
        self._replicas: dict[int, Replica] = {}
        self._bound: dict[int, Tensor] = {}
        """The weights that each copy of a layer has, by number of the layer."""
        self.lead = 0
        """Bytes that calls beyond the first `IN_FLIGHT` may keep alive; 0 allows no such calls."""
        self.room = Room()
        self._in_flight = InFlight()
        self.copying: list[Event] = []
        """The ends of the copies of the last call's inputs to the host."""
        self.carrying: deque[Event] = deque()
        """The ends of the copies of calls' products to the host."""
        self.sender = GradientSender(device)

    # -- memory -------------------------------------------------------------------------------------------------------

    def reserve(self, reserved: Reserved, *, at_least: bool = False) -> None:
        """Make the arena of the given size. Nothing runs."""
        self.lead, self.room.limit = reserved.lead, reserved.room
        needed = {self.planned.arena: reserved.arena, self.copies: reserved.copies, self.spare.arena: 0}
        changing = [arena for arena, nbytes in needed.items() if not arena.suits(nbytes, at_least=at_least)]
        if changing:
            self.forget()  # copies of layers hold views of the arenas
        for arena in changing:  # all before any is made: old and new ones may not fit together
            arena.release()
        for arena in changing:
            if needed[arena] or arena is self.planned.arena:
                arena.make(needed[arena])

    def replica(self, slot: Slot, layer: HostLayer) -> Replica:
        """Return the worker's copy of ``layer`` with the weights of ``slot``, which is open.

        A call outside of the plan may have bound it to weights of its own meanwhile.
        """
        weights = layer.weights
        if (known := self._replicas.get(layer.index)) is None:
            with torch.inference_mode(False):
                known = self._replicas[layer.index] = Replica(
                    layer.module, self.device.torch_device, layer.state, weights.rounded, layer.seen.copies_wanted
                )
        segment = slot.weights.uploads[layer.index].segment
        assert segment is not None, "the slot is open"
        if self._bound.get(layer.index) is not segment:
            with torch.inference_mode(False):  # or the weights were no tensors of the parameters' kind
                known.bind(weights.views(segment), weights.trainable(), functools.partial(self._whole, slot, layer))
            self._bound[layer.index] = segment
        return known

    def _unbind(self) -> None:
        """Let copies of layers let go of the arenas."""
        for replica in self._replicas.values():
            replica.unbind()
        self._bound.clear()

    def arena_addresses(self) -> set[int]:
        """Return where arenas lie: a tensor there must be copied to outlive its slot."""
        return {self.planned.arena.address, self.spare.arena.address, self.copies.address} - {0}

    # -- slots --------------------------------------------------------------------------------------------------------

    def add(self, slot: Slot) -> None:
        """Add a slot to those in turn."""
        self.tickets.add(slot)
        self._prepare_next()

    def _prepare_next(self) -> None:
        """Prepare the first slot, and the one behind it once the first one is open."""
        for slot in list(self.tickets.slots)[:2]:
            if slot.weights.place is None and not self.planned.prepare(slot):
                return
            if not (slot.opened and self._prefetch):
                return

    def acquire(self, slot: Slot, microbatch: int, coming: Callable[[], None] | None = None) -> None:
        """Wait for a microbatch's turn, and open the slot if it is the first. ``coming``: see `TicketQueue.acquire`."""
        self.tickets.acquire(slot, microbatch, coming)
        if not slot.opened:
            self.open(slot, self.planned)
            self._prepare_next()

    def open(self, slot: Slot, memory: SlotMemory, present: Slot | None = None) -> None:
        """Give a slot its weights' and gradients' memory [1]. The uploads may still be on their way.

        ``present``: the slot in whose turn one is opened for a single call, which takes its weights if it has them.
        """
        for before in slot.gradients.after if not slot.gradients.own_sums else ():
            self._baton.wait(before.gradients.sent.then)
        if memory.last is not None:
            self._baton.wait(memory.last.then)
        if present is not None and all(map(present.has, slot.layers)):
            self._share(slot, present)
        if slot.weights.place is None:
            weights = 0 if slot.weights.shares else sum(layer.weights.nbytes for layer in slot.layers)
            needed = weights + sum(host.layout.nbytes for host in slot.gradients.sums.values())
            if not memory.arena.has(needed):  # a layer that the plan does not have, or weights that are trained now
                self._unbind()
                with memory.lock:
                    memory.arena.grow(2 * needed)
            memory.prepare(slot)
        slot.opened = True
        self._open_gradients(slot, memory)
        if slot.weights.unpacks_once and self.copies.buffer is not None:
            left, sizes = self.copies.buffer.numel(), []
            for layer in slot.layers:  # those that have come to want more since the plan was made find what is left
                sizes.append(min(left, layer.seen.copies_nbytes))
                left -= sizes[-1]
            for layer, room in zip(slot.layers, self.copies.cut(sizes), strict=True):
                self.replica(slot, layer).copies.open(room)

    def _share(self, slot: Slot, present: Slot) -> None:
        """Let a slot have the weights of the present one."""
        slot.weights.shares = True
        for layer in slot.layers:
            upload = present.weights.uploads[layer.index]
            self._baton.wait(upload.enqueued.then)
            slot.weights.uploads[layer.index] = copy.copy(upload)  # which keeps the memory as long as this slot
            slot.report_upload(layer, upload.end)

    def _open_gradients(self, slot: Slot, memory: SlotMemory) -> None:
        sums = {call: s for call, s in slot.gradients.sums.items() if s.layout.nbytes}
        if not sums:
            return
        assert slot.weights.place is not None
        sizes, arena = [host.layout.nbytes for host in sums.values()], memory.arena
        with memory.lock:
            region = arena.add_gradients(slot.weights.place, sizes)
            before = arena.before(region.start, region.end, slot.weights.place) or []
            segments, events = arena.tensors(region), [r.last_use for r in before if r.last_use is not None]
        slot.gradients.free = list(events)
        stream = self.device.weights_up
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
                slot.spec.recorder.add("upload_gradients", self.device.index, start, end, -1, host.layout.nbytes, where)

    def bring_in(self, slot: Slot, layer: HostLayer, inputs: Sequence[Arriving]) -> list[Tensor]:
        """Return ``inputs``, once the compute stream waits for them and for the upload of ``layer`` [2].

        Records how long it stands still.
        """
        self.device.drop_finished()
        upload = slot.weights.uploads[layer.index]
        there = upload.enqueued.is_set and upload.end.done() and all(end is None or end.done() for _, end in inputs)
        could = None if there else self.device.compute.record(timed=True)
        if not upload.enqueued.is_set:
            self._baton.wait(upload.enqueued.then)
        self.follow(upload.end)
        tensors = self.arrived(inputs)
        if could is not None:
            slot.spec.recorder.waited(self.device.index, could, self.device.compute.record(timed=True))
        return tensors

    def arrived(self, inputs: Sequence[Arriving]) -> list[Tensor]:
        """Return ``inputs``, once the compute stream waits for them."""
        for _, event in inputs:
            if event is not None:
                self.follow(event)
        return [tensor for tensor, _ in inputs]

    def follow(self, event: Event) -> None:
        """Have the compute stream wait for ``event``."""
        if self.device.backward_needs_interpreter and not event.done():  # compute is the calling thread itself
            with GivenUp(self._baton):
                event.wait()
        self.device.compute.wait(event)

    def wait_for_upload(self, slot: Slot, layer: HostLayer) -> None:
        """Have the host wait until the upload of ``layer``, which is enqueued, is over."""
        if not (end := slot.weights.uploads[layer.index].end).done():
            with GivenUp(self._baton):
                end.wait()

    def wait_for_copies(self) -> None:
        """Have the compute stream wait for the last call's copies to the host, so that one call's take memory."""
        before, self.copying = self.copying, []
        for event in before:
            self.follow(event)

    def wait_for_products(self) -> None:
        """Wait until the products of one call at most are on their way to the host: another call's take memory now.

        The host waits itself, as a call that is enqueued has its memory.
        """
        while len(self.carrying) > 1:
            if not (oldest := self.carrying.popleft()).done():
                with GivenUp(self._baton):
                    oldest.wait()
        self.device.drop_finished()

    def gradients_of(self, slot: Slot, call: int) -> DeviceGradSums | None:
        """Return the sums that the backward of a call adds to; None if nothing in its layer is trained."""
        self._wait_for_gradients(slot)
        return slot.gradients.on_worker.get(call)

    def _wait_for_gradients(self, slot: Slot) -> None:
        """Have the compute stream wait until the memory for gradients is free, and the sums so far are there."""
        for event in slot.gradients.free:
            self.device.compute.wait(event)
        slot.gradients.free = []

    def close_slot(self, slot: Slot, memory: SlotMemory | None = None) -> None:
        """Free a slot's place behind what uses it [4]."""
        memory, compute = memory or self.planned, self.device.compute
        if (place := slot.weights.place) is None:  # all its microbatches have left it out, and it was not prepared
            slot.report_closed()
            slot.release()
            return self._prepare_next()
        pending = [layer.index for layer in slot.layers if not slot.weights.uploads[layer.index].enqueued.is_set]
        for layer in slot.layers:
            if layer.index not in pending:
                compute.wait(slot.weights.uploads[layer.index].end)
        self._wait_for_gradients(slot)  # a slot may close without a backward
        self.sender.send(slot, list(slot.gradients.on_worker))
        if slot.weights.unpacks_once and self.copies.buffer is not None:
            for layer in slot.layers:
                self.replica(slot, layer).copies.open(None)
            compute.poison(self.copies.buffer)
            self.copies.last_use = compute.record()
        with memory.lock:
            if not pending:
                compute.poison(memory.arena.bytes_of(place.weights.start, place.weights.end))
                place.weights.last_use = compute.record()
                memory.arena.retire(place)
        self.sender.free_place(slot, memory, pending)
        memory.proceed()
        if memory is self.planned:
            self._prepare_next()

    def _whole(self, slot: Slot, layer: HostLayer, position: int) -> Tensor:
        """Return the unrounded values of a weight that was uploaded rounded, for a use other than autocast's cast."""
        layer.seen.uses.otherwise([position])
        master = layer.masters[position]
        if layer.bucket.double_buffered and master.requires_grad:
            name = next(name for name, parameter in layer.module.named_parameters() if parameter is master)
            raise RoundPipeError(
                f"layer {layer.name!r} uses its weight {name!r} otherwise than in the first batch, where autocast cast "
                "it each time, so that it is sent cast; and with staleness=1 it may have changed since. Set "
                "staleness=0, or let the first batch use it so, too."
            )
        return layer.weights.read(master).detach().to(self.device.torch_device, copy=True)

    # -- what is in flight --------------------------------------------------------------------------------------------

    def keep_until_computed(self, *tensors: Any) -> None:
        """Keep tensors until what is enqueued has been computed, and limit how far the host runs ahead."""
        flying, end = self._in_flight, self.device.compute.record()
        if not flying and end.done():
            return
        flying.add(end, tensors, counted=self.lead > 0)
        while flying and flying.oldest.done():
            flying.land()
        while len(flying) > IN_FLIGHT and (not self.lead or flying.nbytes > self.lead):
            oldest = flying.oldest
            with GivenUp(self._baton):
                oldest.wait()
            while flying and flying.oldest.done():
                flying.land()

    def wait_until_idle(self) -> None:
        """Wait until nothing computes, and let go of what was computed with."""
        self.device.compute.synchronize()
        while self._in_flight:
            self._in_flight.land()

    def forget(self) -> None:
        """Drop the copies of layers, which refer to the arenas. Nothing runs."""
        self._unbind()
        self._replicas.clear()
        self._in_flight = InFlight()

    def stop_uploads(self) -> None:
        """After a failure, drop the uploads to come. None is enqueued any more, by the optimizer's thread either."""
        for memory in (self.planned, self.spare):
            memory.forget()

    def abandon(self) -> None:
        """Reset the worker after a failure, when its thread and the device are at rest."""
        self.tickets.clear()
        self.room.taken, self.copying = 0, []
        self.carrying.clear()
        for memory in (self.planned, self.spare):
            memory.arena.abandon()
            memory.last = None
        self.forget()

    def close(self) -> None:
        """Free the memory. The thread has ended."""
        self.forget()
        for memory in (self.planned, self.spare):
            memory.arena.release()
