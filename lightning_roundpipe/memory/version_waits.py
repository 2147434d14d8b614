"""State with versions, as of weights, and waits for one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Versioned:
    """State with versions that are published in increasing order, the last one being ``version``."""

    __slots__ = ("_lock", "_waiting", "version")

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, version: int, then: Callable[[], None]) -> bool:
        """Have the publishing thread call ``then`` once ``version`` is published; return False if it already is."""
        if self.version >= version:
            return False
        with self._lock:
            if self.version >= version:
                return False
            self._waiting.append((version, then))
            return True

    def has(self, version: int) -> bool:
        """Return whether ``version`` is published."""
        return self.version >= version

    def publish(self, version: int) -> None:
        """Publish ``version`` and call what waits for it."""
        with self._lock:
            self.version = max(self.version, version)
            if not self._waiting:
                return
            due = [then for wanted, then in self._waiting if wanted <= version]
            self._waiting = [(wanted, then) for wanted, then in self._waiting if wanted > version]
        for then in due:
            then()
