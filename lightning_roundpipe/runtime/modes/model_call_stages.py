"""The stages of a plan where training_step runs once and only its calls of the model are cut.

    training_step ─► model call 0 ─► user code ─► model call 1 ─► loss ─► backward ─► model call 1 ─► model call 0
                     F1 F2 .. Fk     parked       F1 .. Fk                            B1 .. Bj        B1 .. Bj

The loss needs all microbatches at once, so no microbatch may hold a turn while it waits for the others, or the step
would deadlock. Therefore the fused stage runs as a forward stage and a backward stage, and no stage reaches from one
call of the model into the next. Each direction of each call has its own slots in the global sequence, and all
microbatches have left these when that direction ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.runtime.core.trace import Trace
from lightning_roundpipe.runtime.core.turns import PlannedSlots, Slot, Slots
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


@dataclass(frozen=True)
class ModelCallStages:
    """One call of the model: its qualified name, its layer calls in the trace, and its stages in running order."""

    name: str
    calls: range
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]


def portions_of(plan: Plan, trace: Trace) -> list[ModelCallStages]:
    """Return the calls of the model in ``trace``, with the stages of ``plan`` cut at their ends."""
    portions = []
    for number, name in enumerate(trace.portions):
        calls = trace.portion(number)
        forward = [_within(span, calls) for span in (*plan.forward, plan.fused)]
        backward = [_within(span, calls) for span in (plan.fused, *plan.backward)]
        portions.append(ModelCallStages(name, calls, tuple(filter(None, forward)), tuple(filter(None, backward))))
    return portions


def _within(span: Span, calls: range) -> Span | None:
    first, last = max(span.first, calls.start), min(span.last, calls.stop - 1)
    return Span(first, last) if first <= last else None


@dataclass(frozen=True)
class DirectionStages:
    """The stages of one direction of a model call. Implements `turns.Stages`."""

    phase: Phase
    spans: tuple[Span, ...]
    recompute_ahead: bool = False

    @property
    def stages(self) -> list[Stage]:
        return [Stage(position, self.phase, span.first, span.last) for position, span in enumerate(self.spans)]

    @property
    def forward(self) -> Sequence[Span]:
        return self.spans if self.phase == "forward" else ()

    @property
    def stage_of_forward(self) -> Mapping[int, int]:
        return self._positions if self.phase == "forward" else {}

    @property
    def stage_of_backward(self) -> Mapping[int, int]:
        return self._positions if self.phase == "backward" else {}

    @property
    def _positions(self) -> dict[int, int]:
        return {call: position for position, span in enumerate(self.spans) for call in span.calls()}


class CallSlots(Slots):
    """The slots of one model call.

    Args:
        forward: the slots of its forward; None if it calls no layer.

    Attributes:
        back: the slots of its backward, once they are made.
    """

    def __init__(self, forward: PlannedSlots | None) -> None:
        self._forward = forward
        self.back: PlannedSlots | None = None
        self._parked: set[int] = set()

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        assert self._forward is not None
        return self._forward.forward(microbatch, call, layer)

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        assert self.back is not None, "no gradient was expected"
        return self.back.backward(microbatch, call, layer, sums)

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        raise AssertionError("no graph is kept")

    def upcoming(self, microbatch: int, call: int, *, backward: bool) -> Slot | None:
        group = self.back if backward else self._forward
        return group.upcoming(microbatch, call, backward=backward) if group is not None else None

    def approach(self, microbatch: int, slot: Slot, upload: Callable[[], None]) -> None:
        self._group_of(slot).approach(microbatch, slot, upload)

    def is_over(self, slot: Slot, call: int) -> bool:
        return self._group_of(slot).is_over(slot, call)

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        self._group_of(slot).after(microbatch, slot, call)

    def finish(self, microbatch: int) -> None:
        """Leave the remaining slots of the forward, or at the second call those of the backward."""
        parked = microbatch in self._parked
        self._parked.add(microbatch)
        group = self.back if parked else self._forward
        if group is not None:
            group.finish(microbatch)

    def _group_of(self, slot: Slot) -> PlannedSlots:
        group = self.back if slot.phase == "backward" else self._forward
        assert group is not None
        return group
