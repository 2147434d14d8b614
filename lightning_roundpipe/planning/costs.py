"""What each call of a microbatch costs: the numbers that a plan is made from.

A plan is only as good as what it is judged by, so the arithmetic of a stage (its time, its bytes) is here once, and the
partitioner, the printed table and whatever estimates memory all ask the same functions. Times are seconds for one
microbatch, sizes are bytes.

How the three phases of a stage differ:

========  ===================================  ==================  ==============================
phase     time                                 weights, gradients  activations held at once
========  ===================================  ==================  ==============================
forward   forward                              weights             the worst call's
fused     forward + backward (graph is kept)   both                the sum over its calls
backward  recomputation (forward) + backward   both                the worst call's
========  ===================================  ==================  ==============================

A call that needs no backward (a frozen embedding) is neither recomputed nor uploaded again in a backward stage: there
it costs nothing. In a fused stage it still runs forward, but nothing of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Phase = Literal["forward", "fused", "backward"]


@dataclass(frozen=True)
class CallCost:
    """One call of one microbatch.

    Args:
        layer: name of the layer that is called; calls of one layer share its weights.
        forward_s: seconds of its forward, which is also the time of its recomputation.
        backward_s: seconds of its backward alone, without the recomputation. Ignored without ``needs_backward``.
        weight_bytes: the layer's weights as they travel to a worker.
        gradient_bytes: the gradients of its trainable weights on the worker.
        boundary_bytes: its inputs, which are saved on the host for recomputation.
        activation_bytes: what it holds on the worker at its worst: inputs, outputs, and what autograd saves.
        needs_backward: whether a gradient has to pass through it or to reach its weights.
    """

    layer: str
    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int
    boundary_bytes: int
    activation_bytes: int
    needs_backward: bool

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "weight_bytes", "gradient_bytes", "boundary_bytes", "activation_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} of layer {self.layer!r} must be a number of at least 0.")

    def time_s(self, phase: Phase) -> float:
        """Seconds that a stage of this phase spends on the call, for one microbatch."""
        if phase == "forward":
            return self.forward_s
        if not self.needs_backward:
            return self.forward_s if phase == "fused" else 0.0
        return self.forward_s + self.backward_s

    def is_loaded(self, phase: Phase) -> bool:
        """Whether a stage of this phase needs the call's weights on the worker."""
        return self.needs_backward or phase != "backward"


class StageBytes:
    """The bytes that a growing stage needs on its worker, call by call.

    A running sum, because the partitioner asks after every call whether the stage still fits. A layer that is called
    twice within the stage is resident once. ``ahead``: whether a backward stage keeps all its graphs at once.
    """

    def __init__(self, phase: Phase, ahead: bool = False) -> None:
        self._phase = phase
        self._keeps = phase == "fused" or (phase == "backward" and ahead)
        self._resident: dict[tuple[str, str], int] = {}
        self._kept = 0  # activations of a graph that lives until backward
        self._worst = 0  # activations that go before the next call runs
        self.weights = 0
        self.gradients = 0

    @property
    def activations(self) -> int:
        return self._kept + self._worst

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations

    def add(self, call: CallCost) -> None:
        if not call.is_loaded(self._phase):
            return
        self.weights += self._grow("weights", call.layer, call.weight_bytes)
        if self._phase != "forward" and call.needs_backward:
            self.gradients += self._grow("gradients", call.layer, call.gradient_bytes)
        if self._keeps and call.needs_backward:
            self._kept += call.activation_bytes
        else:
            self._worst = max(self._worst, call.activation_bytes)

    def _grow(self, what: str, layer: str, size: int) -> int:
        before = self._resident.get((what, layer), 0)
        self._resident[what, layer] = max(before, size)
        return max(size - before, 0)


@dataclass(frozen=True)
class Costs:
    """The calls of one microbatch in the order of the trace. ``first`` and ``last`` are call numbers, both included."""

    calls: tuple[CallCost, ...]

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("Costs need at least one call: the model made none, so there is nothing to plan.")

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[CallCost]:
        return iter(self.calls)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layer of each call; a layer that is called twice appears twice."""
        return tuple(call.layer for call in self.calls)

    def stage_time_s(self, first: int, last: int, phase: Phase) -> float:
        """Seconds that the stage takes for one microbatch."""
        return math.fsum(call.time_s(phase) for call in self.calls[first : last + 1])

    def stage_bytes(self, first: int, last: int, phase: Phase, ahead: bool = False) -> StageBytes:
        """What the stage needs on its worker: ``.weights``, ``.gradients``, and ``.total`` with activations.

        ``ahead``: whether a backward stage is recomputed as a whole before its gradient is there.
        """
        need = StageBytes(phase, ahead)
        for call in self.calls[first : last + 1]:
            need.add(call)
        return need

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text, fit for JSON. ``Costs.from_dict`` gives back an equal object."""
        return {"calls": [asdict(call) for call in self.calls]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """The inverse of ``to_dict``; ``ValueError`` names the call and the key that is missing or unknown."""
        calls = data.get("calls")
        if not isinstance(calls, list):
            raise ValueError("Costs need a list under 'calls', as Costs.to_dict() writes it.")
        return cls(tuple(_call_from_dict(number, call) for number, call in enumerate(calls)))


def _call_from_dict(number: int, data: object) -> CallCost:
    known = [field.name for field in fields(CallCost)]
    if not isinstance(data, Mapping):
        raise ValueError(f"calls[{number}] must be a mapping with the keys {', '.join(known)}, not {data!r}.")
    if missing := [key for key in known if key not in data]:
        raise ValueError(f"calls[{number}] lacks {missing[0]!r}; it needs {', '.join(known)}.")
    if unknown := [key for key in data if key not in known]:
        raise ValueError(f"calls[{number}] has an unknown key {unknown[0]!r}; it takes {', '.join(known)}.")
    return CallCost(**data)
