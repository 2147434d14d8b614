"""How often GPUs' allocators have given back all that they keep in order to find room.

Each time, the host waits for the GPU and the GPU for the driver. In the first steps of a plan that is how the allocator
parts from the sizes of the steps before. Where it goes on, a setting helps.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_roundpipe.devices import Device, allocator
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.reporting.hints import Hints

SETTLING = 3
"""Steps of a plan in which retries are to be expected."""
ENOUGH = 2
"""Later steps with retries, after which the user is told: one may have had a longer batch than all before."""


def so_far(devices: Sequence[Device]) -> list[int]:
    """Of each of ``devices``, since the process began."""
    return [device.allocation_retries() for device in devices]


class Retries:
    """Of all workers.

    Args:
        devices: one per worker.
        hints: say what to set.

    Attributes:
        last: of each worker, in the last step.
    """

    def __init__(self, devices: Sequence[Device], hints: Hints) -> None:
        self._devices, self.hints = devices, hints
        self._seen = so_far(self._devices)
        self.last = [0] * len(devices)
        self._plan: Plan | None = None
        self._steps = self._with = 0

    def after_step(self, plan: Plan | None, begun: Sequence[int]) -> None:
        """A step under ``plan`` is over, which began when there were ``begun``."""
        now = so_far(self._devices)
        self.last = [new - old for new, old in zip(now, begun, strict=True)]
        again, self._seen = now != self._seen, now  # steps overlap
        if plan is not self._plan:
            self._plan, self._steps, self._with = plan, 0, 0
        self._steps += 1
        if self._steps > SETTLING and again:
            self._with += 1
            if self._with == ENOUGH:
                self.hints.warn(
                    "retries",
                    f"torch's allocator had to give back all free memory of a GPU in {plural(self._with, 'step')} "
                    f"after the first {SETTLING}, and each time the GPU waits. Its memory is in pieces that do not "
                    f"fit: {allocator.advice()}.",
                )
