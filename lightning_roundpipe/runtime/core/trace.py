"""The trace: the layer calls of a microbatch, in order, as learned from the first batches.

With layer drop, each microbatch makes other calls. The trace then is a sequence that contains the calls of every
microbatch in order; a microbatch skips the calls that it does not make.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NoReturn

import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.crossing import Crossed, Crossing
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.core.call import CallProfile
from lightning_roundpipe.runtime.layer_calls.side_outputs import Key
from lightning_roundpipe.runtime.memory.grad_buffers import GradientLayout
from lightning_roundpipe.runtime.memory.host_layer import HostLayer

Kind = tuple[int, bool]
"""What identifies a call in traces: see `TracedCall.kind`."""


class OtherCalls(RoundPipeError):
    """Raised if layers are called in an order that no trace contains.

    Args:
        why: describes the calls.
        rule: what holds for calls.
    """

    def __init__(self, why: str, rule: str) -> None:
        super().__init__(f"{why}{rule} Set overlap=False, without a plan, which allows any control flow.")
        self.why = why


@dataclass
class TracedCall:
    """One call of a trace: what the first batches have shown about it.

    Attributes:
        layer: the called layer.
        use: how often the microbatch has called the layer before.
        portion: with ``microbatch_scope="model"``, the number of the model's call that this call belongs to.
        taped: whether a gradient passes through the call or reaches its weights.
        can_tape: whether grad mode was on and an input or a parameter required grad.
        flags: whether each output tensor requires grad; mutated inputs come last.
        side_outputs: for each side output that gradients pass through, whether each of its tensors requires grad.
        mutates: positions of the arguments that the layer writes to.
        overwritten: positions of the arguments that user code writes to between the call and its backward.
        profile: how the last such call was made, if it was plain.
        boundary_bytes: host memory that its saved inputs and choices take, without inputs that earlier calls share.
        activation_bytes: peak memory of the call on its worker, backward included.
        kept_bytes: peak memory of the forward, with its graph.
        forward_bytes: the same, and of user code behind it if the graph is dropped; None if not measured.
        returning_bytes: size of the gradients of its outputs.
        backward_held_bytes: outputs of calls, and what user code has made, that are alive when its backward begins.
        crossed: tensors that it shares with earlier calls.
        forward_s: seconds that the forward takes; 0 if not measured.
        backward_s: seconds that the backward takes; 0 if not measured.
    """

    layer: HostLayer
    use: int
    portion: int = 0
    taped: bool = False
    can_tape: bool = False
    flags: tuple[bool, ...] = ()
    side_outputs: dict[Key, tuple[bool, ...]] = field(default_factory=dict)
    mutates: frozenset[int] = frozenset()
    overwritten: set[int] = field(default_factory=set)
    profile: CallProfile | None = None
    boundary_bytes: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0
    forward_bytes: int | None = None
    returning_bytes: int = 0
    backward_held_bytes: int = 0
    crossed: Crossed | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def kind(self) -> Kind:
        """The layer's index, and whether gradients may flow through the call."""
        return self.layer.index, self.can_tape

    def then(self, nbytes: int, held_bytes: int) -> None:
        """Account for ``nbytes`` that user code behind this call takes beside ``held_bytes``, or the call's graph."""
        self.activation_bytes = max(self.activation_bytes, self.kept_bytes + nbytes)
        if self.forward_bytes is not None and self.crossed is not None:
            self.forward_bytes = max(self.forward_bytes, held_bytes + nbytes - self.crossed.held_bytes)


@dataclass
class Trace:
    """The calls of a microbatch, in order.

    Attributes:
        calls: the calls.
        has_skipped_calls: whether some microbatches have skipped calls that others made.
        portions: with ``microbatch_scope="model"``, names of the models that ``training_step`` calls, in order.
        crossing: while a microbatch records this trace, tracks the tensors that its calls share.
    """

    calls: list[TracedCall] = field(default_factory=list)
    has_skipped_calls: bool = False
    portions: list[str] = field(default_factory=list)
    crossing: Crossing = field(default_factory=Crossing, compare=False, repr=False)
    _uses: Counter[int] = field(default_factory=Counter, compare=False, repr=False)
    """By the layer's index, how many calls there are."""

    @property
    def names(self) -> list[str]:
        return [c.layer.name for c in self.calls]

    def portion(self, number: int) -> range:
        """Return the range of a portion's calls, which are contiguous."""
        mine = [index for index, call in enumerate(self.calls) if call.portion == number]
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    def append(self, layer: HostLayer) -> TracedCall:
        self.calls.append(TracedCall(layer, self._uses[layer.index]))
        self._uses[layer.index] += 1
        return self.calls[-1]

    def has(self, position: int, layer: HostLayer) -> bool:
        """Return whether the call at ``position`` calls ``layer``."""
        return position < len(self.calls) and self.calls[position].layer is layer

    def ends_with(self, position: int) -> bool:
        """Return whether ``position`` is the last call's."""
        return position == len(self.calls) - 1

    def extended(self) -> Trace:
        """Return a trace of the same calls, to which a microbatch that leaves the plan adds others."""
        return Trace([*self.calls], self.has_skipped_calls, self.portions, _uses=self._uses.copy())

    def contains(self, kinds: Sequence[Kind]) -> bool:
        """Return whether it has calls of these kinds, in this order."""
        rest = iter(self.calls)
        return all(any(call.kind == kind for call in rest) for kind in kinds)

    def find(self, layer: HostLayer, position: int, *, can_tape: bool) -> int | None:
        """Return the position of a microbatch's call of ``layer``: the first one at or after ``position``.

        The calls in between are skipped, as with layer drop. None if the trace has no such call.

        Args:
            layer: the layer.
            position: number of calls of the trace that the microbatch has made or skipped.
            can_tape: whether gradients may flow through the call.
        """
        kind = (layer.index, can_tape)
        return next((i for i in range(position, len(self.calls)) if self.calls[i].kind == kind), None)

    def refuse(self, layer: HostLayer, position: int, microbatch: int, more: str = "") -> NoReturn:
        """Raise because the trace has no call of ``layer`` at or after ``position``; ``more`` says what else counts."""
        expected = self.names[position] if position < len(self.calls) else None
        before = f"layer {self.names[position - 1]!r}" if position else "no other layer"
        raise OtherCalls(
            f"microbatch {microbatch} called layer {layer.name!r} after {before} where "
            + (f"layer {expected!r} was expected" if expected else "no further layer was expected"),
            f": with several microbatches each must call the layers in an order that the first batches have shown (it "
            f"may leave some out).{more}",
        )

    def measure(self, seconds: Mapping[tuple[str, int, int], list[float]], microbatch: int) -> None:
        """Set the durations of the calls. A recomputation takes as long as a forward, and is not the first to compile.

        Args:
            seconds: durations by (kind, microbatch, call), see `Recorder.call_seconds`; of several, the least counts.
            microbatch: number of the microbatch that recorded this trace.
        """
        for index, call in enumerate(self.calls):
            forwards = [s for kind in ("forward", "recompute") for s in seconds.get((kind, microbatch, index), ())]
            call.forward_s = min(forwards, default=0.0)
            call.backward_s = min(seconds.get(("backward", microbatch, index), [0.0]))

    def take_in(self, other: Trace, microbatch: int) -> None:
        """Merge ``other`` into this trace, which then contains the calls of both in order.

        Calls that both have keep the shorter times and the larger memory.

        Raises:
            OtherCalls: if ``other``, of ``microbatch``, calls the same layers in another order.
        """
        mine, theirs = [c.kind for c in self.calls], [c.kind for c in other.calls]
        calls: list[TracedCall] = []
        for tag, i, j, k, n in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
            if tag == "equal":
                calls += self.calls[i:j]
                for call, again in zip(self.calls[i:j], other.calls[k:n], strict=True):
                    call.forward_s = _faster(call.forward_s, again.forward_s)
                    call.backward_s = _faster(call.backward_s, again.backward_s)
                    call.activation_bytes = max(call.activation_bytes, again.activation_bytes)
                    call.kept_bytes = max(call.kept_bytes, again.kept_bytes)
                    call.forward_bytes = _more(call.forward_bytes, again.forward_bytes)
                    call.backward_held_bytes = max(call.backward_held_bytes, again.backward_held_bytes)
            else:
                # No trace has shown the order of these layers. Most likely it is the order of registration.
                calls += heapq.merge(self.calls[i:j], other.calls[k:n], key=lambda call: call.layer.index)
        if Counter(c.kind for c in calls) != Counter(mine) | Counter(theirs):
            self._refuse_order(other, microbatch)
        uses: Counter[int] = Counter()
        for call in calls:
            call.use = uses[call.layer.index]
            uses[call.layer.index] += 1
        self.calls, self._uses = calls, uses

    def _refuse_order(self, other: Trace, microbatch: int) -> None:
        """Raise for the first call of ``other`` that is out of order. Layers that are new here may come anywhere."""
        known = {c.kind for c in self.calls}
        position = 0
        for call in other.calls:
            if call.kind in known:
                found = self.find(call.layer, position, can_tape=call.can_tape)
                if found is None:
                    self.refuse(call.layer, position, microbatch)
                position = found + 1

    def learn(self, others: Sequence[Trace], seconds: Mapping[tuple[str, int, int], list[float]], layers: int) -> bool:
        """Merge the traces of a batch's microbatches into this one.

        Args:
            others: the traces, by number of the microbatch.
            seconds: durations of their calls, see `Recorder.call_seconds`.
            layers: number of layers of the model.

        Returns:
            Whether the trace is complete. It is not if calls were skipped, some layers have never been called, and
            this batch has still shown new calls.

        Raises:
            OtherCalls: if the microbatches, or this batch and the ones before, call layers in different orders.
        """
        before = len(self.calls)
        if self.portions not in ([], others[0].portions):
            raise OtherCalls(
                f"training_step called {others[0].portions} in this batch and {self.portions} in the one before",
                ": with microbatch_scope='model' the first batches must call the same models.",
            )
        self.portions = others[0].portions
        for microbatch, other in sorted(enumerate(others), key=lambda pair: -len(pair[1].calls)):
            other.measure(seconds, microbatch)
            self.take_in(other, microbatch)  # the longest first: it shows most of the order
        if any(a.portion > b.portion for a, b in pairwise(self.calls)):
            raise OtherCalls(
                "a layer that some calls of the model have left out is called in several of them, so its place is "
                "unknown under microbatch_scope='model'",
                ".",
            )
        alike = all(len(other.calls) == len(self.calls) for other in others)
        self.has_skipped_calls |= not alike
        return alike or len(self.calls) == before or len({c.layer.index for c in self.calls}) == layers

    def torn_buffer(self, plan: Plan | None = None) -> str | None:
        """Return a description of a buffer that calls in several forward stages of ``plan`` change; None if none is.

        Under such a plan, a microbatch's second call would find values that later microbatches have written.

        Args:
            plan: the plan. None: microbatches run side by side, where this holds for any two calls.
        """
        stages: dict[tuple[int, str, int], int] = {}
        for index, call in enumerate(self.calls):
            for module, name in call.layer.mutable_buffers.values():
                stage = plan.stage_of_forward[index] if plan is not None else index
                if stages.setdefault((id(module), name, call.portion), stage) != stage:
                    return f"buffer {name!r} of {type(module).__name__} in layer {call.layer.name!r}"
        return None

    def costs(self, reduce_dtype: torch.dtype | None = None, unpack_s: Callable[[int], float] | None = None) -> Costs:
        """Return the costs of the calls for the planner.

        Args:
            reduce_dtype: the format in which gradients travel.
            unpack_s: seconds in which packed weights are unpacked, by the bytes that are read and written.
        """
        return Costs(tuple(_cost_of(call, reduce_dtype, unpack_s) for call in self.calls))


def _cost_of(
    call: TracedCall, reduce_dtype: torch.dtype | None, unpack_s: Callable[[int], float] | None = None
) -> CallCost:
    crossed = call.crossed or Crossed()
    gradients = GradientLayout(call.layer, dtype=reduce_dtype) if call.taped else None
    copies, of_forward = call.layer.copies_nbytes, call.layer.copies_of_forward_nbytes

    def unpacking_s(copies: int) -> float:
        return unpack_s(copies + call.layer.nbytes) if unpack_s is not None and copies else 0.0

    return CallCost(
        layer=call.layer.name,
        forward_s=call.forward_s,
        backward_s=call.backward_s,
        weight_bytes=call.layer.nbytes,
        gradient_bytes=gradients.nbytes if gradients is not None else 0,
        boundary_bytes=call.boundary_bytes,
        activation_bytes=max(call.activation_bytes, call.kept_bytes),
        needs_backward=call.taped,
        kept_bytes=call.kept_bytes,
        forward_bytes=call.forward_bytes,
        returning_bytes=call.returning_bytes,
        backward_held_bytes=call.backward_held_bytes,
        reduced_bytes=gradients.travel_nbytes if gradients is not None and gradients.narrowed else None,
        unpacked_bytes=copies,
        unpack_s=unpacking_s(of_forward),
        backward_unpack_s=unpacking_s(copies) if call.taped else 0.0,
        **dataclasses.asdict(crossed),
    )


def _more(a: int | None, b: int | None) -> int | None:
    """Return the larger number, where None means that nothing was measured."""
    return max((each for each in (a, b) if each is not None), default=None)


def _faster(a: float, b: float) -> float:
    """Return the smaller number, where 0 means that nothing was measured."""
    return min(a, b) or max(a, b)


def distinct_layers(calls: Sequence[TracedCall]) -> list[HostLayer]:
    return list({c.layer.index: c.layer for c in calls}.values())
