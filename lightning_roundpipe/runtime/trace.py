"""The trace: the calls that one microbatch makes, as learned from the first batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.runtime.events import Recorder
from lightning_roundpipe.runtime.sides import Key
from lightning_roundpipe.runtime.weights import GradientLayout, HostLayer


@dataclass
class TracedCall:
    """One call.

    Attributes:
        use: how often the layer was called before in the microbatch.
        taped: whether a gradient passes through it or reaches its weights.
        can_tape: whether gradients were on and something could require them.
        needs_grad_mode: whether its forward computes other bits without grad.
        flags: per tensor output (mutated inputs last), whether it requires grad.
        sides: by side door through which gradients pass, whether each of its tensors requires grad.
        mutates: positions of arguments that it writes to.
        overwritten: positions of arguments that glue writes to between the call and its backward.
    """

    layer: HostLayer
    use: int
    taped: bool = False
    can_tape: bool = False
    needs_grad_mode: bool = False
    flags: tuple[bool, ...] = ()
    sides: dict[Key, tuple[bool, ...]] = field(default_factory=dict)
    mutates: frozenset[int] = frozenset()
    overwritten: set[int] = field(default_factory=set)
    boundary_bytes: int = 0
    activation_bytes: int = 0


@dataclass
class Trace:
    calls: list[TracedCall] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [c.layer.name for c in self.calls]

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
        for index in range(position, len(self.calls)):
            if self.calls[index].layer is layer:
                return index
        expected = self.names[position] if position < len(self.calls) else None
        before = f"layer {self.names[position - 1]!r}" if position else "no other layer"
        raise RoundPipeError(
            f"microbatch {microbatch} called layer {layer.name!r} after {before} where "
            + (f"layer {expected!r} was expected" if expected else "no further layer was expected")
            + ": with several microbatches each must call the layers in the order of the first batch's first "
            "microbatch (it may leave some out). Set num_microbatches=1, without a plan, which allows any control flow."
        )

    def costs(self, recorder: Recorder) -> Costs:
        """What the calls cost, from the first batch's measurements: the fastest of its microbatches."""
        seconds = recorder.call_seconds()

        def fastest(kind: str, call: int) -> float:
            return min(seconds.get((kind, call), [0.0]))

        return Costs(
            tuple(
                CallCost(
                    layer=c.layer.name,
                    forward_s=fastest("forward", i),
                    backward_s=fastest("backward", i),
                    weight_bytes=c.layer.nbytes,
                    gradient_bytes=GradientLayout(c.layer).nbytes if c.taped else 0,
                    boundary_bytes=c.boundary_bytes,
                    activation_bytes=c.activation_bytes,
                    needs_backward=c.taped,
                )
                for i, c in enumerate(self.calls)
            )
        )


def distinct_layers(calls: Sequence[TracedCall]) -> list[HostLayer]:
    return list({c.layer.index: c.layer for c in calls}.values())
