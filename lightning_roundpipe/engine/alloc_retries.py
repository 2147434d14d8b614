"""Counts allocation retries: how often a GPU's caching allocator freed its cached blocks to find room.

Each retry makes the host wait for the GPU, and the GPU for the driver. In the first steps of a plan they are expected,
as the allocator still caches blocks of the sizes before. If they go on, an allocator setting helps.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_roundpipe.devices import Device, allocator
from lightning_roundpipe.engine.hints import Hints
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.schedule import Plan

SETTLING = 3
"""The first steps of a plan, whose retries are expected."""
ENOUGH = 2
"""Later steps with retries before a warning: one alone may have had a longer batch than all before."""


def so_far(devices: Sequence[Device]) -> list[int]:
    """Return the number of retries of each device since the process began."""
    return [device.allocation_retries() for device in devices]


class Retries:
    """Counts the retries of all workers, and warns if they go on.

    Args:
        devices: the device of each worker.
        hints: issues the warning.

    Attributes:
        last: the retries of each worker in the last step.
    """

    def __init__(self, devices: Sequence[Device], hints: Hints) -> None:
        self._devices, self.hints = devices, hints
        self._seen = so_far(self._devices)
        self.last = [0] * len(devices)
        self._plan: Plan | None = None
        self._steps = self._with = 0

    def after_step(self, plan: Plan | None, begun: Sequence[int]) -> None:
        """Count the retries of a finished step.

        Args:
            plan: the step's plan.
            begun: what `so_far` returned when the step began.
        """
        now = so_far(self._devices)
        self.last = [new - old for new, old in zip(now, begun, strict=True)]
        again, self._seen = now != self._seen, now  # as steps overlap, ``last`` may count a retry twice; this does not
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
