"""Copies between a worker and the host.

Inputs and outputs of a turn are on the critical path, so their copies have priority. Copies of weights and gradients
travel in chunks that fill the gaps. The simulation takes chunks as infinitely small: a copy of weights lasts its own
time and that of all copies with priority within it, as far as these are known when it is simulated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

_ROUNDING_S = 1e-12
"""By so much, a copy may be longer than a gap that it fills. Rounding decided otherwise where the next gap is."""


@dataclass(frozen=True)
class Links:
    """Rates of a worker's link in bytes per second. Each worker has a link of its own.

    Args:
        upload: from the host to the worker.
        download: from the worker to the host.

    Raises:
        ValueError: a rate is not more than 0.
    """

    upload: float
    download: float

    def __post_init__(self) -> None:
        for name in ("upload", "download"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0 bytes a second.")


class Lane:
    """One direction of a link, with ``rate`` bytes per second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._behind = 0.0

    def copy_before(self, ready: float, size: int) -> tuple[float, float]:
        """Return start and end of a copy with priority. Such copies run in the order of the calls of this method."""
        start = max(ready, self._ends[-1] if self._ends else 0.0)
        end = start + size / self.rate
        if end > start:
            self._starts.append(start)
            self._ends.append(end)
        return start, end

    def copy_between(self, ready: float, size: int) -> tuple[float, float]:
        """Return start and end of a copy with priority that waits for known copies without it."""
        return self.copy_before(max(ready, self._behind), size)

    def copy_behind(self, ready: float, size: float) -> tuple[float, float]:
        """Return start and end of a copy without priority. Such copies run one after another."""
        start = clock = max(ready, self._behind)
        left = size / self.rate
        at = bisect_right(self._ends, clock)
        while left > 0:
            window = self._starts[at] if at < len(self._starts) else math.inf
            if clock + left <= window + _ROUNDING_S:
                clock += left
                break
            if window > clock:
                left -= window - clock
            clock = self._ends[at]
            at += 1
        self._behind = clock
        return start, clock

    def after(self, time: float) -> list[float]:
        """Return what copies that are ready at ``time`` or later may wait for: ends of copies, and starts of gaps."""
        at = bisect_right(self._ends, time)
        return [self._behind, *self._starts[at:], *self._ends[at:]]
