"""How far the host runs ahead of a worker's device.

A GPU computes later than the host enqueues, and a call that it has not reached holds its inputs and outputs. So the
host may run ahead of the device by a few calls only, and by those whose memory the plan has room for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_roundpipe.devices import Device, Event

IN_FLIGHT = 2
"""Number of calls that may always be enqueued on a device and unfinished, whatever memory they hold."""


class InFlight:
    """The calls that are enqueued on a device and not finished, oldest first, with the memory that each keeps alive.

    Memory alone is kept, without the graphs of its tensors: these would keep what autograd has saved, and the inputs of
    the calls that they were made by.

    Args:
        wait: has the host wait for an event, while other threads go on.

    Attributes:
        lead: bytes that calls beyond the first `IN_FLIGHT` may keep alive; 0 allows no such calls.
        nbytes: size of the storages, each counted once.
        carrying: ends of the copies of calls' products to the host.
        copying: those of the copies of the last call's inputs.
    """

    def __init__(self, device: Device, wait: Callable[[Event], object]) -> None:
        self.device, self._wait = device, wait
        self.lead = self.nbytes = 0
        self.carrying, self.copying = deque[Event](), list[Event]()
        self._calls: deque[tuple[Event, list[Any], list[UntypedStorage]]] = deque()
        self._holders = Counter[int]()

    def __len__(self) -> int:
        return len(self._calls)

    def keep(self, *tensors: Any) -> None:
        """Keep tensors until what is enqueued has been computed, and wait while the host is too far ahead."""
        end = self.device.compute.record()
        if not self._calls and end.done():
            return
        self.add(end, tensors, counted=self.lead > 0)
        self._land_finished()
        while len(self._calls) > IN_FLIGHT and (not self.lead or self.nbytes > self.lead):
            self._wait(self._calls[0][0])
            self._land_finished()

    def _land_finished(self) -> None:
        while self._calls and self._calls[0][0].done():
            self.land()

    def wait_for_products(self) -> None:
        """Wait until the products of one call at most are on their way to the host: another call's take memory now.

        The host waits itself, as a call that is enqueued has its memory.
        """
        while len(self.carrying) > 1:
            if not (oldest := self.carrying.popleft()).done():
                self._wait(oldest)
        self.device.drop_finished()

    def wait_until_idle(self) -> None:
        """Wait until nothing computes, and let go of what was computed with."""
        self.device.compute.synchronize()
        while self._calls:
            self.land()

    def clear(self) -> None:
        """Forget all calls. Nothing runs."""
        self._calls.clear()
        self._holders.clear()
        self.carrying.clear()
        self.copying.clear()
        self.nbytes = 0

    def add(self, end: Event, tensors: Any, *, counted: bool) -> None:
        """Add a call with ``tensors``, in nested lists, to keep until its ``end`` and, if ``counted``, to count."""
        flat = _flat(tensors)
        storages = [tensor.untyped_storage() for tensor in flat if tensor.layout is torch.strided]
        others = [tensor.detach() for tensor in flat if tensor.layout is not torch.strided]
        self._calls.append((end, [storages, others], storages if counted else []))
        if not counted:
            return
        for storage in storages:
            self._holders[storage._cdata] += 1
            if self._holders[storage._cdata] == 1:
                self.nbytes += storage.nbytes()

    def land(self) -> None:
        """Remove the oldest call, which is done."""
        _, _, storages = self._calls.popleft()
        for storage in storages:
            self._holders[storage._cdata] -= 1
            if not self._holders[storage._cdata]:
                del self._holders[storage._cdata]
                self.nbytes -= storage.nbytes()


def _flat(nested: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in nested lists and tuples."""
    found: list[Tensor] = []
    for item in nested:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _flat(item)
    return found
