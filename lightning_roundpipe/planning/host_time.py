"""The time of the host's interpreter, of which the engine itself takes some, beside the layers.

All workers share its seconds: it issues for one worker at a time. A turn takes its seconds from the gaps that other
turns leave.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Seconds of the engine itself.

    Args:
        call_s: of the interpreter, for each call of a turn; a recomputed call and its backward count as one.
        turn_s: of the interpreter, for each turn.
        hop_s: from one worker to another, for a microbatch that changes workers between two stages.
        ahead: whether the interpreter runs ahead of the workers, so that a call is over for it when it is issued.

    Raises:
        ValueError: a time is negative or not a number.
    """

    call_s: float = 0.0
    turn_s: float = 0.0
    hop_s: float = 0.0
    ahead: bool = False

    def __post_init__(self) -> None:
        for name in ("call_s", "turn_s", "hop_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more seconds.")


_ROUNDING_S = 1e-12
"""By so much, seconds may be longer than a gap that they fill. Rounding decided otherwise where the next gap is."""


class SharedSeconds:
    """Busy time as disjoint intervals in ascending order."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def fill(self, ready: float, seconds: float) -> tuple[float, int]:
        """Return the end of the first free ``seconds`` from ``ready`` on, and how many intervals have ended by then."""
        at, clock, left = bisect_right(self._ends, ready), ready, seconds
        while left > 0 and at < len(self._starts) and left > self._starts[at] - clock + _ROUNDING_S:
            left -= max(0.0, self._starts[at] - clock)
            clock = self._ends[at]
            at += 1
        return clock + left, at

    def take(self, ready: float, seconds: float) -> float:
        """Take the first free ``seconds`` from ``ready`` on, and return the end of the last of them."""
        if seconds <= 0:
            return ready
        first, (end, at) = bisect_right(self._ends, ready), self.fill(ready, seconds)
        start = min(ready, self._starts[first]) if first < at else ready
        merges = at < len(self._starts) and self._starts[at] <= end
        until = self._ends[at] if merges else end
        self._starts[first : at + merges], self._ends[first : at + merges] = [start], [until]
        return end

    def after(self, time: float) -> list[float]:
        """Return starts and ends of the intervals that end after ``time``."""
        at = bisect_right(self._ends, time)
        return [*self._starts[at:], *self._ends[at:]]
