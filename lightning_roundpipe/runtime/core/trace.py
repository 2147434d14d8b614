"""The trace: the calls that one microbatch makes, as learned from the first batch.

A model that leaves layers out (layer drop) makes other calls in each microbatch. Its trace is what all of them are
parts of, in order; each microbatch passes over the calls that it does not make.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NoReturn

import torch

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.crossing import Crossed, Crossing
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.layer_calls.precedent import Precedent
from lightning_roundpipe.runtime.layer_calls.side_outputs import Key
from lightning_roundpipe.runtime.memory.grad_buffers import GradientLayout
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


@dataclass
class TracedCall:
    """One call.

    Attributes:
        use: how often the layer was called before in the microbatch.
        portion: which of the model's calls by training_step it belongs to, if those are what is cut.
        taped: whether a gradient passes through it or reaches its weights.
        can_tape: whether gradients were on and something could require them.
        needs_grad_mode: whether its forward computes other bits without grad.
        flags: per tensor output (mutated inputs last), whether it requires grad.
        side_outputs: by side output through which gradients pass, whether each of its tensors requires grad.
        mutates: positions of arguments that it writes to.
        overwritten: positions of arguments that user code writes to between the call and its backward.
        precedent: what the same call of the next step may expect, without a plan.
        activation_bytes: what it took on its worker at its worst; ``kept_bytes``: without its backward;
            ``forward_bytes``: and without a graph, if that is known.
        returning_bytes: gradients of its outputs.
        crossed: what it has in common with calls before it.
    """

    layer: HostLayer
    use: int
    portion: int = 0
    taped: bool = False
    can_tape: bool = False
    needs_grad_mode: bool = False
    flags: tuple[bool, ...] = ()
    side_outputs: dict[Key, tuple[bool, ...]] = field(default_factory=dict)
    mutates: frozenset[int] = frozenset()
    overwritten: set[int] = field(default_factory=set)
    precedent: Precedent | None = None
    boundary_bytes: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0
    forward_bytes: int | None = None
    returning_bytes: int = 0
    crossed: Crossed | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0

    def then(self, nbytes: int) -> None:
        """The loss, which follows the call, took so much beside what its graph keeps."""
        self.activation_bytes = max(self.activation_bytes, self.kept_bytes + nbytes)


@dataclass
class Trace:
    """What microbatches call, in order; ``has_skipped_calls`` if some left out what others did not.

    ``portions`` are the names of what training_step calls, if that is what is cut.
    ``crossing`` is that of the microbatch that records it.
    """

    calls: list[TracedCall] = field(default_factory=list)
    has_skipped_calls: bool = False
    portions: list[str] = field(default_factory=list)
    crossing: Crossing = field(default_factory=Crossing, compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        return [c.layer.name for c in self.calls]

    def portion(self, number: int) -> range:
        """The calls of a portion; they stand together."""
        mine = [index for index, call in enumerate(self.calls) if call.portion == number]
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    def append(self, layer: HostLayer) -> TracedCall:
        uses = Counter(c.layer.index for c in self.calls)
        self.calls.append(TracedCall(layer, uses[layer.index]))
        return self.calls[-1]

    def has(self, position: int, layer: HostLayer) -> bool:
        """Whether the call at ``position`` is one of ``layer``."""
        return position < len(self.calls) and self.calls[position].layer is layer

    def ends_with(self, position: int) -> bool:
        """Whether ``position`` is that of the last call."""
        return position == len(self.calls) - 1

    def find(self, layer: HostLayer, position: int, microbatch: int) -> int:
        """The call that a microbatch makes when it calls ``layer`` with ``position`` calls behind it.

        Calls in between are skipped, as layer drop does.

        Raises:
            RoundPipeError: if the trace has no such call ahead.
        """
        found = self._ahead(layer, position)
        if found is None:
            self._refuse(layer, position, microbatch)
        return found

    def _ahead(self, layer: HostLayer, position: int) -> int | None:
        return next((i for i in range(position, len(self.calls)) if self.calls[i].layer is layer), None)

    def _refuse(self, layer: HostLayer, position: int, microbatch: int) -> NoReturn:
        expected = self.names[position] if position < len(self.calls) else None
        before = f"layer {self.names[position - 1]!r}" if position else "no other layer"
        raise RoundPipeError(
            f"microbatch {microbatch} called layer {layer.name!r} after {before} where "
            + (f"layer {expected!r} was expected" if expected else "no further layer was expected")
            + ": with several microbatches each must call the layers in an order that the first batches have shown (it "
            "may leave some out). Set num_microbatches=1, without a plan, which allows any control flow."
        )

    def measure(self, seconds: Mapping[tuple[str, int, int], list[float]], microbatch: int) -> None:
        """Take the durations of this microbatch's calls from `Recorder.call_seconds`."""
        for index, call in enumerate(self.calls):
            call.forward_s = min(seconds.get(("forward", microbatch, index), [0.0]))
            call.backward_s = min(seconds.get(("backward", microbatch, index), [0.0]))

    def take_in(self, other: Trace, microbatch: int) -> None:
        """Add the calls of ``other`` that are not here, so that both are parts of this.

        The fastest times are kept, and the most memory.

        Raises:
            RoundPipeError: if ``other``, of ``microbatch``, calls the same layers in another order.
        """
        mine, theirs = [c.layer.index for c in self.calls], [c.layer.index for c in other.calls]
        calls: list[TracedCall] = []
        for tag, i, j, k, n in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
            if tag == "equal":
                calls += self.calls[i:j]
                for call, again in zip(self.calls[i:j], other.calls[k:n], strict=True):
                    call.forward_s = _faster(call.forward_s, again.forward_s)
                    call.backward_s = _faster(call.backward_s, again.backward_s)
                    call.activation_bytes = max(call.activation_bytes, again.activation_bytes)
                    call.kept_bytes = max(call.kept_bytes, again.kept_bytes)
            else:
                # Layers never seen side by side most likely follow each other as they were registered.
                calls += heapq.merge(self.calls[i:j], other.calls[k:n], key=lambda call: call.layer.index)
        if Counter(c.layer.index for c in calls) != Counter(mine) | Counter(theirs):
            self._refuse_order(other, microbatch)
        uses: Counter[int] = Counter()
        for call in calls:
            call.use = uses[call.layer.index]
            uses[call.layer.index] += 1
        self.calls = calls

    def _refuse_order(self, other: Trace, microbatch: int) -> None:
        """Name the first call of ``other`` that comes too late; one of a layer that is not here may come anywhere."""
        known = {c.layer.index for c in self.calls}
        position = 0
        for call in other.calls:
            if call.layer.index in known:
                found = self._ahead(call.layer, position)
                if found is None:
                    self._refuse(call.layer, position, microbatch)
                position = found + 1

    def learn(self, others: Sequence[Trace], seconds: Mapping[tuple[str, int, int], list[float]], layers: int) -> bool:
        """Take in what each microbatch of a batch has called.

        Args:
            others: their traces.
            seconds: from `Recorder.call_seconds`.
            layers: how many there are to be called.

        Returns:
            Whether that is all: not if some were left out that the next batch may show.
        """
        before = len(self.calls)
        if self.portions not in ([], others[0].portions):
            raise RoundPipeError(
                f"training_step called {others[0].portions} in this batch and {self.portions} in the one before: with "
                "microbatch_scope='model' the first batches must call the same models. Set num_microbatches=1, without "
                "a plan, which allows any control flow."
            )
        self.portions = others[0].portions
        for microbatch, other in sorted(enumerate(others), key=lambda pair: -len(pair[1].calls)):
            other.measure(seconds, microbatch)
            self.take_in(other, microbatch)  # the longest first, as it shows most of the order
        if any(a.portion > b.portion for a, b in pairwise(self.calls)):
            raise RoundPipeError(
                "a layer that some calls of the model have left out is called in several of them, so its place is "
                "unknown: with microbatch_scope='model' set num_microbatches=1, without a plan."
            )
        alike = all(len(other.calls) == len(self.calls) for other in others)
        self.has_skipped_calls |= not alike
        return alike or len(self.calls) == before or len({c.layer.index for c in self.calls}) == layers

    def torn_buffer(self, plan: Plan) -> str | None:
        """A buffer that calls in several forward stages of ``plan`` change, described; None if there is none.

        Under such a plan a microbatch would find in it what later microbatches have left there.
        """
        stages: dict[tuple[int, str, int], int] = {}
        for index, call in enumerate(self.calls):
            for module, name in call.layer.mutable_buffers.values():
                stage = plan.stage_of_forward[index]
                if stages.setdefault((id(module), name, call.portion), stage) != stage:
                    return f"buffer {name!r} of {type(module).__name__} in layer {call.layer.name!r}"
        return None

    def costs(self, reduce_dtype: torch.dtype | None = None) -> Costs:
        """What the calls cost, of the microbatches that were measured; gradients travel in ``reduce_dtype``."""
        return Costs(tuple(_cost_of(call, reduce_dtype) for call in self.calls))


def _cost_of(call: TracedCall, reduce_dtype: torch.dtype | None) -> CallCost:
    crossed = call.crossed or Crossed()
    gradients = GradientLayout(call.layer, dtype=reduce_dtype) if call.taped else None
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
        forward_bytes=call.kept_bytes if call.needs_grad_mode else call.forward_bytes,
        returning_bytes=call.returning_bytes,
        reduced_bytes=gradients.travel_nbytes if gradients is not None and gradients.narrowed else None,
        **dataclasses.asdict(crossed),
    )


def _faster(a: float, b: float) -> float:
    """The smaller one; 0 is no measurement."""
    return min(a, b) or max(a, b)


def distinct_layers(calls: Sequence[TracedCall]) -> list[HostLayer]:
    return list({c.layer.index: c.layer for c in calls}.values())
