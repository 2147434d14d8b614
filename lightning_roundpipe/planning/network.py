"""Exchange of gradients and weights between machines.

Each machine runs the plan on its own microbatches. Each layer has an owner, the only machine with its optimizer state:

    its gradients are complete on each machine ─► reduced to the owner ─► updated there ─► weights sent to all     [1]
    a layer of many bytes goes in parts, so that a part is updated while the next one travels                      [2]
    one thing at a time is on the network, of those that are ready the one that the next forward needs first       [3]
    every machine's optimizer takes what it owns in the order in which it comes                                    [4]

Machines are alike, and run in step. To reduce or send ``S`` bytes, each of K machines receives and sends
``S (K - 1) / K`` on average. This lower bound needs links that are busy in both directions, which layers with different
owners allow.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.updates import UpdateModel

_PART_BYTES = 2**26
"""Least bytes of gradients for a part of their own."""
_PARTS = 4
"""Most parts of a layer."""

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[KMGT]?)(?P<unit>bit|b|B)(?:/s|ps)?")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Network:
    """Several machines and the network between them.

    Args:
        machines: number of machines (K), at least 2.
        bytes_per_s: bytes per second that a machine receives while it sends as many.
        weight_share: bytes of weights sent for each byte of gradients reduced.

    Raises:
        ValueError: a number is too small.
    """

    machines: int
    bytes_per_s: float
    weight_share: float

    def __post_init__(self) -> None:
        if self.machines < 2:
            raise ValueError(f"machines={self.machines!r} must be at least 2 for a network between them.")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r} must be more than 0.")

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that it takes to reduce or send ``nbytes``."""
        return self._share * nbytes / self.bytes_per_s

    def wire_bytes(self, gradient_bytes: float) -> float:
        """Return the bytes that a machine sends in a step. It receives as many."""
        return self._share * gradient_bytes * (1 + self.weight_share)

    @property
    def _share(self) -> float:
        return (self.machines - 1) / self.machines


def gradient_bytes(costs: Costs) -> dict[str, int]:
    """Return the bytes of gradients of each trained layer, in the order of the trace."""
    sizes: dict[str, int] = {}
    for call in costs:
        if call.needs_backward and call.gradient_bytes:
            sizes[call.layer] = max(call.gradient_bytes, sizes.get(call.layer, 0))
    return sizes


def owners(sizes: Mapping[str, int], machines: int) -> dict[str, int]:
    """Return the owner of each layer. Each layer in turn goes to the machine with the fewest bytes so far."""
    load = [0] * machines
    found = {}
    for layer, size in sizes.items():
        owner = min(range(machines), key=lambda machine: load[machine])
        load[owner] += size
        found[layer] = owner
    return found


class Exchange:
    """Simulates the network and the optimizers of all machines through all steps; ``updates`` None: they take no time.

    Attributes:
        busy_s: seconds for which the network has been busy.
    """

    def __init__(self, network: Network, costs: Costs, updates: UpdateModel | None) -> None:
        self._network, self._rate = network, updates.bytes_per_s if updates else math.inf
        self._together = updates is not None and updates.together
        self._sizes = gradient_bytes(costs)
        self._turns = {layer: turn for turn, layer in enumerate(self._sizes)}
        self._owners = owners(self._sizes, network.machines)
        self._network_free = 0.0
        self._updated = [0.0] * network.machines
        self.busy_s = 0.0

    @property
    def busy_until(self) -> list[float]:
        """Ends of the last exchange, and of each machine's last update."""
        return [self._network_free, *self._updated]

    def step(self, arrived: Mapping[str, float]) -> dict[str, float]:
        """Return when each layer's new weights are on all machines, for a step.

        ``arrived`` has the time at which each layer's gradients are complete on every machine. [1]
        """
        reduces = sorted(
            ((at, self._turns[layer], part, layer) for layer, at in arrived.items() if layer in self._sizes
             for part in range(self._parts(layer))),
            reverse=True,
        )  # fmt: skip
        sends: list[tuple[float, int, int, str]] = []
        ready: list[tuple[int, int, int, str]] = []
        published = dict(arrived)
        waiting: list[tuple[float, str]] = []
        while reduces or sends or ready:
            if not ready:
                first = min(queue[at][0] for queue, at in ((reduces, -1), (sends, 0)) if queue)
                self._network_free = max(self._network_free, first)
            while reduces and reduces[-1][0] <= self._network_free:
                _, turn, part, layer = reduces.pop()
                heapq.heappush(ready, (turn, 1, part, layer))
            while sends and sends[0][0] <= self._network_free:
                _, turn, part, layer = heapq.heappop(sends)
                heapq.heappush(ready, (turn, 0, part, layer))
            turn, is_reduce, part, layer = heapq.heappop(ready)  # [3]
            size = self._sizes[layer] / self._parts(layer)  # [2]
            taken = self._network.seconds(size if is_reduce else size * self._network.weight_share)
            self._network_free += taken
            self.busy_s += taken
            if not is_reduce:
                published[layer] = max(published[layer], self._network_free)
                continue
            waiting.append((self._network_free, layer))
            more = reduces or any(reduce for _, reduce, _, _ in ready)
            if self._together and more:
                continue
            for at, name in waiting:
                start = self._network_free if self._together else at
                heapq.heappush(sends, (self._update(name, start), self._turns[name], part, name))
            waiting.clear()
        return published

    def _update(self, layer: str, ready: float) -> float:
        """Return the end of the update of a part of a layer, which reaches its owner at ``ready``. [4]"""
        owner = self._owners[layer]
        taken = self._sizes[layer] / self._parts(layer) / self._rate
        self._updated[owner] = max(self._updated[owner], ready) + taken
        return self._updated[owner]

    def _parts(self, layer: str) -> int:
        return max(1, min(_PARTS, math.ceil(self._sizes[layer] / _PART_BYTES)))


def parse_rate(text: str, name: str) -> float:
    """Return the bytes per second of a text such as ``25Gbit``, ``100 Gbit/s`` or ``1.25GB``.

    Raises:
        ValueError: ``text`` is not a rate, or is zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise ValueError(f"{name}={text!r} must be a rate of more than 0, as 25Gbit (bits a second) or 3GB (bytes).")
    return float(match["number"]) * _PREFIXES[match["prefix"]] / (1 if match["unit"] == "B" else 8)
