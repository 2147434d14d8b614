"""Copies between a worker and the host: one direction of one worker's link.

What a turn takes in and gives out is on the critical path, so it goes first; weights and gradients are cut into chunks
that fill the windows between. Here a chunk is as small as it may be: a large copy takes its own time and the time of
all small ones that fall into it, as far as those are known when it is entered.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Bytes a second from the host to a worker and back; each worker has links of its own."""

    upload: float
    download: float

    def __post_init__(self) -> None:
        for name in ("upload", "download"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0 bytes a second.")


class Lane:
    """One direction of one link, ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._behind = 0.0

    def copy_before(self, ready: float, size: int) -> tuple[float, float]:
        """Start and end of a copy that goes first, of those that go first in the order in which they are entered."""
        start = max(ready, self._ends[-1] if self._ends else 0.0)
        end = start + size / self._rate
        if end > start:
            self._starts.append(start)
            self._ends.append(end)
        return start, end

    def copy_behind(self, ready: float, size: int) -> tuple[float, float]:
        """Start and end of a copy that gives way to all that goes first; its like follow each other."""
        start = clock = max(ready, self._behind)
        left = size / self._rate
        at = bisect_right(self._ends, clock)
        while left > 0:
            window = self._starts[at] if at < len(self._starts) else math.inf
            if clock + left <= window:
                clock += left
                break
            if window > clock:
                left -= window - clock
            clock = self._ends[at]
            at += 1
        self._behind = clock
        return start, clock
