"""The slots of a step: those of the plan's stages, and those of calls that the plan does not have.

A call without a slot in turn gets one of its own, which runs in whatever turn its microbatch has. Without a plan, all
calls do. A slot that adds to the same sum as another one goes on from there, or the host adds both.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_roundpipe.engine.context import Context, StepSpec
from lightning_roundpipe.engine.slots import Slot
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.memory.grad_buffers import HostGradSums
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Stage
from lightning_roundpipe.updates.grad_readiness import GradReadiness

_ALONE = 1_000_000
"""Added to the uses of a layer by calls that the plan does not have, for each microbatch: their sums are apart."""


class StepSlots:
    """See above.

    Args:
        context: the parts of the engine that outlive the step.
        spec: what is fixed for the step.
        trace: the calls of the plan; None without a plan.
        readiness: is told when gradients are complete; None if there are none.
        apart: whether slots start sums of their own, which the host adds up.

    Attributes:
        all: the slots of the plan, in order, or those that calls were given.
        sums: the host sums of gradients, by layer and use.
    """

    def __init__(
        self, context: Context, spec: StepSpec, trace: Trace | None = None, readiness: GradReadiness | None = None, *,
        apart: bool = False,
    ) -> None:  # fmt: skip
        self._context, self.spec, self.trace = context, spec, trace
        self._readiness, self._apart = readiness, apart
        self.all: list[Slot] = []
        self.sums: dict[tuple[int, int], HostGradSums] = {}
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
        slots = [self._slot(stage, microbatches, number) for stage in stages]
        self.all += slots
        return slots

    def enqueue(self) -> None:
        """Add all slots to their workers' turns."""
        self._expect(self.all)
        for slot in self.all:
            self._context.pool.workers[slot.worker].add(slot)

    def _slot(self, stage: Stage, microbatches: range, number: int) -> Slot:
        assert self.trace is not None
        traced, calls = self.trace.calls, range(stage.first, stage.last + 1)
        needed = [traced[i].layer for i in calls if stage.phase != "backward" or traced[i].taped]
        sums = {}
        for i in calls if stage.phase != "forward" else ():
            if traced[i].taped and (found := self.sums_of(traced[i].layer, traced[i].use)) is not None:
                sums[i] = found
        index = next(self._context.slots)
        slot = Slot(
            index, index % len(self._context.pool.workers), stage.phase, calls, [*dict.fromkeys(needed)], sums,
            microbatches, self.spec.version, self.spec.recorder, self.spec.scope, number,
            apart=self._apart, unpacks_once=stage.unpacks_once,
        )  # fmt: skip
        self._follow(slot)
        return slot

    def _follow(self, slot: Slot) -> None:
        """Let a slot go on with the sums of those that add to them before."""
        for sums in slot.sums.values():
            if (before := self._adding.get(id(sums))) is not None:
                slot.after.append(before)
            self._adding[id(sums)] = slot

    def _expect(self, slots: Sequence[Slot]) -> None:
        if self._readiness is not None:
            self._readiness.expect(slots)

    # -- what microbatches ask ----------------------------------------------------------------------------------------

    def forward_position(self, call: int) -> int:
        """Return the position of the slot of a call's forward in its round."""
        return self._forward[call]

    def backward_position(self, call: int, slots: Sequence[Slot]) -> int | None:
        """Return the position of the slot of its backward among the ``slots`` of a round; None if it has no room.

        A call that no backward followed in the first window has no memory for weights or gradients there.
        """
        assert self.trace is not None
        slot, layer = slots[self._backward[call]], self.trace.calls[call].layer
        has_room = call in slot.sums or (slot.has(layer) and not any(layer.trainable()))
        return self._backward[call] if has_room else None

    def on_demand(
        self, phase: Phase, call: int, layer: HostLayer, microbatch: int, worker: int, sums: HostGradSums | None = None
    ) -> Slot:
        """Return a slot for one call, which is not in turn."""
        counts = self.trace is None and self._readiness is not None
        slot = Slot(
            next(self._context.slots) if counts else -1, worker, phase, [call], [layer],
            {} if sums is None else {call: sums}, [microbatch], self.spec.version, self.spec.recorder, self.spec.scope,
        )  # fmt: skip
        self._follow(slot)
        self._expect([slot])
        if counts:
            self.all.append(slot)
        return slot

    def give_up(self, slot: Slot) -> None:
        """Leave out a slot of `on_demand` that has not opened."""
        if slot.readiness is not None:
            slot.readiness.closed(slot)

    def sums_of(self, layer: HostLayer, use: int, microbatch: int | None = None) -> HostGradSums | None:
        """Return the host sums of a call's gradients, of all microbatches or of one; None if nothing is trained."""
        key = layer.index, use + (_ALONE * (microbatch + 1) if microbatch is not None else 0)
        if (known := self.sums.get(key)) is None:
            known = self.sums[key] = self._context.gradients.of(layer, key[1]).begin(apart=self._apart)
        return known if known.layout.nbytes else None
