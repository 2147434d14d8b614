"""Slots and turns: which microbatch may run which stage on which worker, and in what order.

    slot i of the global sequence runs on worker i mod N                                     [1]
    a worker opens its next slot when the one before is closed                               [2]
    ... and when the same stage of the round before is closed: it adds to the same sums      [3]
    an open slot serves its microbatches in order                                            [4]
    the last microbatch to leave a slot closes it; if all left before it opened, it is       [5]
    closed as soon as it opens
    what the next microbatch needs is uploaded by the thread that makes it the next one,     [6]
    also for the worker's next slot; its own thread sleeps until it has the turn
    rounds of one microbatch run side by side: instead of [3], the gradients of each call    [7]
    leave behind those of the slot before, and a microbatch begins a call when the one
    before has begun the next one

Turns are totally ordered by (slot, microbatch), and a microbatch holds no turn but the one it is running. So the lowest
turn can always proceed, and there is no deadlock. A microbatch that skips a stage leaves its slot without entering it.
Calls and the user code between them see microbatches in order, side by side too: running means and counters depend on
the order.

`PlannedSlots` hands out the slots of a plan; `SlotsOnArrival` (`slots_on_arrival`) makes a slot for each call.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.sync import CancelScope

if TYPE_CHECKING:
    from lightning_roundpipe.devices import Event
    from lightning_roundpipe.planning.costs import Phase
    from lightning_roundpipe.runtime.core.arenas import Place
    from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
    from lightning_roundpipe.runtime.memory.host_layer import HostLayer
    from lightning_roundpipe.runtime.optimizer.grad_readiness import GradReadiness


class Slot:
    """One stage of one round on one worker.

    The class is large because it holds both halves of a stage's life: the turns of its microbatches, under one lock,
    and the state of its uploads. The worker, the microbatches and the optimizer's thread all meet in it.

    Attributes:
        index: position in the global sequence.
        recorder: the step's recorder.
        worker: number of the worker.
        round: number of the round; negative for a slot that is in no plan.
        phase: phase of the stage.
        calls: the calls of the stage, by position in the trace.
        layers: the layers to upload, each once.
        sums: host sums of the calls whose backward runs here, by call.
        microbatches: numbers of the microbatches, in the order of their turns.
        predecessor: the slot that adds to the same sums before this one, if any.
        side_by_side: whether the slot opens without waiting for its predecessor [7].
        unpacks_once: whether packed weights are unpacked once for all its microbatches.
        cancel_scope: the step's cancel scope.
        version: version of the weights that uploads must read.
        place: the slot's part of the worker's arena; None before that is prepared.
        uploaded: end of each layer's upload, by the layer's index, once the upload is enqueued.
        awaited: woken when the upload is enqueued, for layers whose version was not published at first.
        cancelled: whether the slot will not be opened, so that nothing more is uploaded for it.
        uploading: lock held while an upload by the optimizer's thread is enqueued, or the slot is cancelled.
        readiness: told of each upload, if the optimizer waits for the end of uploads.
        opened: whether microbatches may enter.
        closed: whether all microbatches have left and the sums are on their way to the host.
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
        *,
        side_by_side: bool = False,
        unpacks_once: bool = False,
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
        self.side_by_side = side_by_side
        self.unpacks_once = unpacks_once
        self.version = version
        self.place: Place | None = None
        self.uploaded: dict[int, Event] = {}
        self.awaited: dict[int, Waiter] = {}
        self.cancelled = False
        self.uploading = threading.Lock()
        self.readiness: GradReadiness | None = None
        self.opened = False
        self.closed = False
        self.absent: Callable[[int], None] | None = None
        """Called with a microbatch that gets the turn but is not waiting for it."""
        self._sent: set[HostGradSums] = set()
        """Those to which the worker's downloads have begun."""
        self._to_send: dict[HostGradSums | None, Waiter] = {}
        """Woken when they are sent, or the slot is closed: the next slot waits to add to them. None: to all."""
        self._position = 0
        """Position of the microbatch that has the turn, or will have it when the slot opens."""
        self._end = len(microbatches)
        self._left: set[int] = set()
        """Those behind the position that have given up their turns."""
        self._waiting: dict[int, Waiter] = {}
        self._approaching: dict[int, Callable[[], None]] = {}
        """By microbatch: uploads what it needs."""
        self._uploading: set[int] = set()
        """The microbatches for which that runs now, on another thread than their own."""
        self._invited = 0
        """How many of the first microbatches may approach."""
        self._near = False
        """Whether the last microbatch runs in the worker's slot before, or has run there."""
        self._behind: weakref.ref[Slot] | None = None  # weak: slots of later rounds refer back by `predecessor`
        self._lock = threading.Lock()

    def open(self) -> bool:
        """Let the first microbatch enter [4]. Return True if all have left already: the caller closes the slot [5]."""
        with self._lock:
            self.opened = True
            invited = self._invite()
            self._wake_next()
            over, behind = self._position == self._end, self._led()
        if invited:
            self._upload(invited)
        if behind is not None:
            behind.come_near()
        return over

    def enter(self, microbatch: int, cancel_scope: CancelScope) -> None:
        """Wait until it is the turn of ``microbatch``."""
        with self._lock:
            if self.is_turn_of(microbatch) and microbatch not in self._uploading:
                return
            waiter = self._waiting[microbatch] = Waiter()
        try:
            cancel_scope.wait(waiter)
        except BaseException:
            self._approaching.pop(microbatch, None)  # it refers to the microbatch, which refers to its slots
            raise

    def leave(self, microbatch: int) -> bool:
        """Pass the turn on, or give it up in advance. Return True if the caller must close the slot [5].

        That is so if ``microbatch`` was the last one and the slot is open. If it is not open yet, the thread that opens
        it closes it.
        """
        with self._lock:
            if self.microbatches[self._position] != microbatch:
                self._left.add(microbatch)
                return False
            self._position += 1
            while self._position < self._end and self.microbatches[self._position] in self._left:
                self._position += 1
            invited = self._invite()
            self._wake_next()
            over, behind = self.opened and self._position == self._end, self._led()
        if invited:
            self._upload(invited)
        if behind is not None:
            behind.come_near()
        return over

    def approach(self, microbatch: int, upload: Callable[[], None]) -> None:
        """Call ``upload`` as soon as at most one microbatch has its turn before ``microbatch`` [6].

        The calling thread does so if that is the case already, else the thread that passes the turn on. So ``upload``
        must not block, and the caller's next step is `enter`, which returns when ``upload`` is over.
        """
        with self._lock:
            if microbatch not in self.microbatches[: self._invited]:
                self._approaching[microbatch] = upload
                return
        upload()

    def precede(self, behind: Slot) -> None:
        """Set the next slot of the same worker."""
        with self._lock:
            self._behind = weakref.ref(behind)
            led = self._led()
        if led is not None:
            led.come_near()

    def _led(self) -> Slot | None:
        """Return the worker's next slot if the last microbatch runs here, so that the first one may approach there."""
        last = self.opened and self._position >= self._end - 1
        return self._behind() if last and self._behind is not None else None

    def come_near(self) -> None:
        """Let the first microbatch approach: the last one runs in the worker's slot before."""
        with self._lock:
            self._near = True
            invited = self._invite()
        if invited:
            self._upload(invited)

    def _invite(self) -> list[tuple[int, Callable[[], None]]]:
        """Let the microbatch that has the turn approach, and in an open slot the next one.

        Returns:
            What the caller passes to `_upload`, without the lock.
        """
        end, invited = self._position + (2 if self.opened else self._near), []
        while self._invited < end and self._invited < self._end:
            microbatch = self.microbatches[self._invited]
            self._invited += 1
            if (upload := self._approaching.pop(microbatch, None)) is not None:
                self._uploading.add(microbatch)
                invited.append((microbatch, upload))
        return invited

    def _upload(self, invited: list[tuple[int, Callable[[], None]]]) -> None:
        """Upload what invited microbatches need, and let one enter that has got its turn meanwhile."""
        for microbatch, upload in invited:
            try:
                upload()
            finally:
                with self._lock:
                    self._uploading.remove(microbatch)
                    if self.is_turn_of(microbatch) and (waiter := self._waiting.pop(microbatch, None)) is not None:
                        waiter.wake()

    def close(self) -> None:
        """Mark the slot as closed, so that the same stage of the next round may open."""
        with self._lock:
            self.closed = True
            waiters, self._to_send = [*self._to_send.values()], {}
        for waiter in waiters:
            waiter.wake()

    def wait_for_predecessor(self, cancel_scope: CancelScope) -> None:
        """Wait until the downloads of the predecessor's sums have been enqueued, as it is closed [3]."""
        if self.predecessor is not None:
            self.predecessor.wait_until_closed(cancel_scope)

    def wait_until_closed(self, cancel_scope: CancelScope) -> None:
        """Wait until the slot is closed. At most one thread waits at a time."""
        self._wait_until_sent(None, cancel_scope)

    def sent(self, sums: HostGradSums) -> None:
        """Note that the slot's download to ``sums`` has begun, and that the next slot's may follow it, part by part."""
        with self._lock:
            self._sent.add(sums)
            waiter = self._to_send.pop(sums, None)
        if waiter is not None:
            waiter.wake()

    def is_next_in(self, sums: HostGradSums) -> bool:
        """Return whether all slots that add to ``sums`` before this one have done so, or never will [7].

        A slot that has no gradient for them is known not to add to them only when it is closed.
        """
        before = self.predecessor
        while before is not None and before.closed and sums not in before._sent:
            before = before.predecessor
        return before is None or sums in before._sent

    def wait_to_add_to(self, sums: HostGradSums, cancel_scope: CancelScope) -> None:
        """Wait until the slot `is_next_in` ``sums``."""
        before = self.predecessor
        while before is not None:
            before._wait_until_sent(sums, cancel_scope)
            before = None if sums in before._sent else before.predecessor

    def _wait_until_sent(self, sums: HostGradSums | None, cancel_scope: CancelScope) -> None:
        """Wait until the download to ``sums`` has begun, or never will; None: until the slot is closed."""
        with self._lock:
            if self.closed or sums in self._sent:
                return
            waiter = self._to_send[sums] = Waiter()
        cancel_scope.wait(waiter)

    def is_turn_of(self, microbatch: int) -> bool:
        """Return whether ``microbatch`` has the turn."""
        position = self._position  # once: other threads, without the lock, may look while it grows
        return self.opened and position < self._end and self.microbatches[position] == microbatch

    def _wake_next(self) -> None:
        """Wake the microbatch that has the turn, unless `_upload` will."""
        if not self.opened or self._position == self._end:
            return
        microbatch = self.microbatches[self._position]
        if microbatch in self._uploading:
            return
        if (waiter := self._waiting.pop(microbatch, None)) is not None:
            waiter.wake()
        elif self.absent is not None:
            self.absent(microbatch)


class Slots(Protocol):
    """The interface through which a microbatch gets its slots and turns. Its kinds derive from it."""

    foresees: bool = False
    """Whether `foresee` does something. A plan's slots are known without that."""

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        """Wait for the turn of a forward call and return its slot."""

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        """Wait for the turn of a call's recomputation and backward, and return its slot."""

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        """Wait for the turn of a call that keeps its graph, and return the slot of its forward and backward."""

    def keeps_graph(self, call: int) -> bool:
        """Return whether a call's forward slot stays open for its backward, so that its graph finds its weights."""
        return False

    def foresee(self, microbatch: int, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None) -> None:
        """Announce a call that will probably come next."""
        return

    def upcoming(self, microbatch: int, call: int, *, backward: bool) -> Slot | None:
        """Return the slot that a call will run in; None if unknown."""
        return None

    def approach(self, microbatch: int, slot: Slot, upload: Callable[[], None]) -> None:
        """Give up the turns before ``slot``, and call ``upload`` once ``microbatch`` has the turn there or is next.

        Another thread may call it later, see `Slot.approach`. The caller's next step is to enter ``slot``.
        """
        upload()  # only one microbatch runs at a time, unless slots are planned

    def is_over(self, slot: Slot, call: int) -> bool:
        """Return whether ``call`` is a microbatch's last one in the slot."""

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        """Finish a call, and pass the turn on if it was the last one in the slot."""

    def finish(self, microbatch: int) -> None:
        """Give up all remaining turns of a microbatch that makes no more calls."""


class Stages(Protocol):
    """The interface of a plan, or a part of one, that maps calls to the slots of a round."""

    @property
    def forward(self) -> Sequence[object]: ...

    @property
    def recompute_ahead(self) -> bool: ...

    @property
    def stage_of_forward(self) -> Sequence[int] | Mapping[int, int]: ...

    @property
    def stage_of_backward(self) -> Sequence[int] | Mapping[int, int]: ...


class MicrobatchOrder:
    """The order of microbatches that run side by side: each follows one call behind the one before [7].

    Args:
        microbatches: their numbers.
    """

    def __init__(self, microbatches: Sequence[int]) -> None:
        self._before = dict(zip(microbatches[1:], microbatches, strict=False))
        self._reached = dict.fromkeys(microbatches, -1.0)
        self._waiting: dict[int, tuple[int, Waiter]] = {}
        """By the microbatch that is waited for: the position that it has to leave behind."""
        self._lock = threading.Lock()

    def begin(self, microbatch: int, position: int, cancel_scope: CancelScope) -> None:
        """Begin the call at ``position`` of a microbatch's forward and backward, once the one before is beyond it."""
        self._reach(microbatch, position)
        before = self._before.get(microbatch)
        with self._lock:
            if before is None or self._reached[before] > position:
                return
            waiter = Waiter()
            self._waiting[before] = position, waiter
        cancel_scope.wait(waiter)

    def finish(self, microbatch: int) -> None:
        """Note that a microbatch makes no more calls."""
        self._reach(microbatch, math.inf)

    def _reach(self, microbatch: int, position: float) -> None:
        with self._lock:
            self._reached[microbatch] = position
            if microbatch in self._waiting and self._waiting[microbatch][0] < position:
                self._waiting.pop(microbatch)[1].wake()


class PlannedSlots(Slots):
    """The slots of a step under a plan.

    Args:
        rounds: the slots, by round and stage. Rounds may have slots in common, but not the last one.
        plan: the plan, which maps calls to stages.
        cancel_scope: the step's cancel scope.
        close: closes a slot that all microbatches have left.
        ahead: called with a backward slot and the microbatch that has its turn, when that microbatch is not there yet,
            and again each time it enters a later slot of its forward.
        order: of microbatches that run side by side; None: rounds come one after another.
    """

    def __init__(
        self,
        rounds: list[list[Slot]],
        plan: Stages,
        cancel_scope: CancelScope,
        close: Callable[[Slot], None],
        ahead: Callable[[Slot, int], None] | None = None,
        order: MicrobatchOrder | None = None,
    ) -> None:
        self._order = order
        self.rounds = rounds
        self._forward = plan.stage_of_forward
        self._backward = plan.stage_of_backward
        self._cancel_scope = cancel_scope
        self._close = close
        self._mine = {m: slots for slots in rounds for m in slots[-1].microbatches}
        self._next = dict.fromkeys(self._mine, 0)
        self._reached = dict.fromkeys(self._mine, 0)
        self._fused = len(plan.forward)
        self._ahead = ahead if plan.recompute_ahead else None
        if self._ahead is not None:
            for slot in (slot for slots in rounds for slot in slots if slot.phase == "backward"):
                slot.absent = functools.partial(self._ahead, slot)

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        return self._enter(microbatch, self._forward[call], call)

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        return self._enter(microbatch, self._backward[call], 2 * len(self._backward) - 1 - call)

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        return self._enter(microbatch, self._forward[call], call)

    def keeps_graph(self, call: int) -> bool:
        return self._forward[call] == self._backward[call]

    def upcoming(self, microbatch: int, call: int, *, backward: bool) -> Slot | None:
        return self._mine[microbatch][(self._backward if backward else self._forward)[call]]

    def approach(self, microbatch: int, slot: Slot, upload: Callable[[], None]) -> None:
        self._leave_until(microbatch, self._mine[microbatch].index(slot))
        slot.approach(microbatch, upload)

    def _enter(self, microbatch: int, position: int, call: int) -> Slot:
        if self._ahead is not None and self._reached[microbatch] < position <= self._fused:
            self._reached[microbatch] = position
            for later in self._mine[microbatch][self._fused + 1 :]:
                if later.is_turn_of(microbatch):
                    self._ahead(later, microbatch)
        self._leave_until(microbatch, position)
        slot = self._mine[microbatch][position]
        slot.enter(microbatch, self._cancel_scope)
        if self._order is not None:
            self._order.begin(microbatch, call, self._cancel_scope)
        return slot

    def is_over(self, slot: Slot, call: int) -> bool:
        # A forward slot ends with its last call, a backward slot with its first one. In a fused slot the loss and the
        # backward follow, and the turn is passed on later, by `finish` or by entering a later slot.
        return slot.phase != "fused" and call == (slot.calls[-1] if slot.phase == "forward" else slot.calls[0])

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        if self.is_over(slot, call):
            self._leave_until(microbatch, self._mine[microbatch].index(slot) + 1)

    def finish(self, microbatch: int) -> None:
        if self._order is not None:
            self._order.finish(microbatch)
        self._leave_until(microbatch, len(self._mine[microbatch]))

    def _leave_until(self, microbatch: int, position: int) -> None:
        while self._next[microbatch] < position:
            slot = self._mine[microbatch][self._next[microbatch]]
            self._next[microbatch] += 1
            if slot.leave(microbatch):
                self._close(slot)
