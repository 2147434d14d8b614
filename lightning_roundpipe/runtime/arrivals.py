"""When a batch's gradients are complete, unit by unit, while its backward is still under way.

A unit is there when nothing of the step needs its weights or adds to its gradients any more:

    the slots that hold it are closed ── [1]     its gradients are on their way to the host, its uploads are over
    glue does not read it, or all microbatches have ended ── [2]

Before that, a unit has been sent: all that the step uploads of it is on the devices, and what it was copied from may be
written to.

    its slots' uploads are enqueued, and waited for ── [3]

Whoever steps takes units in the order in which they come, and of several that are there the first in forward order: it
is what the next forward asks for first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_roundpipe.devices import Event, StreamAborted, StreamError, teams
from lightning_roundpipe.runtime.slots import Slot
from lightning_roundpipe.runtime.units import Unit


class Dropped(Exception):
    """The step failed: no more gradients will come."""


@dataclass(frozen=True)
class _Sent:
    """A unit whose uploads are all on their way."""

    unit: Unit
    uploads: list[Event]


class Arrivals:
    """Of one step.

    Args:
        units: all of them.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._lock = threading.Lock()
        self._open = dict.fromkeys(units, 0)
        self._read: Collection[Unit] | None = None
        self._ended = False
        self._coming = set(units)
        self._unsent = dict.fromkeys(units, 0)
        self._uploads: dict[Unit, list[Event]] = {unit: [] for unit in units}
        self._there: queue.SimpleQueue[Unit | _Sent | None] = queue.SimpleQueue()

    # -- the step -----------------------------------------------------------------------------------------------------

    def expect(self, slots: Iterable[Slot], *, uploads: bool = True) -> None:
        """Slots of the step, before the first of them is closed. All are known when its losses are.

        Args:
            uploads: whether somebody wants to know when units have been sent [3].
        """
        with self._lock:
            for slot in slots:
                for unit in _units(slot):
                    self._open[unit] += 1
                if uploads:
                    slot.arrivals = self
                    for layer in slot.layers:
                        self._unsent[layer.unit] += 1

    def uploading(self, unit: Unit, upload: Event) -> None:
        """The weights of a layer of ``unit`` are on their way to one of the slots, until ``upload`` [3]."""
        with self._lock:
            self._unsent[unit] -= 1
            self._uploads[unit].append(upload)
            self._look([unit])

    def closed(self, slot: Slot) -> None:
        """The slot's gradients are on their way [1]."""
        with self._lock:
            for unit in _units(slot):
                self._open[unit] -= 1
            self._look(_units(slot))

    def passed(self, read: Collection[Unit]) -> None:
        """All microbatches have their loss, so it is known which units glue has ``read``."""
        with self._lock:
            self._read = read
            self._look(list(self._coming))

    def ended(self) -> None:
        """All microbatches have ended [2]."""
        with self._lock:
            self._ended = True
            self._look(list(self._coming))

    def fail(self) -> None:
        """What has not come will not come."""
        self._there.put(None)

    def _look(self, units: Iterable[Unit]) -> None:
        for unit in units:
            known = self._read is not None and (self._ended or unit not in self._read)
            if known and not self._unsent[unit] and self._uploads[unit]:
                self._there.put(_Sent(unit, self._uploads[unit]))
                self._uploads[unit] = []
            if known and not self._open[unit] and unit in self._coming:
                self._coming.discard(unit)
                self._there.put(unit)

    # -- who steps ----------------------------------------------------------------------------------------------------

    def take(self, *, wait: bool, sent: Callable[[Unit], None] = lambda unit: None) -> list[Unit]:
        """Units that have come since the last time.

        Args:
            wait: for at least one.
            sent: called with each unit that has been sent.

        Raises:
            Dropped: if the step has failed.
        """
        taken: list[Unit] = []
        if wait:
            teams.disband()
        while True:
            try:
                unit = self._there.get(block=wait and not taken)
            except queue.Empty:
                return taken
            if unit is None:
                raise Dropped
            if isinstance(unit, Unit):
                taken.append(unit)
                continue
            with contextlib.suppress(StreamAborted, StreamError):  # a step has failed: this one, or the one behind it
                for upload in unit.uploads:
                    upload.wait()
                sent(unit.unit)


def _units(slot: Slot) -> set[Unit]:
    return {layer.unit for layer in slot.layers} | {sums.layer.unit for sums in slot.sums.values()}
