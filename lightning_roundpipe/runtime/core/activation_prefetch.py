"""Prefetch of activations and gradients: copies start before the turn of the call that needs them.

Without prefetch, every microbatch would wait during its turn, its worker idle, for a download and then an upload.

    download to the host as soon as it is known that a call needs the tensor ── [1]
    upload to the worker when the microbatch is next in line there, while the one before it computes ── [2]
    within a stage, upload the next call's saved inputs while this call runs backward ── [3]

Only one microbatch is prefetched per worker, or boundary tensors would pile up on workers that are behind. Prefetched
tensors take only the memory that the budget leaves beside the plan's needs; the others are uploaded in their turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call
from lightning_roundpipe.runtime.core.offloading import Departure
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.turns import Slot, Slots
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor


class ActivationPrefetcher:
    """Prefetches what one microbatch's next calls need.

    Args:
        microbatch: number of the microbatch.
        workers: all workers.
        slots: tells in which slot a call will run.
        activations: the microbatch's host tensors and their copies on workers.
        offloads: whether inputs of calls leave the worker that the microbatch leaves; see `offloading`.

    Attributes:
        offloads: see above.
        departs: whether calls of other microbatches wait until this one's tensors have left; not in evaluation.
    """

    def __init__(
        self, microbatch: int, workers: Sequence[Worker], slots: Slots, activations: ActivationStore, *, offloads: bool
    ) -> None:
        self._microbatch = microbatch
        self._workers = workers
        self._slots = slots
        self._activations = activations
        self.offloads, self.departs = offloads, True
        self._slot: Slot | None = None
        self._departure: Departure | None = None
        """From the slot that the microbatch has left, until it is known which tensors it needs in the next one."""

    def inputs(self, call: Call, homes: Mapping[int, Device | None], stay: Collection[int] = ()) -> None:
        """Prefetch the inputs of a forward call.

        What has to be uploaded is uploaded once the microbatch runs, or is next in line, in the call's slot.

        Args:
            call: the call, which asks for its turn next.
            homes: the device that holds each tensor among its leaves, by position; None for the host.
            stay: positions of those that stay where they are; see `Call.staying`.
        """
        slot = self._slots.upcoming(self._microbatch, call.index, backward=False)
        if slot is None:
            self.end()
            return
        device = self._workers[slot.worker].device
        save = self._activations.save
        copies = {  # [1]
            i: call.saved.get(i) or save(call.leaves[i], at) for i, at in homes.items() if at is not device
        }
        if self.offloads:
            for i, copy in copies.items():
                if (home := homes[i]) is not None and i not in stay:
                    self._activations.offload(call.leaves[i], copy, home)
        self.end()
        self._bring(slot, [*copies.values()])

    def gradients(self, recorded: RecordedCall) -> list[HostTensor]:
        """Prefetch what a backward call needs: its saved inputs and the gradients of its outputs, as `inputs` does.

        Returns:
            The host copies of the gradients, which no other call shares; pass them to `done`.
        """
        slot = self._slots.upcoming(self._microbatch, recorded.call, backward=True)
        if slot is None:
            self.end()
            return []
        device = self._workers[slot.worker].device
        if slot is not self._slot and self._slot is not None and self._slot.phase == "fused":
            self._pass_on(self._slot)  # which has no `after`
        sent = self._send(recorded, device)
        self._depart(sent)
        self._bring(slot, [*_starts_from(recorded), *sent])
        return sent

    def following(self, slot: Slot, tape: Sequence[RecordedCall]) -> None:
        """Prefetch the saved inputs of the next call on the ``tape`` if it runs in ``slot`` too [3].

        Called just before a backward call is handed to the worker.
        """
        recorded = tape[-1] if tape and slot is self._slot else None
        if recorded is not None and recorded.call in slot.calls:
            self._bring_if_room(slot, _starts_from(recorded))

    def saved(self, recorded: RecordedCall) -> None:
        """Count ``recorded`` as a user of its saved inputs, which other recorded calls may share."""
        for copy in _saved(recorded):
            copy.wanted += 1

    def done(self, recorded: RecordedCall, sent: Sequence[HostTensor]) -> None:
        """Release what ``recorded`` needed for its backward, except saved inputs that other recorded calls share.

        Args:
            recorded: a call that has left the tape.
            sent: the host copies that `gradients` returned for it.
        """
        saved = _saved(recorded)
        for copy in saved:
            copy.wanted -= 1
        self._activations.drop([*sent, *(copy for copy in saved if copy.wanted <= 0)])

    def after(self, slot: Slot, call: int, tape: Sequence[RecordedCall] = ()) -> None:
        """Finish a call. If it is the microbatch's last in ``slot``, drop what was uploaded there and pass the turn.

        First send the gradients that the next call on the ``tape`` needs, unless hooks have yet to see them: a download
        that is enqueued after the turn has passed would wait for the compute of the next microbatch.
        """
        if tape and not tape[-1].hooks:
            following = self._slots.upcoming(self._microbatch, tape[-1].call, backward=True)
            if following is not None:
                self._send(tape[-1], self._workers[following.worker].device)
        if not self._slots.is_over(slot, call):
            return
        if slot is self._slot:
            # Before the turn passes: from then on, the worker of the next slot may recompute ahead and upload tensors
            # that must stay. The device is named because after a recomputation ahead there may have been nothing left
            # to upload, so that the store never moved to this device.
            self._activations.leave(self._workers[slot.worker].device)
            self._slot = None
        leaves = tape or self.offloads
        if leaves and self._slots.upcoming(self._microbatch, call, backward=False) is not None:
            self._pass_on(slot)
        self._slots.after(self._microbatch, slot, call)

    def end(self) -> None:
        """Note that no call of the microbatch is foreseen, or that it makes no more: others need not wait for one."""
        self._depart(())

    def _pass_on(self, slot: Slot) -> None:
        """Begin the microbatch's departure from the worker of ``slot``, before its turn passes."""
        self._depart(())
        if self.departs and len(self._workers) > 1:  # else the next stage is on the same worker, and nothing leaves
            self._departure = self._workers[slot.worker].departures.begin()

    def _depart(self, copies: Sequence[HostTensor]) -> None:
        """Let the departure be over when ``copies`` of what the next call needs are done."""
        if self._departure is not None:
            departure, self._departure = self._departure, None
            departure.leave(copy.ready for copy in copies if copy.ready is not None)

    def _send(self, recorded: RecordedCall, device: Device) -> list[HostTensor]:
        """Start downloading the output gradients that are not on ``device`` [1], and return their host copies.

        From here on, the gradients are on the host only.
        """
        sent = []
        for grads in recorded.grads:
            for n, (part, home) in enumerate(grads):
                if home is not device:
                    sent.append(self._activations.send(part, home))
                    grads[n] = sent[-1].tensor, None
        return sent

    def _bring(self, slot: Slot, copies: Sequence[HostTensor]) -> None:
        if slot is not self._slot:
            if self._slot is not None:  # the fused slot, or one that the microbatch had no turn in
                self._activations.leave()
            self._slot = slot
        if copies:
            self._slots.approach(self._microbatch, slot, lambda: self._bring_ahead(slot, copies))  # [2]

    def _bring_ahead(self, slot: Slot, copies: Sequence[HostTensor]) -> None:
        """Start uploading ``copies`` while the microbatch's own thread waits for its turn."""
        try:
            self._bring_if_room(slot, copies)
        except Exception:
            return  # this thread may be another microbatch's; the call brings what is not there, and reports the error

    def _bring_if_room(self, slot: Slot, copies: Sequence[HostTensor]) -> None:
        worker = self._workers[slot.worker]
        self._activations.bring(worker.device, copies, worker.room)


def _saved(recorded: RecordedCall) -> list[HostTensor]:
    chosen = recorded.choices.packed if recorded.choices is not None else None
    return [copy for copy in (*recorded.leaves, chosen) if type(copy) is HostTensor]


def _starts_from(recorded: RecordedCall) -> list[HostTensor]:
    """Return the host tensors that the recomputation of ``recorded`` reads; none if its graph exists already."""
    return [] if recorded.graph is not None or recorded.recomputed is not None else _saved(recorded)
