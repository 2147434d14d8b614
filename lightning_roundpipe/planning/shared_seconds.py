"""What the host does for one worker at a time, such as running Python.

All workers share its seconds. A turn takes its seconds from the gaps that other turns leave.
"""

from __future__ import annotations

from bisect import bisect_right

_ROUNDING_S = 1e-12
"""By so much, seconds may be longer than a gap that they fill. Rounding decided otherwise where the next gap is."""


class SharedSeconds:
    """Busy time as disjoint intervals in ascending order."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def take(self, ready: float, seconds: float) -> float:
        """Take the first free ``seconds`` from ``ready`` on, and return the end of the last of them."""
        if seconds <= 0:
            return ready
        first = at = bisect_right(self._ends, ready)  # intervals before it have ended
        clock, start = ready, ready
        if at < len(self._starts) and self._starts[at] <= ready:  # it begins within one
            start, clock = self._starts[at], self._ends[at]
            at += 1
        left = seconds
        while at < len(self._starts) and left > self._starts[at] - clock + _ROUNDING_S:
            left -= self._starts[at] - clock
            clock = self._ends[at]
            at += 1
        end = clock + left
        if at < len(self._starts) and self._starts[at] <= end:
            end_of_all = self._ends[at]
            at += 1
        else:
            end_of_all = end
        self._starts[first:at] = [start]
        self._ends[first:at] = [end_of_all]
        return end

    def after(self, time: float) -> list[float]:
        """Return starts and ends of the intervals that end after ``time``."""
        at = bisect_right(self._ends, time)
        return [*self._starts[at:], *self._ends[at:]]
