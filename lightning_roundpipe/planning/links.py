"""Copies between a worker and the host.

Inputs and outputs of a turn are on the critical path, so their copies have priority. Copies of weights and gradients
travel in chunks that fill the gaps. The simulation takes chunks as infinitely small: a copy of weights lasts its own
time and that of all copies with priority within it, as far as these are known when it is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_roundpipe.planning.host_time import SharedSeconds


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
