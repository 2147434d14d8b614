"""Something that is made anew by each update, and those who wait for one of its versions."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_roundpipe.runtime.threads.sync import CancelScope, Waiter


class Versioned:
    """Has versions, which come in order.

    Attributes:
        version: the number of the last one that has been published.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, version: int, then: Callable[[], None]) -> bool:
        """Have ``then`` called, by the thread that publishes, when ``version`` is there.

        Returns:
            False if it is there already: then nobody calls it.
        """
        with self._lock:
            if self.version >= version:
                return False
            self._waiting.append((version, then))
            return True

    def has(self, version: int) -> bool:
        """Whether ``version`` is there."""
        return self.version >= version

    def wait(self, version: int, cancel_scope: CancelScope) -> None:
        """Wait until ``version`` is there."""
        if self.has(version):
            return
        waiter = Waiter()
        if self.when(version, waiter.wake):
            cancel_scope.wait(waiter)

    def publish(self, version: int) -> None:
        """Let everybody read ``version``."""
        with self._lock:
            self.version = max(self.version, version)
            due = [then for wanted, then in self._waiting if wanted <= version]
            self._waiting = [(wanted, then) for wanted, then in self._waiting if wanted > version]
        for then in due:
            then()
