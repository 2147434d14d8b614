"""What workers share with the host: its interpreter, and the links on which copies travel.

The host's interpreter issues for one worker at a time, and the engine itself takes some of its seconds, beside the
layers. A turn takes its seconds from the gaps that other turns leave.

Inputs and outputs of a turn are on the critical path, so their copies have priority. Copies of weights and gradients
travel in chunks that fill the gaps. The simulation takes chunks as infinitely small: a copy of weights lasts its own
time and that of all copies with priority within it, as far as these are known when it is simulated.
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


class Lane(SharedSeconds):
    """One direction of a link, with ``rate`` bytes per second. Copies with priority are its busy time."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self._behind = rate, 0.0

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
        start = max(ready, self._behind)
        self._behind, _ = self.fill(start, size / self.rate)
        return start, self._behind

    def after(self, time: float) -> list[float]:
        """Return what copies that are ready at ``time`` or later may wait for: ends of copies, and starts of gaps."""
        return [self._behind, *super().after(time)]
