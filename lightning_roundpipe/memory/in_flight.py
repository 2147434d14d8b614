"""Calls that a worker's device has not finished, and the memory that they keep alive.

A GPU computes later than the host enqueues, and a call that it has not reached holds its inputs and outputs. So the
host may run ahead of the device by a few calls only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_roundpipe.devices import Event

IN_FLIGHT = 2
"""Number of calls that may always be enqueued on a device and unfinished, whatever memory they hold."""


class InFlight:
    """The calls that are enqueued on a device and not finished, oldest first, with the memory that each keeps alive.

    Memory alone is kept, without the graphs of its tensors: these would keep what autograd has saved, and the inputs of
    the calls that they were made by. ``nbytes`` is the size of the storages, each counted once.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._calls: deque[tuple[Event, list[Any], list[UntypedStorage]]] = deque()
        self._holders = Counter[int]()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def oldest(self) -> Event:
        """The end of the oldest call."""
        return self._calls[0][0]

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
