"""When a layer's new weights are there: the optimizer as one thread on the host that takes layers as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs


@dataclass(frozen=True)
class Updates:
    """How the optimizer works.

    Args:
        bytes_per_s: bytes of gradients that it takes in a second.
        clipping: whether it needs the norm of all gradients first.
    """

    bytes_per_s: float
    clipping: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r} must be more than 0 bytes of gradients a second.")


class Updating:
    """The optimizer's thread through all steps; without ``updates`` it takes no time."""

    def __init__(self, updates: Updates | None, costs: Costs) -> None:
        self._updates = updates
        self._free = 0.0
        self._sizes: dict[str, int] = {}
        for call in costs:
            size = call.gradient_bytes if call.needs_backward else 0
            self._sizes[call.layer] = max(size, self._sizes.get(call.layer, 0))

    def step(self, arrived: Mapping[str, float]) -> list[tuple[str, float, float]]:
        """Layer, start and end of each update of a step, given when each layer's gradients were on the host.

        One after another as they arrive. With clipping all wait for the last, and then the trace's first layer goes
        first, because the next step's forward asks for it first.
        """
        if self._updates is None:
            return [(layer, ready, ready) for layer, ready in arrived.items()]
        order = sorted(arrived, key=lambda layer: arrived[layer])
        last = max(arrived.values(), default=0.0)
        if self._updates.clipping:
            order = [layer for layer in self._sizes if layer in arrived]
        rows = []
        for layer in order:
            start = max(self._free, last if self._updates.clipping else arrived[layer])
            self._free = start + self._sizes[layer] / self._updates.bytes_per_s
            rows.append((layer, start, self._free))
        return rows
