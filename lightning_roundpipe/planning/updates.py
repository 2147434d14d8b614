"""Simulates the optimizer: one thread on the host, which updates layers as their gradients arrive."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_roundpipe.config import OPTIMIZER_STATES
from lightning_roundpipe.planning.costs import Costs


def adamw_bytes(
    moments: str = "fp32", copy_bytes: int = 0, reduced_bytes: int | None = None, *, scales: bool = False
) -> float:
    """Return the memory traffic of an AdamW update for a weight: all of it is read, and all but the gradient written.

    Args:
        moments: form of the moments, one of `config.OPTIMIZER_STATES`.
        copy_bytes: bytes of the working copy, which is written, too; 0: there is none, or the weight contains it.
        reduced_bytes: bytes of a gradient that travels narrowed, and is read so; None: it travels as it is.
        scales: whether the gradient is multiplied first, as clipping by norm does. A narrow one is when it is read.
    """
    gradient = (3 * 4 if scales else 4) if reduced_bytes is None else reduced_bytes
    return 2 * 4 + gradient + 2 * 2 * OPTIMIZER_STATES[moments] + copy_bytes


@dataclass(frozen=True)
class UpdateModel:
    """Rate and rules of the optimizer.

    Args:
        bytes_per_s: bytes of gradients that it updates per second.
        at_once: whether it needs all gradients first, as clipping by norm and loss scaling do.
        blocking: whether it begins after the whole backward, and the next step begins after it.

    Raises:
        ValueError: the rate is not more than 0.
    """

    bytes_per_s: float
    at_once: bool = False
    blocking: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r} must be more than 0 bytes of gradients a second.")

    @property
    def together(self) -> bool:
        """Whether updates wait for all gradients."""
        return self.at_once or self.blocking


class Updating:
    """Simulates the optimizer's thread through all steps; ``updates`` None: they take no time.

    Attributes:
        free: end of the last update.
    """

    def __init__(self, updates: UpdateModel | None, costs: Costs) -> None:
        self._updates = updates
        self.free = 0.0
        self._sizes: dict[str, int] = {}
        for call in costs:
            size = call.gradient_bytes if call.needs_backward else 0
            self._sizes[call.layer] = max(size, self._sizes.get(call.layer, 0))
        self._turns = {layer: turn for turn, layer in enumerate(self._sizes)}

    def step(self, arrived: Mapping[str, float]) -> list[tuple[str, float, float]]:
        """Return layer, start and end of each update of a step.

        ``arrived`` has the time at which each layer's gradients are on the host. Of the layers that are there, the
        first in the trace goes first, because the next step's forward needs it first. If updates go
        together, all wait for the last.
        """
        if self._updates is None:
            return [(layer, ready, ready) for layer, ready in arrived.items()]
        last = max(arrived.values(), default=0.0)
        comes = dict.fromkeys(arrived, last) if self._updates.together else arrived
        coming = sorted(comes, key=lambda layer: comes[layer], reverse=True)
        there: list[tuple[int, str]] = []
        rows = []
        while coming or there:
            if not there:
                self.free = max(self.free, comes[coming[-1]])
            while coming and comes[coming[-1]] <= self.free:
                layer = coming.pop()
                heapq.heappush(there, (self._turns[layer], layer))
            _, layer = heapq.heappop(there)
            start = self.free
            self.free += self._sizes[layer] / self._updates.bytes_per_s
            rows.append((layer, start, self.free))
        return rows

    def published(self, rows: list[tuple[str, float, float]]) -> dict[str, float]:
        """Return when the next step may begin to upload each layer, given the rows of `step`."""
        if self._updates is not None and self._updates.blocking:
            return dict.fromkeys((layer for layer, *_ in rows), max((end for *_, end in rows), default=0.0))
        return {layer: end for layer, _, end in rows}
