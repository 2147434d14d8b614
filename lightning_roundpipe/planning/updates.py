"""Simulates the optimizer: one thread on the host, which updates layers as their gradients arrive."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.links import Links

ADAMW_BYTES = 28
"""Memory traffic of AdamW for a weight: weight, gradient and moments are read, all but the gradient are written."""

PIECE_BYTES = 2**26
"""Bytes of gradients that the engine updates while the next ones arrive (`memory.grad_buffers.PART`)."""


@dataclass(frozen=True)
class UpdateModel:
    """Rate and rules of the optimizer.

    Args:
        bytes_per_s: bytes of gradients that it updates per second.
        clipping: whether it needs the norm of all gradients first.
        blocking: whether it begins after the whole backward, and the next step begins after it.
        piece_bytes: bytes of a piece of a larger layer, which is updated while the next piece arrives; None: a layer is
            updated when all of its gradients are there.

    Raises:
        ValueError: a number is not more than 0.
    """

    bytes_per_s: float
    clipping: bool = False
    blocking: bool = False
    piece_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.piece_bytes is not None and not self.piece_bytes > 0:
            raise ValueError(f"piece_bytes={self.piece_bytes!r} must be more than 0 bytes of gradients.")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r} must be more than 0 bytes of gradients a second.")

    def parts_of(self, nbytes: int) -> int:
        """Return in how many parts ``nbytes`` of gradients travel (`memory.grad_buffers.STREAMED`)."""
        if self.piece_bytes is None or nbytes < 2 * self.piece_bytes:
            return 1
        return math.ceil(nbytes / self.piece_bytes)


class Updating:
    """Simulates the optimizer's thread through all steps.

    Args:
        updates: rate and rules; None: updates take no time.
        costs: costs of the calls.
        links: links of gradients and weights; None: copies take no time.

    Attributes:
        free: end of the last update.
    """

    def __init__(self, updates: UpdateModel | None, costs: Costs, links: Links | None = None) -> None:
        self._updates = updates
        self._links = links
        self.free = 0.0
        self._sizes: dict[str, int] = {}
        self._travels: dict[str, int] = {}
        self._weights = {call.layer: call.weight_bytes for call in costs}
        for call in costs:
            size = call.gradient_bytes if call.needs_backward else 0
            self._sizes[call.layer] = max(size, self._sizes.get(call.layer, 0))
            travels = size if call.reduced_bytes is None else call.reduced_bytes
            self._travels[call.layer] = max(travels, self._travels.get(call.layer, 0))
        self._turns = {layer: turn for turn, layer in enumerate(self._sizes)}

    def step(self, arrived: Mapping[str, float]) -> list[tuple[str, float, float]]:
        """Return layer, start and end of each update of a step.

        ``arrived`` has the time at which each layer's gradients are on the host. Of the layers that are there, the
        first in the trace goes first, because the next step's forward needs it first. With clipping or blocking, all
        wait for the last.
        """
        if self._updates is None:
            return [(layer, ready, ready) for layer, ready in arrived.items()]
        together = self._updates.clipping or self._updates.blocking
        last = max(arrived.values(), default=0.0)
        comes = {layer: last if together else at - self._lead_s(layer) for layer, at in arrived.items()}
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
            start, rate = self.free, self._updates.bytes_per_s
            last_piece = min(self._sizes[layer], self._updates.piece_bytes or self._sizes[layer]) / rate
            self.free = max(start + self._sizes[layer] / rate, arrived[layer] + last_piece)
            rows.append((layer, start, self.free))
        return rows

    def _lead_s(self, layer: str) -> float:
        """Return the seconds between the arrival of a layer's first piece and of its last."""
        if self._updates is None or self._updates.piece_bytes is None or self._links is None:
            return 0.0
        return max(0.0, self._travels[layer] - self._updates.piece_bytes) / self._links.download

    def published(self, rows: list[tuple[str, float, float]]) -> dict[str, float]:
        """Return when the next step may begin to upload each layer, given the rows of `step`."""
        if self._updates is not None and self._updates.blocking:
            return dict.fromkeys((layer for layer, *_ in rows), max((end for *_, end in rows), default=0.0))
        return {layer: self._readable(layer, start, end) for layer, start, end in rows}

    def _readable(self, layer: str, start: float, end: float) -> float:
        """Return when an upload may begin that reaches no part of the weights before its update."""
        piece, size = self._updates and self._updates.piece_bytes, self._sizes[layer]
        if self._updates is None or self._updates.clipping or self._links is None or not piece or piece >= size:
            return end
        others = self._weights[layer] * (1 - piece / size)
        return max(start + piece / self._updates.bytes_per_s, end - others / self._links.upload)
