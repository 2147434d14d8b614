"""Slots and turns: who may run what, where, and after whom.

    slot i of the global sequence ──► worker i mod N                                         [1]
    a worker opens its next slot when the one before it is closed                            [2]
    ... and when the same stage of the round before is closed: it adds to the same sums      [3]
    an open slot serves its microbatches in order                                            [4]
    the last microbatch to leave a slot closes it; if all left before it was open, it is     [5]
    closed as it opens
    the next microbatch may bring what it needs, for the worker's next slot, too             [6]

The order (slot, microbatch) is total, and a microbatch holds at most the turn that it is running, so there is always
somebody who may go on: the lowest. A microbatch that skips a stage leaves it without having entered it.

`PlannedSlots` hands out the slots of a plan; `SlotsOnArrival` (`slots_on_arrival`) makes one of every call as it comes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.sync import CancelScope, Waiter

if TYPE_CHECKING:
    from lightning_roundpipe.devices import Event
    from lightning_roundpipe.planning.costs import Phase
    from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
    from lightning_roundpipe.runtime.memory.host_layer import HostLayer
    from lightning_roundpipe.runtime.optimizer.grad_readiness import GradReadiness


class Slot:
    """One stage of one round on one worker.

    Attributes:
        index: position in the global sequence.
        recorder: of the step that it belongs to.
        layers: what has to be uploaded, each once.
        predecessor: the same stage of the round before, if any.
        sums: host gradients of the calls whose backward runs here, by call.
        arena: which of the worker's arenas holds it, once uploaded.
        cancel_scope: of its step.
        version: the number of the update that its weights must have seen.
        uploaded: when each layer's weights are in the arena, once the upload has been enqueued.
        awaited: woken when that is so, for layers whose version was not there yet.
        cancelled: whether it will not come, so that nothing more is uploaded for it.
        readiness: told of each upload, by a step that expects them.
    """

    def __init__(
        self,
        index: int,
        worker: int,
        round_: int,
        phase: Phase,
        calls: range,
        layers: Sequence[HostLayer],
        sums: dict[int, HostGradSums],
        microbatches: Sequence[int],
        predecessor: Slot | None = None,
        version: int = 0,
        recorder: Recorder | None = None,
        cancel_scope: CancelScope | None = None,
    ) -> None:
        self.index = index
        self.recorder = recorder or Recorder()
        self.cancel_scope = cancel_scope or CancelScope()
        self.worker = worker
        self.round = round_
        self.phase = phase
        self.calls = calls
        self.layers = layers
        self.sums = sums
        self.microbatches = microbatches
        self.predecessor = predecessor
        self.version = version
        self.arena: int | None = None
        self.uploaded: dict[int, Event] = {}
        self.awaited: dict[int, Waiter] = {}
        self.cancelled = False
        self.uploading = threading.Lock()
        self.readiness: GradReadiness | None = None
        self.opened = False
        self.closed = False
        self.absent: Callable[[int], None] | None = None
        """Told of a microbatch that gets the turn and is not there."""
        self._successor: Waiter | None = None
        self._position = 0
        self._left: set[int] = set()
        self._waiting: dict[int, Waiter] = {}
        self._approaching: dict[int, Waiter] = {}
        self._near = False
        self._behind: weakref.ref[Slot] | None = None  # or rounds would hang in a circle
        self._lock = threading.Lock()

    def open(self) -> bool:
        """Let the first microbatch in [4]. True if all have left already and the slot is to be closed [5]."""
        with self._lock:
            self.opened = True
            self._wake_next()
            over = self._position == len(self.microbatches)
        self._lead()
        return over

    def enter(self, microbatch: int, cancel_scope: CancelScope) -> None:
        """Wait for the turn of ``microbatch``."""
        with self._lock:
            if self.is_turn_of(microbatch):
                return
            waiter = self._waiting[microbatch] = Waiter()
        cancel_scope.wait(waiter)

    def leave(self, microbatch: int) -> bool:
        """Give the turn on. True if that was the last microbatch and the slot is to be closed [5].

        A slot that all have left before it was open is closed by who opens it.
        """
        with self._lock:
            self._left.add(microbatch)
            while self._position < len(self.microbatches) and self.microbatches[self._position] in self._left:
                self._position += 1
            self._wake_next()
            over = self.opened and self._position == len(self.microbatches)
        self._lead()
        return over

    def approach(self, microbatch: int, cancel_scope: CancelScope) -> None:
        """Wait until no more than one microbatch has its turn before ``microbatch`` [6]."""
        with self._lock:
            if self._may_approach(microbatch):
                return
            waiter = self._approaching[microbatch] = Waiter()
        cancel_scope.wait(waiter)

    def precede(self, behind: Slot) -> None:
        """``behind`` is the next slot of the same worker."""
        with self._lock:
            self._behind = weakref.ref(behind)
        self._lead()

    def _lead(self) -> None:
        """While the last microbatch runs here, the first one of the slot behind may bring what it needs."""
        with self._lock:
            led = self._behind if self.opened and self._position >= len(self.microbatches) - 1 else None
        if led is not None and (behind := led()) is not None:
            with behind._lock:
                behind._near = True
                behind._wake_approaching()

    def close(self) -> None:
        """Let the same stage of the next round open."""
        with self._lock:
            self.closed = True
            if self._successor is not None:
                self._successor.wake()

    def wait_for_predecessor(self, cancel_scope: CancelScope) -> None:
        """Wait until the round before has left its sums on their way to the host [3]."""
        if self.predecessor is not None:
            self.predecessor._wait_closed(cancel_scope)

    def _wait_closed(self, cancel_scope: CancelScope) -> None:
        with self._lock:
            if self.closed:
                return
            waiter = self._successor = Waiter()
        cancel_scope.wait(waiter)

    def is_turn_of(self, microbatch: int) -> bool:
        """Whether ``microbatch`` may run, or runs."""
        return (
            self.opened and self._position < len(self.microbatches) and self.microbatches[self._position] == microbatch
        )

    def _may_approach(self, microbatch: int) -> bool:
        return microbatch in self.microbatches[: self._position + 2 if self.opened else self._position + self._near]

    def _wake_approaching(self) -> None:
        for microbatch in [m for m in self._approaching if self._may_approach(m)]:
            self._approaching.pop(microbatch).wake()

    def _wake_next(self) -> None:
        self._wake_approaching()
        if self.opened and self._position < len(self.microbatches):
            waiter = self._waiting.pop(self.microbatches[self._position], None)
            if waiter is not None:
                waiter.wake()
            elif self.absent is not None:
                self.absent(self.microbatches[self._position])


class Slots(Protocol):
    """How a microbatch gets at its slots."""

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        """The slot of a forward call, in its turn."""

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        """The slot of a call's recomputation and backward, in its turn."""

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        """The slot of a call whose forward and backward run without anything between them, to keep its graph."""

    def keeps_graph(self, call: int) -> bool:
        """Whether the slot that a fused call ran in is open still, so that its graph finds its weights."""

    def foresee(self, microbatch: int, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None) -> None:
        """What will probably be asked for next."""

    def upcoming(self, microbatch: int, call: int, *, backward: bool) -> Slot | None:
        """The slot where a call is going to run, if that is known."""

    def approach(self, microbatch: int, slot: Slot) -> None:
        """Give up the turns in front of ``slot``, and wait until ``microbatch`` is the next one there at the latest."""

    def is_over(self, slot: Slot, call: int) -> bool:
        """Whether ``call`` is a microbatch's last one in the slot."""

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        """The call is done."""

    def finish(self, microbatch: int) -> None:
        """The microbatch makes no more calls: its turns go to the others."""


class Stages(Protocol):
    """Which of a round's slots are whose: a plan, or what is made of one."""

    @property
    def forward(self) -> Sequence[object]: ...

    @property
    def recompute_ahead(self) -> bool: ...

    @property
    def stage_of_forward(self) -> Sequence[int] | Mapping[int, int]: ...

    @property
    def stage_of_backward(self) -> Sequence[int] | Mapping[int, int]: ...


class PlannedSlots:
    """The slots of one step under a plan, made in order when the step begins.

    Args:
        rounds: the slots, by round and stage.
        plan: whose stages they are.
        cancel_scope: of the step.
        close: closes a slot that all have left.
        ahead: told of a backward slot and the microbatch that has its turn, when that is not there, or comes further.
    """

    def __init__(
        self,
        rounds: list[list[Slot]],
        plan: Stages,
        cancel_scope: CancelScope,
        close: Callable[[Slot], None],
        ahead: Callable[[Slot, int], None] | None = None,
    ) -> None:
        self.rounds = rounds
        self._forward = plan.stage_of_forward
        self._backward = plan.stage_of_backward
        self._cancel_scope = cancel_scope
        self._close = close
        self._mine = {m: slots for slots in rounds for m in slots[0].microbatches}
        self._next = dict.fromkeys(self._mine, 0)
        self._reached = dict.fromkeys(self._mine, 0)
        self._fused = len(plan.forward)
        self._ahead = ahead if plan.recompute_ahead else None
        if self._ahead is not None:
            for slot in (slot for slots in rounds for slot in slots if slot.phase == "backward"):
                slot.absent = functools.partial(self._ahead, slot)

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        return self._enter(microbatch, self._forward[call])

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        return self._enter(microbatch, self._backward[call])

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        return self._enter(microbatch, self._forward[call])

    def keeps_graph(self, call: int) -> bool:
        return self._forward[call] == self._backward[call]

    def foresee(self, microbatch: int, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None) -> None:
        pass  # the plan has said it

    def upcoming(self, microbatch: int, call: int, *, backward: bool) -> Slot | None:
        return self._mine[microbatch][(self._backward if backward else self._forward)[call]]

    def approach(self, microbatch: int, slot: Slot) -> None:
        self._leave_until(microbatch, self._mine[microbatch].index(slot))
        slot.approach(microbatch, self._cancel_scope)

    def _enter(self, microbatch: int, position: int) -> Slot:
        if self._ahead is not None and self._reached[microbatch] < position <= self._fused:
            self._reached[microbatch] = position
            for later in self._mine[microbatch][self._fused + 1 :]:
                if later.is_turn_of(microbatch):
                    self._ahead(later, microbatch)
        self._leave_until(microbatch, position)
        slot = self._mine[microbatch][position]
        slot.enter(microbatch, self._cancel_scope)
        return slot

    def is_over(self, slot: Slot, call: int) -> bool:
        # A forward slot is left with its last call; in a fused slot the loss and the backward are still to come, and a
        # backward slot ends with its first call.
        return slot.phase != "fused" and call == (slot.calls[-1] if slot.phase == "forward" else slot.calls[0])

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        if self.is_over(slot, call):
            self._leave_until(microbatch, self._mine[microbatch].index(slot) + 1)

    def finish(self, microbatch: int) -> None:
        self._leave_until(microbatch, len(self._mine[microbatch]))

    def _leave_until(self, microbatch: int, position: int) -> None:
        while self._next[microbatch] < position:
            slot = self._mine[microbatch][self._next[microbatch]]
            self._next[microbatch] += 1
            if slot.leave(microbatch):
                self._close(slot)
