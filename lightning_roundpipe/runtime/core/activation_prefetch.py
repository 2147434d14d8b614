"""What a call needs from elsewhere is on its way before the call's turn has come.

Else every microbatch would wait, in its turn and with its worker idle, for a copy down and another one up. So:

    what a call needs goes to the host as soon as it is known ── [1]
    and on to the worker when the microbatch is the next one there, while the one before it computes ── [2]
    within a stage, the next call's saved inputs follow while this one runs backward ── [3]

One microbatch ahead and no more, or boundary tensors would pile up on workers that are behind; and only as far as the
memory budget leaves room beside what the plan needs. What finds none is brought in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.turns import Slot, Slots
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor


class ActivationPrefetcher:
    """For one microbatch.

    Args:
        microbatch: its number.
        workers: all of them.
        slots: where it is going to run.
        activations: its tensors.
    """

    def __init__(self, microbatch: int, workers: Sequence[Worker], slots: Slots, activations: ActivationStore) -> None:
        self._microbatch = microbatch
        self._workers = workers
        self._slots = slots
        self._activations = activations
        self._slot: Slot | None = None

    def inputs(self, call: Call, locate: Callable[[Tensor], Device | None]) -> None:
        """In front of a forward call: its inputs. Waits until the microbatch is the next one at the latest."""
        slot = self._slots.upcoming(self._microbatch, call.index, backward=False)
        if slot is None:
            return
        device = self._workers[slot.worker].device
        tensors = {i: t for i, t in enumerate(call.leaves) if isinstance(t, Tensor)}
        elsewhere = {i: home for i, t in tensors.items() if (home := locate(t)) is not device}
        copies = [call.saved.get(i) or self._activations.save(tensors[i], home) for i, home in elsewhere.items()]  # [1]
        with noted(lambda: FaultPlace(call.layer.title, "forward", self._microbatch, slot, device)):
            self._bring(slot, copies)

    def gradients(self, recorded: RecordedCall) -> list[HostTensor]:
        """In front of a backward call: what it starts from, and the gradients of its outputs.

        Returns:
            Copies that are this call's alone.
        """
        slot = self._slots.upcoming(self._microbatch, recorded.call, backward=True)
        if slot is None:
            return []
        device = self._workers[slot.worker].device
        sent = self._send(recorded, device)
        with noted(lambda: FaultPlace(recorded.layer.title, "backward", self._microbatch, slot, device)):
            self._bring(slot, [*_starts_from(recorded), *sent])
        return sent

    def following(self, slot: Slot, tape: Sequence[RecordedCall]) -> None:
        """While a backward call runs in ``slot``: what the next one there starts from [3]."""
        recorded = tape[-1] if tape and slot is self._slot else None
        if recorded is not None and recorded.call in slot.calls:
            self._bring_if_room(slot, _starts_from(recorded))

    def saved(self, recorded: RecordedCall) -> None:
        """``recorded`` starts from copies, which other recorded calls may share."""
        for copy in _saved(recorded):
            copy.wanted += 1

    def done(self, recorded: RecordedCall, sent: Sequence[HostTensor]) -> None:
        """``recorded`` is off the tape: what no other one starts from is given back."""
        saved = _saved(recorded)
        for copy in saved:
            copy.wanted -= 1
        self._activations.drop([*sent, *(copy for copy in saved if copy.wanted <= 0)])

    def after(self, slot: Slot, call: int, tape: Sequence[RecordedCall] = ()) -> None:
        """The call is done: give up the turn if it was the stage's last one, and what was brought for it.

        Gradients for the next call on the ``tape`` go before that: behind what the next microbatch computes they would
        wait for it, too.
        """
        if tape and not tape[-1].hooks:
            following = self._slots.upcoming(self._microbatch, tape[-1].call, backward=True)
            if following is not None:
                self._send(tape[-1], self._workers[following.worker].device)
        if slot is self._slot and self._slots.is_over(slot, call):
            # First, because in the next slot its worker may begin to recompute ahead. What was recomputed ahead here
            # may have needed nothing more, so that the microbatch never moved to this worker.
            self._activations.leave(self._workers[slot.worker].device)
        self._slots.after(self._microbatch, slot, call)

    def _send(self, recorded: RecordedCall, device: Device) -> list[HostTensor]:
        """The gradients of its outputs that are not on ``device`` [1]."""
        parts = [(part, home) for grads in recorded.grads for part, home in grads if home is not device]
        return [self._activations.send(part, home) for part, home in parts]

    def _bring(self, slot: Slot, copies: Sequence[HostTensor]) -> None:
        if slot is not self._slot:
            self._activations.leave()
            self._slot = slot
        if copies:
            self._slots.approach(self._microbatch, slot)  # [2]
            self._bring_if_room(slot, copies)

    def _bring_if_room(self, slot: Slot, copies: Sequence[HostTensor]) -> None:
        worker = self._workers[slot.worker]
        for copy in copies:
            self._activations.bring(worker.device, copy, worker.room)


def _saved(recorded: RecordedCall) -> list[HostTensor]:
    chosen = recorded.choices.packed if recorded.choices is not None else None
    return [copy for copy in (*recorded.leaves, chosen) if isinstance(copy, HostTensor)]


def _starts_from(recorded: RecordedCall) -> list[HostTensor]:
    """What has to be there for its backward beside gradients."""
    return [] if recorded.graph is not None or recorded.recomputed is not None else _saved(recorded)
