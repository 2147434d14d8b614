"""The trace: the calls of a microbatch, as the first window has shown them. A plan cuts it into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_roundpipe.runtime.memory.host_layer import HostLayer


@dataclass
class TracedCall:
    """One call.

    Attributes:
        layer: the called layer.
        use: how often the microbatch has called the layer before.
        taped: whether a backward follows.
        forward_s, backward_s: seconds that they take.
        boundary_bytes: host memory of its saved inputs, without those that earlier calls have saved.
        activation_bytes: peak memory of the call on its worker, backward included.
        kept_bytes: peak memory of the forward, with its graph.
    """

    layer: HostLayer
    use: int
    taped: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    boundary_bytes: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0


@dataclass
class Trace:
    """The calls of a microbatch, in order. A microbatch may leave some out; others run outside of the plan."""

    calls: list[TracedCall] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [call.layer.name for call in self.calls]

    def find(self, layer: HostLayer, start: int, *, taped: bool) -> int | None:
        """Return the position of the first such call at or behind ``start``; None if there is none."""
        return next(
            (i for i in range(start, len(self.calls)) if self.calls[i].layer is layer and self.calls[i].taped is taped),
            None,
        )

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Trace:
        """Return the longest of several microbatches' traces, with the shorter times and the larger memory of all."""
        longest = max(traces, key=lambda trace: len(trace.calls))
        for other in traces:
            if other is longest or other.names != longest.names:
                continue
            for mine, theirs in zip(longest.calls, other.calls, strict=True):
                mine.forward_s = min(mine.forward_s, theirs.forward_s)
                mine.backward_s = min(mine.backward_s, theirs.backward_s)
                mine.activation_bytes = max(mine.activation_bytes, theirs.activation_bytes)
                mine.kept_bytes = max(mine.kept_bytes, theirs.kept_bytes)
                mine.boundary_bytes = max(mine.boundary_bytes, theirs.boundary_bytes)
        return longest
