"""Costs of the calls of a microbatch: times in seconds, sizes in bytes.

The partitioner, the simulations, memory estimates and printed tables all take the time and the bytes of a stage from
here, so they agree.

How the three phases of a stage differ:

========  ===================================  ==================  ====================================
phase     time                                 weights, gradients  activations held at once
========  ===================================  ==================  ====================================
forward   forward                              weights             the worst call's
fused     forward + backward (graph is kept)   both                what all its calls' graphs keep, and
                                                                   what a backward takes beside them
backward  recomputation (forward) + backward   both                the worst call's
========  ===================================  ==================  ====================================

A call that needs no backward (a frozen embedding) is neither recomputed nor uploaded again in a backward stage: there
it costs nothing. In a fused stage it still runs forward, but nothing of it is kept.

Workers may be unequal: then each has times of its own, and sizes are the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from statistics import harmonic_mean
from typing import Any, Literal, TypeVar

from lightning_roundpipe.config import is_number
from lightning_roundpipe.messages import plural

S = TypeVar("S")
T = TypeVar("T")

Phase = Literal["forward", "fused", "backward"]
"""Phase of a stage: forward; forward and backward in one; or recomputation and backward."""

_TUPLES = ("shared", "passed", "recomputable", "products")
_OPTIONAL = ("kept_bytes", "forward_bytes", "reduced_bytes")
_OF_WEIGHTS = ("weight_bytes", "gradient_bytes", "reduced_bytes", "unpacked_bytes")
"""Sizes that do not depend on the microbatch."""


@dataclass(frozen=True)
class CallCost:
    """One call of one microbatch.

    Args:
        layer: name of the layer that is called; calls of one layer share its weights.
        forward_s: seconds of its forward, which is also the time of its recomputation.
        backward_s: seconds of its backward alone, without the recomputation. Ignored without ``needs_backward``.
        weight_bytes: the layer's weights as they travel to a worker.
        gradient_bytes: the gradients of its trainable weights on the worker.
        boundary_bytes: its inputs that no earlier call takes.
        activation_bytes: peak of what it holds on the worker: inputs, outputs, tensors saved by autograd, and in
            backward the gradients of its outputs.
        needs_backward: whether a gradient has to pass through it or to reach its weights.
        kept_bytes: the part of ``activation_bytes`` that a kept graph holds between forward and backward; None: all.
        input_bytes: the part of ``activation_bytes`` that its inputs take.
        forward_bytes: peak of a forward whose graph is dropped; None: ``activation_bytes``.
        waiting_bytes: outputs of earlier calls, and what user code has made, that a microbatch holds while it waits
            for this one.
        held_bytes: the part of ``waiting_bytes`` that is not among its inputs: user code or its autograd graph holds it
            while the forward runs.
        made_bytes: the part of ``held_bytes`` that user code has made and no call has taken.
        returning_bytes: gradients of its outputs, which it holds while it waits for this one's backward.
        backward_held_bytes: what these hold while its backward runs, and gradients that other calls have already got.
        behind_bytes: the part of ``activation_bytes`` that the user code behind it may take.
        handing_bytes: peak of the backward through user code in front of it, which runs on the worker where that code
            has run, beside the stage that this one runs meanwhile.
        shared: inputs that are also inputs of an earlier call: (how many calls before, bytes) for each such call.
        passed: inputs that are outputs of an earlier call, likewise.
        recomputable: inputs that no call before takes, and that an earlier call's recomputation may give: (how many
            calls before that is, how many calls behind is the last one that takes them, bytes).
        issue_s: seconds of the host's interpreter to issue a forward or a recomputation.
        is_synchronous: whether the host waits for the device within the forward, so that nothing is issued ahead.
        reduced_bytes: its gradients as they travel to the host, which sums them (``reduce_dtype``). None: they travel
            as they are on the worker, and a later round goes on from the sum of those before.
        backward_issue_s: seconds of the interpreter that its backward takes: autograd issues operations without it, but
            for those that dequantise packed weights.
        unpacked_bytes: copies of its packed weights, where a stage unpacks them once.
        unpack_s: seconds of a forward in which these are made, where each use makes its own. 0: only backward does.
        backward_unpack_s: the same of its backward.
        products: its matrix products and attention, which a plan may carry: FLOPs for each byte of outputs, bytes of
            outputs, and the part of ``forward_s`` that they take, which a recomputation leaves out if they are carried.
    """

    layer: str
    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int
    boundary_bytes: int
    activation_bytes: int
    needs_backward: bool
    kept_bytes: int | None = None
    input_bytes: int = 0
    forward_bytes: int | None = None
    waiting_bytes: int = 0
    held_bytes: int = 0
    made_bytes: int = 0
    returning_bytes: int = 0
    backward_held_bytes: int = 0
    behind_bytes: int = 0
    handing_bytes: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    passed: tuple[tuple[int, int], ...] = ()
    recomputable: tuple[tuple[int, int, int], ...] = ()
    reduced_bytes: int | None = None
    issue_s: float = 0.0
    is_synchronous: bool = False
    backward_issue_s: float = 0.0
    unpacked_bytes: int = 0
    unpack_s: float = 0.0
    backward_unpack_s: float = 0.0
    products: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not name.endswith(("_s", "_bytes")) or (value is None and name in _OPTIONAL):
                continue
            if not (is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name}={value!r} of layer {self.layer!r} must be a number of at least 0.")

    @property
    def graph_bytes(self) -> int:
        """Bytes that its graph keeps until its backward."""
        return self.activation_bytes if self.kept_bytes is None else min(self.kept_bytes, self.activation_bytes)

    def time_s(self, phase: Phase) -> float:
        """Return the seconds that a stage of this phase spends on the call, for one microbatch."""
        if phase == "forward":
            return self.forward_s
        if not self.needs_backward:
            return self.forward_s if phase == "fused" else 0.0
        return self.forward_s + self.backward_s

    def product_bytes(self, least: int = 0) -> int:
        """Return the bytes of its products of at least so many FLOPs a byte; 0: of all."""
        return sum(nbytes for flops, nbytes, _ in self.products if flops >= least)

    def recompute_s(self, least: int) -> float:
        """Return the seconds of its recomputation if its products of at least so many FLOPs a byte are carried."""
        return max(0.0, self.forward_s - sum(seconds for flops, _, seconds in self.products if flops >= least))

    def unpacked_once(self, microbatches: int) -> CallCost:
        """What the call costs on average in a stage that unpacks its weights in the first of ``microbatches`` only."""
        if not self.unpacked_bytes:
            return self
        later = 1 - 1 / microbatches
        issued = self.backward_issue_s if self.backward_unpack_s else 0.0  # the forward issues as many of these
        return replace(
            self,
            forward_s=max(0.0, self.forward_s - later * self.unpack_s),
            backward_s=max(0.0, self.backward_s - self.backward_unpack_s),
            issue_s=max(0.0, self.issue_s - later * issued),
            backward_issue_s=self.backward_issue_s - issued,
        )

    def is_loaded(self, phase: Phase) -> bool:
        """Return whether a stage of this phase needs the call's weights on the worker."""
        return self.needs_backward or phase != "backward"


class StageBytes:
    """Running sum of the bytes that a stage needs on its worker.

    The partitioner adds call after call, and asks each time whether the stage still fits. A layer that the stage calls
    twice is resident once, but its gradients are summed call by call.

    Args:
        phase: phase of the stage.
        ahead: whether a backward stage keeps the graphs of all its calls at once.

    Attributes:
        weights: bytes of resident weights.
        gradients: bytes of gradients on the worker.
        resumed: bytes of gradients of earlier rounds that it starts from.
        copies: of packed weights, if the stage unpacks them once.
        activations: of one microbatch in the stage, at its worst, with what its user code holds.
        crowded: the same with the inputs of its next call, which come while one runs.
    """

    def __init__(self, phase: Phase, ahead: bool = False) -> None:
        self._phase = phase
        self._keeps = phase == "fused" or (phase == "backward" and ahead)
        self._resident: dict[str, int] = {}
        self._kept = 0  # by graphs that live until backward
        self._calls: list[bool] = []
        """Whether each call's graph is kept."""
        self._held_before = 0
        """Bytes that user code holds of inputs and outputs of calls before the first graph that a fused stage keeps."""
        self._before: int | None = None
        """Bytes of the previous call's inputs, which follow in backward."""
        self._copied: dict[str, int] = {}
        self.weights = self.gradients = self.resumed = self.copies = self.activations = self.crowded = 0

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and activations."""
        return self.weights + self.gradients + self.activations

    def add(self, call: CallCost) -> None:
        """Append a call to the stage."""
        keeps = self._keeps and call.needs_backward
        if call.is_loaded(self._phase):
            self.weights += _growth(self._resident, call.layer, call.weight_bytes)
            self.copies += _growth(self._copied, call.layer, call.unpacked_bytes)
            if self._phase != "forward" and call.needs_backward:
                self.gradients += call.gradient_bytes
                self.resumed += call.gradient_bytes if call.reduced_bytes is None else 0
            beside = self._own(call) + self._held(call)
            if keeps:
                self._kept += max(0, call.graph_bytes - self._there(call))
                beside -= call.graph_bytes
            beside += self._kept
            self.activations = max(self.activations, beside)
            self.crowded = max(self.crowded, beside + self._following(call))
            self._before = call.input_bytes
        self._calls.append(keeps)

    def _own(self, call: CallCost) -> int:
        """Return the peak bytes of the call alone."""
        if self._phase == "forward" and call.forward_bytes is not None:
            return min(call.forward_bytes, call.activation_bytes)
        return call.activation_bytes

    def _held(self, call: CallCost) -> int:
        """Return the bytes that user code holds while the call runs, without those that count elsewhere.

        The graphs of a fused stage keep the inputs and outputs of its own calls, and user code what else it has made
        between them.
        """
        if self._phase == "fused":
            if not self._kept:
                self._held_before = call.held_bytes - call.made_bytes
            return self._held_before + call.made_bytes
        return call.held_bytes if self._phase == "forward" else call.backward_held_bytes

    def _there(self, call: CallCost) -> int:
        """Return the bytes of its inputs that graphs of the stage keep already, or user code from before it.

        A backward stage uploads inputs from the host, except for those that it makes again.
        """
        kept = [*call.shared, *(call.passed if self._phase == "fused" else ())]
        kept += [(before, size) for before, _, size in call.recomputable if self._phase != "fused"]
        found = sum(size for distance, size in kept if distance <= len(self._calls) and self._calls[-distance])
        before = (size for distance, size in call.passed if distance > len(self._calls) > 0)
        return found + (sum(before) if self._phase == "fused" else 0)

    def _following(self, call: CallCost) -> int:
        """Return the bytes of inputs that are uploaded for the next call while this one runs backward."""
        if self._phase != "backward" or self._keeps or self._before is None:
            return 0
        return max(0, self._before - sum(size for distance, size in call.shared if distance == 1))


def _growth(largest: dict[str, int], layer: str, nbytes: int) -> int:
    """Note the largest size of a layer, and return by how much it has grown."""
    before = largest.get(layer, 0)
    largest[layer] = max(before, nbytes)
    return largest[layer] - before


_Times = tuple[tuple[float, float], ...]
"""Seconds of each call's forward and backward."""


@dataclass(frozen=True)
class Costs:
    """The calls of one microbatch in the order of the trace. ``first`` and ``last`` are call numbers, both included.

    Attributes:
        calls: cost of each call. If workers are unequal, times are harmonic means over the workers: N busy workers do
            as much in that time as N equal ones.
        times: seconds of all calls on each worker if workers are unequal, else empty.
    """

    calls: tuple[CallCost, ...]
    times: tuple[_Times, ...] = ()

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("Costs need at least one call: the model made none, so there is nothing to plan.")
        if any(len(times) != len(self.calls) for times in self.times):
            raise ValueError(
                f"Costs of unequal workers need times of {plural(len(self.calls), 'call')} for each worker."
            )

    @classmethod
    def of_workers(cls, each: Sequence[Costs]) -> Costs:
        """Return the costs of the same calls on workers that may be unequal. ``each`` has the costs on each worker."""
        times = tuple(tuple((call.forward_s, call.backward_s) for call in costs) for costs in each)
        if len(set(times)) == 1:
            return each[0]
        of_calls = (zip(*seconds, strict=True) for seconds in zip(*times, strict=True))
        means = [(harmonic_mean(forward), harmonic_mean(backward)) for forward, backward in of_calls]
        return cls(each[0]._with_seconds(means).calls, times)

    def at_speeds(self, speeds: Sequence[float]) -> Costs:
        """Return the costs on a worker for each of ``speeds``. A worker of speed 2 takes half of the times here.

        Raises:
            ValueError: a speed is not a positive number.
        """
        if any(not 0 < speed < math.inf for speed in speeds):
            raise ValueError(f"speeds={list(speeds)!r} must be numbers of more than 0, one for each worker.")
        seconds = [[(call.forward_s / speed, call.backward_s / speed) for call in self] for speed in speeds]
        return Costs.of_workers([self._with_seconds(own) for own in seconds])

    def _with_seconds(self, seconds: Iterable[tuple[float, float]]) -> Costs:
        """Return the same calls with other times: a pair of forward and backward seconds for each."""

        def timed(call: CallCost, forward: float, backward: float) -> CallCost:
            products = tuple(
                (flops, nbytes, taken * forward / call.forward_s if call.forward_s else 0.0)
                for flops, nbytes, taken in call.products
            )
            return replace(call, forward_s=forward, backward_s=backward, products=products)

        return Costs(tuple(timed(call, *pair) for call, pair in zip(self.calls, seconds, strict=True)))

    @property
    def unequal(self) -> bool:
        """Whether workers differ."""
        return bool(self.times)

    def check_workers(self, workers: int) -> None:
        """Raise ``ValueError`` if these are costs of unequal workers, and their number is not ``workers``."""
        if self.times and len(self.times) != workers:
            raise ValueError(f"workers={workers} must be {len(self.times)}: the costs have times for each of so many.")

    def on(self, worker: int) -> Costs:
        """Return the costs on one worker. Equal workers share one object."""
        return self._each[worker] if self.times else self

    def map(self, change: Callable[[CallCost], CallCost]) -> Costs:
        """Return the costs of changed calls."""
        return Costs(tuple(map(change, self.calls)))

    def unpacked_once(self, microbatches: int) -> Costs:
        """What the calls cost in stages that unpack packed weights once for ``microbatches``."""
        if not any(call.unpacked_bytes for call in self.calls):
            return self
        return self.map(lambda call: call.unpacked_once(microbatches))

    def carrying(self, calls: Collection[int], least: int = 0) -> Costs:
        """What the calls cost in backward stages, where products of ``calls`` are carried (`CallCost.recompute_s`)."""
        if not calls:
            return self
        pairs = enumerate(self.calls)
        return Costs(tuple(replace(c, forward_s=c.recompute_s(least)) if n in calls else c for n, c in pairs))

    def holding_copies(self, microbatches: int, stages: int) -> Costs:
        """`unpacked_once`, with the copies counted as weights: for cutting stages that have room for them.

        ``stages``: how many have room in the arena for weights, so that each has its part of the one for copies.
        """

        def holding(call: CallCost) -> CallCost:
            return replace(call, weight_bytes=call.weight_bytes + -(-call.unpacked_bytes // stages), unpacked_bytes=0)

        return self.unpacked_once(microbatches).map(holding)

    def of_part(self, parts: int) -> Costs:
        """Return the calls of a microbatch with a ``parts``-th of the samples, whose activations take as much less."""
        sizes = [item.name for item in fields(CallCost) if item.name.endswith("_bytes")]
        sizes = [name for name in sizes if name not in _OF_WEIGHTS]

        def part(call: CallCost) -> CallCost:
            return replace(
                call,
                shared=tuple((distance, size // parts) for distance, size in call.shared),
                passed=tuple((distance, size // parts) for distance, size in call.passed),
                recomputable=tuple((before, behind, size // parts) for before, behind, size in call.recomputable),
                products=tuple((flops, nbytes // parts, seconds) for flops, nbytes, seconds in call.products),
                **{name: -(-value // parts) for name in sizes if (value := getattr(call, name)) is not None},
            )

        return self.map(part)

    @cached_property
    def _each(self) -> list[Costs]:
        known = {times: self._with_seconds(times) for times in set(self.times)}
        return [known[times] for times in self.times]

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[CallCost]:
        return iter(self.calls)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layer of each call; a layer that is called twice appears twice."""
        return tuple(call.layer for call in self.calls)

    def stage_time_s(self, first: int, last: int, phase: Phase) -> float:
        """Return the seconds that a stage takes for one microbatch."""
        return math.fsum(call.time_s(phase) for call in self.calls[first : last + 1])

    def stage_bytes(self, first: int, last: int, phase: Phase, ahead: bool = False) -> StageBytes:
        """Return the bytes that a stage needs on its worker.

        ``ahead``: whether a backward stage recomputes all its calls before its gradient is there.
        """
        if (need := self._stages.get((first, last, phase, ahead))) is None:
            need = self._stages[first, last, phase, ahead] = StageBytes(phase, ahead)
            for call in self.calls[first : last + 1]:
                need.add(call)
        return need

    @cached_property
    def _stages(self) -> dict[tuple[int, int, Phase, bool], StageBytes]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and text that JSON can hold. ``Costs.from_dict`` is the inverse."""
        times = {"times": [[list(pair) for pair in worker] for worker in self.times]} if self.times else {}
        return {"calls": [asdict(call) for call in self.calls], **times}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """Return the costs that ``to_dict`` has written.

        Raises:
            ValueError: they are in another form.
        """
        try:
            calls = [
                CallCost(**call | {key: tuple(map(tuple, call.get(key, ()))) for key in _TUPLES})
                for call in data["calls"]
            ]
            times = tuple(tuple((forward, backward) for forward, backward in each) for each in data.get("times", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Costs must be as Costs.to_dict() writes them: {type(error).__name__}: {error}"
            ) from error
        return cls(tuple(calls), times)


def for_each(items: Sequence[S], function: Callable[[S], T]) -> list[T]:
    """Return ``function`` of each item, called once for items that are one object, as the costs of equal workers."""
    known = {id(one): function(one) for one in {id(one): one for one in items}.values()}
    return [known[id(one)] for one in items]
