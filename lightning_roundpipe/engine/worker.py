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
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.base import NOTHING
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.engine.activations import Arriving, Room
from lightning_roundpipe.engine.events import EventSource
from lightning_roundpipe.engine.process_state import changes
from lightning_roundpipe.engine.slots import Slot, TicketQueue
from lightning_roundpipe.engine.sync import Baton
from lightning_roundpipe.engine.uploads import SlotMemory
from lightning_roundpipe.memory.arenas import Arena
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.in_flight import InFlight
from lightning_roundpipe.memory.module_buffers import ReplicaBuffers
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.planning.memory import Reserved
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.user_code.bypassed_gradients import Borrowing, Lender

T = TypeVar("T")
LONG_S = 2e-3
"""Seconds of a layer's code from which on others run meanwhile. Threads of shorter layers lose more time by passing the
interpreter to each other, operation by operation, than they gain."""


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
                if pending:  # only now: what is uploaded to the place has found all that were there before it
                    memory.retire(place, stream)
                memory.free_gradients(place, stream)
                memory.proceed()
                slot.report_closed()
        except BaseException as error:
            slot.spec.scope.fail(error)
        finally:
            slot.release()

    def fence(self) -> Waiter:
        """Return what is woken when all gradients are on their way."""
        return self.submit(lambda: None).waiter


@dataclass(slots=True, eq=False)
class LayerCopy:
    """A worker's copy of a layer: a module whose parameters are views of the weights of a slot.

    What the layer's code changes in it is lost with it. So the code may set attributes, which are taken over, and write
    to buffers; writing to parameters and registering anything is an error.

    Attributes:
        segment: the weights that it is bound to; None if it is bound to none.
    """

    layer: HostLayer
    replica: Replica
    buffers: ReplicaBuffers
    segment: Tensor | None = None

    def borrowing(self, lender: Lender, masters: Container[int]) -> AbstractContextManager[Any]:
        """Return the mode that lends stand-ins for ``masters`` of other modules. Most layers were seen to need none."""
        seen, replica = self.layer.seen, self.replica
        if seen.borrows == [] and not seen.reads_data:
            return NOTHING
        return Borrowing(masters, lender, replica.device, seen.borrows or [], replica.parameters)

    def check(self, versions: Sequence[int], borrowing: object, trained: tuple[bool, ...] | None) -> None:
        """Note what the layer's code has used of other modules, and refuse what it has changed in the copy.

        Args:
            versions: those of the parameters before.
            borrowing: the mode that it ran under.
            trained: which parameters were trained; None without grad.
        """
        layer, replica = self.layer, self.replica
        now = zip(replica.parameters, versions, strict=True)
        written = {i for i, (parameter, before) in enumerate(now) if parameter._version != before}
        if isinstance(borrowing, Borrowing):
            layer.seen.borrows = borrowing.found
            layer.seen.reads_data |= borrowing.reads_data
            written |= borrowing.written_by_data()
        if written:
            self._refuse_written(written)
        if replica.registrations.have_changed():
            self._refuse_registered()
        if trained is not None and replica.trains_more(trained):
            raise RoundPipeError(
                f"layer {layer.name!r} switches on requires_grad of its own parameters while it runs; on a worker that "
                "is lost. Set requires_grad between steps, for example in on_train_batch_start."
            )

    def release(self, held: dict[tuple[int, str], Any], written: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Let go of what the copy holds only for one call: attributes that it ``held``, and those that were written.

        Returns the containers that are attributes and that the layer's code has filled: the user's and the copy's.
        """
        attributes, modules = self.replica.attributes, self.layer.state.modules
        filled = [(modules[i].__dict__.get(name), mine) for (i, name), mine in attributes.changed_contents()]
        if written:
            attributes.drop_written()
        elif held:
            attributes.release(held)
        return filled

    def _refuse_written(self, positions: Collection[int]) -> None:
        """Raise if the layer has changed its own parameters.

        A write that leaves the same values is allowed: registering and removing a parametrization does that.
        """
        if all(self._is_master(self.replica.parameters[i], i) for i in positions):
            return
        raise RoundPipeError(
            f"layer {self.layer.name!r} writes to its own parameters while it runs; on a worker that is lost. Write to "
            "them between steps (in a hook of the LightningModule), or keep what changes in a buffer."
        )

    def _refuse_registered(self) -> None:
        """Raise if the layer has registered or removed parameters or modules.

        A parameter that is not trained may be replaced by an equal one, as PEFT does where it unpacks base weights.
        """
        for module, name, before, now in self.replica.registrations.changed():
            if isinstance(before, Tensor) and isinstance(now, Tensor):
                position = next(i for i, p in enumerate(self.replica.parameters) if p is before)
                trains = self.layer.masters[position].requires_grad or now.requires_grad
                if not trains and self._is_master(now, position):
                    continue
            what = "parameter" if isinstance(before, Tensor) or isinstance(now, Tensor) else "module"
            raise RoundPipeError(
                f"layer {self.layer.name!r} registers, replaces or removes the {what} {name!r} of its {module} while "
                "it runs; on a worker that is lost. Do it between steps (in a hook of the LightningModule), or keep "
                "what changes in a buffer, which a layer may register."
            )

    def _is_master(self, value: Tensor, position: int) -> bool:
        """Return whether ``value`` equals what layers compute with for a master."""
        master = self.layer.masters[position]
        return torch.equal(value.detach().to(master.device), self.layer.weights.read(master))


class LayerCopies:
    """The copies of layers of one worker.

    Attributes:
        unpacked: memory for packed weights that the open slot unpacks once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.unpacked = Arena(device, "unpacked weights")
        self._known: dict[int, LayerCopy] = {}

    def of(self, slot: Slot, layer: HostLayer) -> LayerCopy:
        """Return the copy of ``layer`` with the weights of ``slot``, which is open.

        A call outside of the plan may have bound it to weights of its own meanwhile.
        """
        segment = slot.weights.uploads[layer.index].segment
        assert segment is not None, "the slot is open"
        if (known := self._known.get(layer.index)) is None:
            with torch.inference_mode(False):
                replica = Replica(
                    layer.module, self._device.torch_device, layer.state, layer.weights.rounded,
                    layer.seen.copies_wanted,
                )  # fmt: skip
            known = LayerCopy(layer, replica, ReplicaBuffers(layer.buffers, replica, self._device))
            self._known[layer.index] = known
        if known.segment is not segment:
            weights = layer.weights
            whole = functools.partial(self._whole, layer)
            with torch.inference_mode(False):  # or the weights were no tensors of the parameters' kind
                known.replica.bind(weights.views(segment), weights.trainable(), whole)
            known.segment = segment
        return known

    def _whole(self, layer: HostLayer, position: int) -> Tensor:
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
        return layer.weights.read(master).detach().to(self._device.torch_device, copy=True)

    def begin_unpacking(self, slot: Slot) -> None:
        """Let the layers of an open slot unpack packed weights once for all its microbatches."""
        if not slot.weights.unpacks_once or self.unpacked.buffer is None:
            return
        left, sizes = self.unpacked.buffer.numel(), []
        for layer in slot.layers:  # those that have come to want more since the plan was made find what is left
            sizes.append(min(left, layer.seen.copies_nbytes))
            left -= sizes[-1]
        for layer, room in zip(slot.layers, self.unpacked.cut(sizes), strict=True):
            self.of(slot, layer).replica.copies.open(room)

    def end_unpacking(self, slot: Slot) -> None:
        """Let a slot that is closed give that memory back."""
        if not slot.weights.unpacks_once or self.unpacked.buffer is None:
            return
        for layer in slot.layers:
            self.of(slot, layer).replica.copies.open(None)
        self._device.compute.poison(self.unpacked.buffer)
        self.unpacked.last_use = self._device.compute.record()

    def unbind(self) -> None:
        """Let go of the arenas."""
        for known in self._known.values():
            known.replica.unbind()
            known.segment = None

    def forget(self) -> None:
        """Drop all copies."""
        self.unbind()
        self._known.clear()


class Worker:
    """See above.

    Args:
        prefetch: whether the slot behind the present one is prepared.

    Attributes:
        tickets: the order of its slots.
        planned: memory for slots in turn.
        spare: memory for calls that no slot in turn was made for.
        copies: its copies of layers.
        in_flight: what is enqueued on the device and not computed yet.
    """

    def __init__(self, device: Device, baton: Baton, *, prefetch: bool) -> None:
        self.device = device
        self._baton, self._prefetch = baton, prefetch
        self.tickets = TicketQueue(baton, self.close_slot)
        self.planned, self.spare = SlotMemory(device), SlotMemory(device)
        self.copies, self.room = LayerCopies(device), Room()
        self.in_flight = InFlight(device, baton.wait_for_event)
        self.sender = GradientSender(device)

    # -- memory -------------------------------------------------------------------------------------------------------

    def reserve(self, reserved: Reserved, *, at_least: bool = False) -> None:
        """Make the arena of the given size. Nothing runs."""
        self.in_flight.lead, self.room.limit = reserved.lead, reserved.room
        needed = {self.planned.arena: reserved.arena, self.copies.unpacked: reserved.copies, self.spare.arena: 0}
        changing = [arena for arena, nbytes in needed.items() if not arena.suits(nbytes, at_least=at_least)]
        if changing:
            self.forget()  # copies of layers hold views of the arenas
        for arena in changing:  # all before any is made: old and new ones may not fit together
            arena.release()
        for arena in changing:
            if needed[arena] or arena is self.planned.arena:
                arena.make(needed[arena])

    def arena_addresses(self) -> set[int]:
        """Return where arenas lie: a tensor there must be copied to outlive its slot."""
        return {self.planned.arena.address, self.spare.arena.address, self.copies.unpacked.address} - {0}

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
                self.copies.unbind()
                memory.grow(needed)
            memory.prepare(slot)
        slot.opened = True
        memory.open_gradients(slot)
        self.copies.begin_unpacking(slot)

    def _share(self, slot: Slot, present: Slot) -> None:
        """Let a slot have the weights of the present one."""
        slot.weights.shares = True
        for layer in slot.layers:
            upload = present.weights.uploads[layer.index]
            self._baton.wait(upload.enqueued.then)
            slot.weights.uploads[layer.index] = copy.copy(upload)  # which keeps the memory as long as this slot
            slot.report_upload(layer, upload.end)

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
            self._baton.wait_for_event(event)
        self.device.compute.wait(event)

    def wait_for_upload(self, slot: Slot, layer: HostLayer) -> None:
        """Have the host wait until the upload of ``layer``, which is enqueued, is over."""
        if not (end := slot.weights.uploads[layer.index].end).done():
            self._baton.wait_for_event(end)

    def wait_for_copies(self) -> None:
        """Have the compute stream wait for the last call's copies to the host, so that one call's take memory."""
        before, self.in_flight.copying = self.in_flight.copying, []
        for event in before:
            self.follow(event)

    def compute(
        self, slot: Slot, layer: HostLayer, call: int, microbatch: int, kind: str, code: Callable[[], T], *,
        keeps_baton: bool,
    ) -> T:  # fmt: skip
        """Run ``code`` of a layer on a core, and record when it begins and ends.

        The baton is given up meanwhile, unless it ``keeps_baton``, which it does in any case where others would change
        the process's state. While torch compiles, it saves and restores generators that others draw from.
        """
        device, compute, runner = self.device, self.device.compute, self._baton.runner
        keeps_baton = keeps_baton or layer.seen.caches_parametrizations or changes(layer.name)
        gives_up = not keeps_baton and device.backward_needs_interpreter and layer.seen.launch_seconds >= LONG_S
        name = device.named(kind, "slot", slot.index, layer.name, "of", microbatch)
        with self._baton.computing() if gives_up else NOTHING, device.acquire_core():
            start = compute.record(timed=True)
            runner.inside = layer.name, kind
            try:
                with name, compute.running():
                    result = code()
            finally:
                runner.inside = None
            end = compute.record(timed=True)
        runner.scope.check()
        slot.spec.recorder.add(
            kind, device.index, start, end, microbatch, 0, (slot.index, slot.phase, call, layer.name)
        )
        return result

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
        self.copies.end_unpacking(slot)
        if not pending:
            compute.poison(memory.arena.bytes_of(place.weights.start, place.weights.end))
            memory.retire(place, compute)
        self.sender.free_place(slot, memory, pending)
        memory.proceed()
        if memory is self.planned:
            self._prepare_next()

    # -- the end ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the copies of layers, which refer to the arenas. Nothing runs."""
        self.copies.forget()
        self.in_flight.clear()

    def stop_uploads(self) -> None:
        """After a failure, drop the uploads to come. None is enqueued any more, by the optimizer's thread either."""
        for memory in (self.planned, self.spare):
            memory.forget()

    def abandon(self) -> None:
        """Reset the worker after a failure, when its thread and the device are at rest."""
        self.tickets.clear()
        self.room.taken = 0
        for memory in (self.planned, self.spare):
            memory.arena.abandon()
            memory.last = None
        self.forget()

    def close(self) -> None:
        """Free the memory. The thread has ended."""
        self.forget()
        for memory in (self.planned, self.spare):
            memory.arena.release()
