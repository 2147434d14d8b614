"""The order in which a worker opens its slots, from one step into the next.

    append ── idle: opened at once; busy: the first one's weights are on their way, if the open slot has none behind it
    next ── the open slot was left by all: the one behind it opens, and the one behind that is uploaded meanwhile

A step's slots follow those of the step before, so a worker that is done with one step goes on with the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker


class WorkerQueue:
    """The slots of one worker that are planned and not yet open.

    Args:
        worker: whose.
        prefetch: whether the weights of the slot behind the open one are uploaded.
    """

    def __init__(self, worker: Worker, *, prefetch: bool) -> None:
        self._worker = worker
        self._prefetch = prefetch
        self._lock = threading.Lock()
        self._slots: deque[tuple[Slot, Callable[[Slot], None]]] = deque()
        self._last: Slot | None = None
        """Of those that are open or planned."""
        self._busy = False

    def append(self, slots: Iterable[Slot], close: Callable[[Slot], None]) -> None:
        """A step begins: ``slots`` follow what is there.

        Args:
            slots: of the step, in order.
            close: told of a slot that nobody is going to run in when it opens.
        """
        with self._lock:
            empty = not self._slots
            for slot in slots:
                if self._last is not None:
                    self._last.precede(slot)
                self._last = slot
                self._slots.append((slot, close))
            if not self._slots:
                return
            if self._busy:
                if empty and self._prefetch:
                    self._prepare(self._slots[0][0])
                return
            self._busy = True
            self._open(*self._slots.popleft())

    def next(self) -> None:
        """The open slot is about to be closed."""
        with self._lock:
            self._busy = bool(self._slots)
            if self._busy:
                self._open(*self._slots.popleft())
            else:
                self._last = None

    def clear(self) -> None:
        """After a failure: nothing will be opened any more."""
        with self._lock:
            self._slots.clear()
            self._last = None
            self._busy = False

    def _open(self, slot: Slot, close: Callable[[Slot], None]) -> None:
        following = self._slots[0][0] if self._slots and self._prefetch else None

        def open_it() -> None:
            if self._worker.open(slot, following):
                close(slot)

        self._worker.post(open_it, slot.cancel_scope)

    def _prepare(self, slot: Slot) -> None:
        """Behind the opening of the slot before, which the worker was given earlier."""

        def prepare_it() -> None:
            if slot.arena is None:
                self._worker.prepare(slot)

        self._worker.post(prepare_it, slot.cancel_scope)
