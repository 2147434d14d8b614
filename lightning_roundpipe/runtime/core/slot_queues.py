"""The order in which a worker opens its planned slots, within a step and from one step to the next.

    append ── an idle worker opens the first slot at once; a busy one starts its upload, if its queue was empty
    next ── all microbatches have left the open slot: open the next one, and start the upload of the one after it

A step's slots follow those of the step before, so a worker that has finished one step goes straight on to the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker


class WorkerQueue:
    """The planned slots of one worker that are not open yet.

    Args:
        worker: the worker.
        prefetch: whether to upload the weights of the next slot while one is open.
    """

    def __init__(self, worker: Worker, *, prefetch: bool) -> None:
        self._worker = worker
        self._prefetch = prefetch
        self._lock = threading.Lock()
        self._slots: deque[tuple[Slot, Callable[[Slot], None]]] = deque()
        self._last: Slot | None = None
        """The last slot that is open or planned; None while the worker is idle."""
        self._busy = False

    def append(self, slots: Iterable[Slot], close: Callable[[Slot], None]) -> None:
        """Add the slots of a step that begins.

        Args:
            slots: the step's slots on this worker, in order.
            close: called with a slot that all its microbatches have left before it opened.
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
        """Open the next slot; called when the closing of the open one has been posted to the worker."""
        with self._lock:
            self._busy = bool(self._slots)
            if self._busy:
                self._open(*self._slots.popleft())
            else:
                self._last = None

    def clear(self) -> None:
        """Drop all slots after a failure."""
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
        """Post the upload of a slot's weights; it runs after the opening of the slot before, which was posted first."""

        def prepare_it() -> None:
            if slot.place is None:
                self._worker.prepare(slot)

        self._worker.post(prepare_it, slot.cancel_scope)
