"""The slots of a step, and the way of a microbatch through them.

A call that the plan has runs in the slot of its stage, in the microbatch's turn. Any other call gets a slot of its own,
which runs in whatever turn the microbatch has. Without a plan, all calls do. A slot that adds to the same sum as
another one goes on from there, or the host adds both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.activations import Activations
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.executor import Executor, LayerCall
from lightning_roundpipe.engine.slots import Slot, SlotGradients, StepSpec
from lightning_roundpipe.engine.sync import Runner
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.engine.uploads import SlotMemory
from lightning_roundpipe.engine.worker import Worker
from lightning_roundpipe.faults.notes import add_note
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Stage


class StepSlots:
    """See above.

    Args:
        trace: the calls of the plan; None without a plan.
        own_sums: whether slots start sums of their own, which the host adds up.

    Attributes:
        all: the slots of the plan, in order, or those that calls were given.
        sums: host sums of gradients, by layer, microbatch and use; -1 of all microbatches, which planned calls add to.
    """

    def __init__(self, context: Context, spec: StepSpec, trace: Trace | None = None, *, own_sums: bool = False) -> None:
        self._context, self.spec, self.trace, self._own_sums = context, spec, trace, own_sums
        self.all: list[Slot] = []
        self.sums: dict[tuple[int, ...], HostGradSums] = {}
        self._adding: dict[int, Slot] = {}
        """The last slot that adds to each sum, by the sum's id."""
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}

    # -- the plan's stages --------------------------------------------------------------------------------------------

    def lay_out(self, stages: Sequence[Stage], microbatches: range, number: int = 0) -> list[Slot]:
        """Return a slot for each of the plan's stages, for the ``microbatches`` of round ``number``."""
        for position, stage in enumerate(stages):
            calls = range(stage.first, stage.last + 1)
            if stage.phase != "backward":
                self._forward.update(dict.fromkeys(calls, position))
            if stage.phase != "forward":
                self._backward.update(dict.fromkeys(calls, position))
        slots = [self._slot(stage, microbatches, number, position) for position, stage in enumerate(stages)]
        self.all += slots
        return slots

    def enqueue(self) -> None:
        """Add all slots to their workers' turns."""
        for slot in self.all:
            self._context.pool.workers[slot.worker].add(slot)

    def _slot(self, stage: Stage, microbatches: range, number: int, position: int) -> Slot:
        assert self.trace is not None
        traced, calls = self.trace.calls, range(stage.first, stage.last + 1)
        needed = [traced[i].layer for i in calls if stage.phase != "backward" or traced[i].taped]
        sums = {}
        for i in calls if stage.phase != "forward" else ():
            if traced[i].taped and (found := self.sums_of(traced[i].layer, traced[i].use)) is not None:
                sums[i] = found
        index = self._context.pool.next_slot()
        slot = Slot(
            index, index % len(self._context.pool.workers), stage.phase, calls, [*dict.fromkeys(needed)],
            microbatches, self.spec, SlotGradients(sums, self._own_sums), number, position,
        )  # fmt: skip
        slot.weights.unpacks_once = stage.unpacks_once
        self._follow(slot)
        return slot

    def _follow(self, slot: Slot) -> None:
        """Let a slot go on with the sums of those that add to them before, and report what it adds."""
        for sums in slot.gradients.sums.values():
            if (before := self._adding.get(id(sums))) is not None:
                slot.gradients.after.append(before)
            self._adding[id(sums)] = slot
        slot.report_coming()

    # -- what microbatches ask ----------------------------------------------------------------------------------------

    def planned(self, call: int, phase: Phase, slots: Sequence[Slot]) -> Slot | None:
        """Return the one of the ``slots`` of a round in which a call runs; None for a backward without room.

        A call that no backward followed in the first window has no memory for weights or gradients there.
        """
        if phase == "forward":
            return slots[self._forward[call]]
        assert self.trace is not None
        slot, layer = slots[self._backward[call]], self.trace.calls[call].layer
        return slot if call in slot.gradients.sums or (slot.has(layer) and not any(layer.weights.trainable())) else None

    def on_demand(self, phase: Phase, call: LayerCall, worker: int, sums: HostGradSums | None = None) -> Slot:
        """Return a slot for one call, which is not in turn."""
        numbered = self.trace is None and self.spec.readiness is not None
        slot = Slot(
            self._context.pool.next_slot() if numbered else -1, worker, phase, [call.index], [call.layer],
            [call.microbatch], self.spec, SlotGradients({} if sums is None else {call.index: sums}),
        )  # fmt: skip
        self._follow(slot)
        if numbered:
            self.all.append(slot)
        return slot

    def sums_of(self, layer: HostLayer, use: int, microbatch: int | None = None) -> HostGradSums | None:
        """Return the host sums of a call's gradients, of all microbatches or of one; None if nothing is trained."""
        key = layer.index, -1 if microbatch is None else microbatch, use
        if (known := self.sums.get(key)) is None:
            known = self.sums[key] = self._context.gradients.begin(layer, key[1:], own_sums=self._own_sums)
        return known if known.layout.nbytes else None

    def sums_of_call(self, call: LayerCall, microbatch: int | None) -> HostGradSums | None:
        """Return those of a call that has a slot of its own."""
        return self.sums_of(call.layer, call.use, microbatch)


class Turn:
    """See `Turns.take`."""

    __slots__ = ("_activated", "_call", "_memory", "_phase", "_slot", "_turns", "_worker")

    def __init__(self, turns: Turns, call: LayerCall, slot: Slot, phase: str) -> None:
        self._turns, self._call, self._slot, self._phase = turns, call, slot, phase
        self._worker = turns.context.pool.workers[slot.worker]
        self._activated: AbstractContextManager[None]
        self._memory: SlotMemory | None = None  # of a slot for this call alone

    def __enter__(self) -> Executor:
        turns, slot, worker = self._turns, self._slot, self._worker
        if slot.position is None:
            memory = worker.spare if turns.round else worker.planned
            worker.open(slot, memory, None if self._call.layer.index in turns.outside else turns.slot)
            self._memory = memory
        try:
            self._activated = worker.device.activate()
            self._activated.__enter__()
        except BaseException:
            self._close()
            raise
        return turns.context.pool.executors[slot.worker]

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is not None:
                add_note(error, self._call.place(self._phase, self._slot, self._worker.device))
            self._activated.__exit__(kind, error, traceback)
        finally:
            self._close()

    def _close(self) -> None:
        if self._memory is not None:
            self._worker.close_slot(self._slot, self._memory)


class Turns:
    """The way of one microbatch through the slots: whose turn it has, and which device its tensors are on.

    Args:
        round: those of the microbatch's round, in order; empty without a plan.
        workers: over how many workers its calls are spread without a plan.

    Attributes:
        slot: the slot whose turn it has.
        device: the device that its newest tensors are on; None before the first call.
        activations: its saved tensors.
        outside: numbers of layers whose calls run outside of the plan: user code has written to their weights.
        next: the first position of the trace that it may still call.
        progress: how many calls of the trace are behind it.
        predecessor_progress: that of the last microbatch of the round before, if it is the first one of its own. Turns
            keep the order within a round; rounds may run side by side.
    """

    def __init__(
        self, context: Context, slots: StepSlots, round: Sequence[Slot], microbatch: int, workers: int
    ) -> None:
        self.context, self.slots, self.round = context, slots, round
        self.microbatch, self._workers = microbatch, workers
        self.runner = Runner(slots.spec.scope, (round[0].index if round else 0) + microbatch)
        self.slot: Slot | None = None
        self.device: Device | None = None
        self.activations = Activations(microbatch, slots.spec.recorder, context.pool.devices[0])
        self.outside: set[int] = set()
        self.next = 0
        self.progress = Versioned()
        self.predecessor_progress: Versioned | None = None
        self._left = 0
        """Slots in front of this position have been left."""

    def home_of(self, tensor: Tensor) -> Device | None:
        """Return the device that a tensor of user code is on, if possible the present one; None for the host.

        Emulated devices are told apart by the worker alone. So before the first layer, all is on the host there.
        """
        present, pool = self.device, self.context.pool
        if pool.accelerator is None or (present is not None and tensor.device == present.torch_device):
            return present
        return next((device for device in pool.devices if device.torch_device == tensor.device), None)

    # -- its place in the trace ---------------------------------------------------------------------------------------

    @property
    def ended_early(self) -> bool:
        """Whether it has not made the last call of the trace."""
        return self.slots.trace is not None and self.next < len(self.slots.trace.calls)

    def wait_for(self, what: Versioned, version: int) -> None:
        """Give the baton up until a version is published."""
        if not what.has(version):
            self.context.pool.baton.wait(functools.partial(what.when, version))

    def publish_progress(self) -> None:
        """Let the first microbatch of the next round follow, but not into buffers that a later call still changes."""
        held = self.slots.trace.held if self.slots.trace is not None else []
        own = self.next
        self.progress.publish(min([own, *(first for first, last in held if first < own <= last)]) if held else own)

    # -- slots --------------------------------------------------------------------------------------------------------

    def slot_of(self, call: LayerCall, phase: Phase) -> Slot:
        """Return the slot of a call's forward or backward: that of the plan, or one for this call alone."""
        if call.planned and call.layer.index not in self.outside:
            planned = self.slots.planned(call.index, phase, self.round)
            if planned is not None:
                return planned
        if self.round:
            present = self.slot or self.round[0]
            self.acquire(present)
            worker = present.worker
        else:
            worker = call.index % self._workers
        if phase == "forward":
            return self.slots.on_demand(phase, call, worker)
        if call.slot is None:
            call.slot = self.for_backward(call, worker)
        call.slot.worker = worker
        return call.slot

    def next_slot_of(self, layer: HostLayer) -> Slot | None:
        """Return the slot of the next planned call of ``layer``, if its turn is still to come."""
        calls = self.slots.trace.calls if self.slots.trace is not None and layer.index not in self.outside else []
        call = next((i for i in range(self.next, len(calls)) if calls[i].layer is layer), None)
        if call is None or not self.round:
            return None
        slot = self.slots.planned(call, "forward", self.round)
        return slot if slot in self.round[self.round.index(self.slot) + 1 if self.slot is not None else 0 :] else None

    def for_backward(self, call: LayerCall, worker: int) -> Slot:
        """Return a slot for the backward of one call."""
        sums = self.slots.sums_of_call(call, self.microbatch if self.round else None)
        return self.slots.on_demand("backward", call, worker, sums)

    def take(
        self, call: LayerCall, slot: Slot, phase: str, saved: Sequence[HostTensor] = (), *, lent: bool = True
    ) -> Turn:
        """Return the context in which a call runs: in the turn of its slot, or in the present one if that is its own.

        Args:
            saved: what the call needs from the host. It is brought once the turn is the next one, see `Activations.on`.
            lent: whether that goes back when the call is over.
        """
        if slot.position is not None:
            self.acquire(slot, saved, lent=lent)
        return Turn(self, call, slot, phase)

    def acquire(self, slot: Slot, saved: Sequence[HostTensor] = (), *, lent: bool = True) -> None:
        """Leave the present slot and those in between, and wait for the turn of another one; see `take`."""
        if slot is self.slot:
            return
        self.release(slot.position)
        self.slot = slot
        worker = self.context.pool.workers[slot.worker]
        coming = functools.partial(self._bring_ahead, worker, saved, lent=lent) if saved else None
        worker.acquire(slot, self.microbatch, coming)

    def _bring_ahead(self, worker: Worker, saved: Sequence[HostTensor], *, lent: bool = True) -> None:
        try:
            with worker.device.activate():
                self.activations.bring_ahead(saved, worker.device, worker.room, lent=lent)
        except Exception:
            return  # this may be another one's thread; the call brings what is not there, and raises the error

    def release(self, before: int | None = None) -> None:
        """Leave the slots in front of position ``before``; all of them if it is None."""
        for slot in self.round[self._left : before]:
            self.context.pool.workers[slot.worker].tickets.release(slot, self.microbatch)
        self._left = max(self._left, len(self.round) if before is None else before)

    def go_on(self, slots: StepSlots) -> None:
        """Go on without turns, in slots of each call, when all turns have been left."""
        self.slots, self.round, self.slot, self._left = slots, (), None, 0
