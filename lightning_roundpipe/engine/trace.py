"""The trace: the calls of a microbatch, as the first window has shown them. A plan cuts it into stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_roundpipe.engine.carrying import Measuring
from lightning_roundpipe.estimates.crossing import Crossed
from lightning_roundpipe.memory.grad_buffers import GradientLayout
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.planning.costs import CallCost

_NOTHING = Crossed()


@dataclass
class CallMemory:
    """Bytes that a call holds on its worker.

    Attributes:
        activation_bytes: peak memory of the call, backward included.
        kept_bytes: peak memory of the forward, with its graph.
        forward_bytes: the same, and of user code behind it, when the graph has been dropped.
        returning_bytes: size of the gradients of its outputs.
        backward_held_bytes: outputs of calls, and what user code has made, that are alive when its backward begins.
        behind_bytes: peak of the user code behind it.
        handing_bytes: peak of the backward through user code in front of it.
    """

    activation_bytes: int = 0
    kept_bytes: int = 0
    forward_bytes: int = 0
    returning_bytes: int = 0
    backward_held_bytes: int = 0
    behind_bytes: int = 0
    handing_bytes: int = 0


@dataclass
class TracedCall:
    """One call.

    Attributes:
        use: how often the microbatch has called the layer before.
        forward_s, backward_s: seconds that they take.
        crossed: tensors that it shares with earlier calls.
        recomputable: inputs that a recomputation may make again; see `CallCost`.
        seen: what was seen of its products.
        products: bytes of outputs of its products that can be carried, and their share of its forward's time, by FLOPs
            for each byte.
    """

    layer: HostLayer
    use: int
    taped: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    worker: int = 0
    memory: CallMemory = field(default_factory=CallMemory)
    crossed: Crossed = _NOTHING
    recomputable: tuple[tuple[int, int, int], ...] = ()
    seen: Measuring | None = None
    products: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    def cost(self, dtype: torch.dtype | None, unpack_s: Callable[[int], float]) -> CallCost:
        """Return its cost for the planner.

        Args:
            dtype: in which gradients travel; None: in their own.
            unpack_s: seconds in which packed weights are unpacked, by the bytes that are read and written.
        """
        layer, copies, memory = self.layer, self.layer.seen.copies_nbytes, self.memory
        gradients = GradientLayout(layer, dtype=dtype) if self.taped else None
        unpacking_s = unpack_s(copies + layer.weights.nbytes) if copies else 0.0

        return CallCost(
            layer=layer.name,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            weight_bytes=layer.weights.nbytes,
            gradient_bytes=gradients.nbytes if gradients is not None else 0,
            boundary_bytes=self.crossed.input_bytes - sum(size for _, size in self.crossed.shared),
            needs_backward=self.taped,
            reduced_bytes=gradients.travel_nbytes if gradients is not None and gradients.narrowed else None,
            unpacked_bytes=copies,
            unpack_s=unpacking_s,
            backward_unpack_s=unpacking_s if self.taped else 0.0,
            products=tuple(
                (flops, nbytes, share * self.forward_s) for flops, (nbytes, share) in sorted(self.products.items())
            ),
            recomputable=self.recomputable,
            **dataclasses.asdict(self.crossed),
            **{**vars(memory), "activation_bytes": max(memory.activation_bytes, memory.kept_bytes)},
        )


@dataclass
class Trace:
    """The calls of a microbatch, in order. A microbatch may leave some out; others run outside of the plan."""

    calls: list[TracedCall] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [call.layer.name for call in self.calls]

    def find(self, layer: HostLayer, start: int, *, taped: bool) -> int | None:
        """Return the position of the first such call at or behind ``start``; None if there is none."""
        for position in range(start, len(self.calls)):
            if self.calls[position].layer is layer and self.calls[position].taped is taped:
                return position
        return None

    @functools.cached_property
    def held(self) -> list[tuple[int, int]]:
        """First and last call of each layer that changes buffers in several calls.

        The next microbatch comes behind the last one: what is in the buffers depends on the order of calls.
        """
        positions: dict[HostLayer, list[int]] = {}
        for index, call in enumerate(self.calls):
            if call.layer.buffers.mutable:
                positions.setdefault(call.layer, []).append(index)
        return [(mine[0], mine[-1]) for mine in positions.values() if len(mine) > 1]

    def measure(self, seconds: Mapping[tuple[str, int, int], list[float]], microbatch: int) -> None:
        """Set the times of the calls. A recomputation takes as long as a forward, and is not the first to compile.

        ``seconds``: by kind of event, microbatch and call; of several, the least counts.
        """
        for index, call in enumerate(self.calls):
            forwards = [s for kind in ("forward", "recompute") for s in seconds.get((kind, microbatch, index), ())]
            call.forward_s = min(forwards, default=0.0)
            call.backward_s = min(seconds.get(("backward", microbatch, index), [0.0]))
            if call.seen is not None and call.taped:
                call.products = call.seen.shares()
            call.seen = None

    def see_forwards(self, seconds: Mapping[tuple[str, int, int], list[float]]) -> None:
        """Lower the times of the calls' forwards to those of any microbatch that took less; see `measure`."""
        for (_, _, position), times in seconds.items():
            call = self.calls[position]
            call.forward_s = min(call.forward_s, *times)

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Trace:
        """Return the longest of several microbatches' traces, with the shorter times and the larger memory of all."""
        longest = max(traces, key=lambda trace: len(trace.calls))
        for other in traces:
            if other is longest or other.names != longest.names:
                continue
            for mine, theirs in zip(longest.calls, other.calls, strict=True):
                for name in ("forward_s", "backward_s"):
                    setattr(mine, name, min(getattr(mine, name), getattr(theirs, name)))
                pairs = [(flops, p, theirs.products.get(flops, p)) for flops, p in mine.products.items()]
                mine.products = {flops: (max(p[0], o[0]), min(p[1], o[1])) for flops, p, o in pairs}
                for name, most in vars(theirs.memory).items():
                    setattr(mine.memory, name, max(getattr(mine.memory, name), most))
        return longest
