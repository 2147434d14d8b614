"""Slots and turns: which microbatch may run on a worker now.

A slot is a stage of one step on one worker. Slot i runs on worker i mod N. A worker serves its slots in their order,
and of each slot the microbatches in theirs: every pair has a ticket, and one counter says which ticket is served. This
total order is why no wait can be part of a cycle.

    acquire ── wait until one's ticket is served ── the first to enter opens the slot ── [1]
    release ── pass on one's ticket, or give it up before it has come ── [2]
    the last ticket of a slot ── the slot is closed: its gradients leave, and the next slot's weights come ── [3]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.devices import Event
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.randomness import Seed
from lightning_roundpipe.engine.sync import Baton, CancelScope, Signal
from lightning_roundpipe.memory.arenas import Place
from lightning_roundpipe.memory.grad_buffers import DeviceGradSums, HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer
from lightning_roundpipe.updates.grad_readiness import GradReadiness
from lightning_roundpipe.user_code.stand_ins import Copies
from lightning_roundpipe.user_code.thread_state import TorchThreadState


@dataclass(frozen=True)
class StepSpec:
    """What is fixed when a step begins.

    Attributes:
        version: version of the weights that it computes with.
        thread_state: torch's modes of the thread that began it.
        scope: carries its first error to all its threads.
        loss_weights: how much the microbatches count; also says how many there are.
        plan: the plan that it runs under; None if each call has a slot of its own.
        measures: whether a plan is to be made from it.
        seed: numbers from which its random states derive.
        first: number of its first microbatch among those of all machines.
        overlaps: whether its backward may go on beside the next step.
        shares_state: whether its microbatches depend on state of the process that the main thread changes.
        undisturbed: whether no update was writing to masters when it began.
        updates: the optimizer's thread; None if gradients go to ``.grad``.
        readiness: is told of uploads and gradients; None if there are no gradients.
        copies: copies on devices of masters that user code reads, until all microbatches have ended.
    """

    version: int
    thread_state: TorchThreadState
    scope: CancelScope
    loss_weights: LossWeights
    plan: Plan | None = None
    measures: bool = False
    seed: tuple[int, ...] = ()
    first: int = 0
    overlaps: bool = False
    shares_state: bool = False
    undisturbed: bool = True
    updates: AsyncOptimizer | None = None
    readiness: GradReadiness | None = None
    recorder: Recorder = field(default_factory=Recorder)
    copies: Copies = field(default_factory=dict, compare=False)

    @property
    def several(self) -> bool:
        """Whether there are several microbatches."""
        return self.loss_weights.count > 1

    @property
    def recomputes_ahead(self) -> bool:
        """Whether a stage is recomputed before the gradients of its last call are there."""
        return self.plan is not None and self.plan.recompute_ahead

    def seed_of(self, microbatch: int, *what: int) -> Seed:
        """Return the seed of something that a microbatch does; equal numbers give equal seeds."""
        return (*self.seed, self.first + microbatch, *what)


@dataclass(slots=True, eq=False)
class LayerUpload:
    """The weights of one layer for a slot.

    Attributes:
        enqueued: reached once their upload is enqueued.
        segment: their memory, while the slot has a place.
    """

    enqueued: Signal = field(default_factory=Signal)
    end: Event = field(init=False)
    segment: Tensor | None = None


@dataclass(slots=True, eq=False)
class SlotWeights:
    """The weights of a slot on its worker.

    Attributes:
        uploads: those of each layer, by the layer's number.
        unpacks_once: whether packed weights are unpacked once for all its microbatches.
        place: their part of an arena, and that of the gradients, once it is known.
        shares: whether they are those of another slot.
    """

    uploads: dict[int, LayerUpload]
    unpacks_once: bool = False
    place: Place | None = None
    shares: bool = False


@dataclass(slots=True, eq=False)
class SlotGradients:
    """The sums of gradients of a slot on its worker, and their way to the host.

    Attributes:
        sums: by call, the sums on the host that it adds to.
        left: by call, reached once the next slot's gradients may follow to the host.
        own_sums: whether the slot starts sums of its own, which the host adds to those of the slots before.
        on_worker: by call, the sums that are not on their way yet.
        free: ends of what uses their memory before.
        after: slots that have added to the same host sums before.
        sent: reached once all are on their way.
    """

    sums: dict[int, HostGradSums] = field(default_factory=dict)
    own_sums: bool = False
    left: dict[int, Signal] = field(init=False)
    on_worker: dict[int, DeviceGradSums] = field(default_factory=dict)
    free: list[Event] = field(default_factory=list)
    after: list[Slot] = field(default_factory=list)
    sent: Signal = field(default_factory=Signal)

    def __post_init__(self) -> None:
        self.left = {call: Signal() for call in self.sums}

    def leaving(self, call: int) -> Signal:
        """Return what is reached once another slot's gradients of ``call`` may follow to the host."""
        return self.left.get(call, self.sent)

    def release(self) -> None:
        """Let others follow, when all are on their way."""
        self.after = []
        for left in self.left.values():
            left.set()
        self.sent.set()


@dataclass(eq=False)
class Slot:
    """A stage of one step, on one worker.

    Attributes:
        index: position in the engine's sequence of slots.
        call_indices: positions of its calls in the trace.
        layers: the layers of these, whose weights it needs.
        microbatches: the microbatches that it serves, in order.
        position: position among the slots of its round; None if it was made for one call, and is not in turn.
        opened: whether it has memory for its weights and gradients.
        first: the ticket of its first microbatch.
    """

    index: int
    worker: int
    phase: Phase
    call_indices: Sequence[int]
    layers: Sequence[HostLayer]
    microbatches: Sequence[int]
    spec: StepSpec
    gradients: SlotGradients
    round: int = 0
    position: int | None = None
    weights: SlotWeights = field(init=False)
    opened: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        self.weights = SlotWeights({layer.index: LayerUpload() for layer in self.layers})

    def has(self, layer: HostLayer) -> bool:
        """Return whether it has the layer's weights."""
        return layer.index in self.weights.uploads

    def release(self) -> None:
        """Let go of the memory, when all gradients are on their way."""
        for upload in self.weights.uploads.values():
            upload.segment = None
        self.gradients.release()

    def report_coming(self) -> None:
        """Report the uploads and gradients that are to come."""
        if self.spec.readiness is not None:
            adding = [sums.layer.bucket for sums in self.gradients.sums.values()]
            uploading = [layer.bucket for layer in self.layers]
            self.spec.readiness.expect([*adding, *self._without_gradients()], uploading)

    def report_upload(self, layer: HostLayer, end: Event) -> None:
        """Report that the upload of a layer's weights, which ends at ``end``, is enqueued."""
        if self.spec.readiness is not None:
            self.spec.readiness.uploading(layer.bucket, end)

    def report_sent(self, call: int) -> None:
        """Report that the gradients of ``call`` are on their way: no microbatch adds to them any more."""
        if self.spec.readiness is not None:
            self.spec.readiness.passed([self.gradients.sums[call].layer.bucket])

    def report_closed(self) -> None:
        """Report that it is closed, or will not open: no gradients come that are not on their way."""
        if self.spec.readiness is not None:
            sums = self.gradients.sums
            unsent = [sums[call].layer.bucket for call, left in self.gradients.left.items() if not left.is_set]
            self.spec.readiness.passed([*unsent, *self._without_gradients()])

    def _without_gradients(self) -> list[ParamBucket]:
        adding = [sums.layer for sums in self.gradients.sums.values()]
        return [layer.bucket for layer in self.layers if layer not in adding]

    def ticket(self, microbatch: int) -> int:
        return self.first + microbatch - self.microbatches[0]

    @property
    def end(self) -> int:
        """The ticket behind its last one."""
        return self.first + len(self.microbatches)


class TicketQueue:
    """The turns of one worker. Every method is called with the baton held.

    ``close``: called with each slot that has served its last microbatch [3].
    """

    def __init__(self, baton: Baton, close: Callable[[Slot], None]) -> None:
        self._baton, self._close = baton, close
        self.slots: deque[Slot] = deque()
        """Those to come; the first one is served."""
        self._tickets = self._serving = 0
        self._ended: set[int] = set()
        """Tickets that have been used or given up, and not been served yet."""
        self._waiting: dict[int, Callable[[], None]] = {}
        self._coming: dict[int, Callable[[], None]] = {}

    def add(self, slot: Slot) -> None:
        """Add a slot behind all others."""
        slot.first = self._tickets
        self._tickets = slot.end
        self.slots.append(slot)

    def acquire(self, slot: Slot, microbatch: int, coming: Callable[[], None] | None = None) -> None:
        """Wait for the turn of ``microbatch`` in ``slot`` [1].

        ``coming`` is called once the turn is the next one, on any thread that holds the baton, unless it has come.
        """
        ticket = slot.ticket(microbatch)
        if coming is not None and self._serving < ticket:
            if self._serving == ticket - 1:
                coming()
            else:
                self._coming[ticket] = coming

        def subscribe(callback: Callable[[], None]) -> bool:
            self._waiting[ticket] = callback
            return True

        if self._serving == ticket:  # it keeps its rank, and thus the baton: to hand it over takes tens of microseconds
            self._baton.offer()
        else:
            self._baton.runner.rank = slot.index  # the oldest slot first, as its worker's next one waits for its end
            self._baton.wait(subscribe)

    def release(self, slot: Slot, microbatch: int) -> None:
        """End a turn, or give up one that has not come [2]."""
        self._ended.add(slot.ticket(microbatch))
        while self._serving in self._ended:
            self._ended.remove(self._serving)
            self._serving += 1
            if self._serving == self.slots[0].end:
                self._close(self.slots.popleft())
        if (callback := self._waiting.pop(self._serving, None)) is not None:
            self._coming.pop(self._serving, None)
            callback()
        if (coming := self._coming.pop(self._serving + 1, None)) is not None:
            coming()

    def clear(self) -> None:
        """Forget all slots, after a failure."""
        self.slots.clear()
        self._ended.clear()
        self._waiting.clear()
        self._coming.clear()
        self._serving = self._tickets
