"""How fast workers are beside each other, where they are not of one kind: two GPUs of different names.

In the first batch each call goes to the next worker, so a call may never have run on some of them. Layers that are
alike are compared then. Workers of one kind count as equally fast, whatever noise there is between them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.events import Recorder

_ALIKE = 0.05
"""Kinds that differ by less are equally fast."""


def worker_speeds(recorder: Recorder, devices: Sequence[Device], alike: Mapping[str, Hashable]) -> list[float]:
    """Return how many times faster than the slowest each worker is; empty if they are equally fast.

    Args:
        recorder: the events of the first batch.
        devices: of the workers.
        alike: by the name of a layer, something that is equal for layers that take equally long.
    """
    kinds = [device.kind for device in devices]
    if len(set(kinds)) == 1:
        return []
    calls: dict[Hashable, dict[str, float]] = defaultdict(dict)
    layers: dict[Hashable, dict[str, float]] = defaultdict(dict)
    for kind, worker, _, where, seconds in recorder.computations():
        for found, key in ((calls, (kind, where.call)), (layers, (kind, alike.get(where.layer)))):
            of_kinds, name = found[key], kinds[worker]
            of_kinds[name] = min(seconds, of_kinds.get(name, math.inf))
    slowness = {name: _slowness(name, kinds[0], calls) or _slowness(name, kinds[0], layers) or 1.0 for name in kinds}
    slowest = max(slowness.values())
    speeds = [slowest / slowness[name] for name in kinds]
    return speeds if max(speeds) > 1 + _ALIKE else []


def _slowness(name: str, other: str, found: Mapping[Hashable, Mapping[str, float]]) -> float | None:
    """Return how many times longer a kind of worker takes than another, in the median; None if that is not known."""
    pairs = [(times[name], times[other]) for times in found.values() if name in times and other in times]
    ratios = [seconds / others for seconds, others in pairs if others > 0]
    return statistics.median(ratios) if ratios else None
