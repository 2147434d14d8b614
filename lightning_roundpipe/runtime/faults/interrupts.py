"""Ctrl-C between two lines of ours.

Python raises ``KeyboardInterrupt`` in the main thread after whatever bytecode it happens to be at. An engine that is
interrupted while it takes the interceptors off a module, or while it resets a device, would leave the user's module
patched or a thread waiting for ever. So while the engine works the signal is held back until the main thread waits for
others, which is what it nearly always does, or until the engine is done. A second Ctrl-C is not held back: somebody
wants to leave at any price.

Nor is anything raised in a finalizer, whoever's it is: Python would print it, and go on.

The same goes for ``SIGCHLD``: torch's data loader raises from its handler when one of its processes has died.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGCHLD") if hasattr(signal, name)]


class _DeferredSignals:
    """The handlers that were there before, and what came meanwhile."""

    def __init__(self) -> None:
        self.open = False
        self._leaving = self._gone = False
        self._pending: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def install(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def remove(self) -> None:
        self._leaving = True  # even a second Ctrl-C waits for this little
        try:
            for number, handler in reversed(self._handlers.items()):  # SIGINT last: from then on it raises anywhere
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        finally:
            self._gone = True
        self.deliver()

    def deliver(self) -> None:
        while self._pending:
            self._call(*self._pending.pop(0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and any(known == number for known, _ in self._pending)
        # When it is gone, a handler that was set meanwhile may still call this one, as torch's for SIGCHLD does.
        if (self.open and not _is_finalizing(frame)) or self._gone or (again and not self._leaving):
            self._call(number, frame)
        else:
            self._pending.append((number, frame))

    def _call(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.open = False  # who leaves because of it is not to be interrupted once more
            raise


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs because an object goes."""
    while frame is not None:
        if frame.f_code is _FINALIZER or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


_FINALIZER = weakref.finalize.__call__.__code__
_current: _DeferredSignals | None = None


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer interrupts to the end, except in `interrupts_allowed`. In the main thread only, where they come."""
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = _DeferredSignals()
    try:
        _current = deferred
        deferred.install()
        yield
    finally:
        _current = None
        deferred.remove()


@contextlib.contextmanager
def interrupts_allowed(allow: bool = True) -> Iterator[None]:
    """Inside `interrupts_deferred`: let interrupts through, as around waits and user code; or defer them again."""
    deferred = _current
    if deferred is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = deferred.open
    try:
        deferred.open = allow
        if allow:
            deferred.deliver()
        yield
    finally:
        deferred.open = before
