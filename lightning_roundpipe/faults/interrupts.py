"""Deferral of Ctrl-C and other signals while the engine's own code runs in the main thread.

Python raises ``KeyboardInterrupt`` in the main thread after an arbitrary bytecode. Interrupted while it removes
interceptors from a module, or resets a device, the engine would leave the module patched or a thread waiting. So
the engine defers the signal until the main thread waits for other threads, as it does most of the time, or until the
engine returns. A second Ctrl-C is not deferred, so that the user can always leave.

A signal is also deferred while a finalizer runs: Python would print an exception raised there, and continue.

``SIGCHLD`` is deferred likewise: the handler of torch's data loader raises when a worker process has died.

Handlers of ``SIGUSR1`` and ``SIGUSR2`` may read or save the training's state, as Lightning's own does on SLURM. They
would wait for the step that they interrupt, so these signals are deferred until the engine returns.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGCHLD", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
_AT_THE_END = _SIGNALS[2:]
"""Signals that are deferred until the engine returns, also while it waits."""


class _DeferredSignals:
    """The replaced signal handlers, and the signals that arrived since."""

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
        self._leaving = True  # defers even a second Ctrl-C, for this short time
        try:
            for number, handler in reversed(self._handlers.items()):  # SIGINT last: after that it raises anywhere
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        finally:
            self._gone = True
        self.deliver()

    def deliver(self) -> None:
        while due := next((one for one in self._pending if self._gone or one[0] not in _AT_THE_END), None):
            self._pending.remove(due)
            self._call(*due)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and any(known == number for known, _ in self._pending)
        # A handler that was installed in the meantime may still call this one after `remove`; torch's SIGCHLD one does.
        is_open = self.open and number not in _AT_THE_END and not _is_finalizing(frame)
        if is_open or self._gone or (again and not self._leaving):
            self._call(number, frame)
        else:
            self._pending.append((number, frame))

    def _call(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.open = False  # no further interrupt while this exception unwinds
            raise


def _is_finalizing(frame: FrameType | None) -> bool:
    """Return whether ``frame`` runs inside a finalizer or a ``__del__`` method."""
    while frame is not None:
        if frame.f_code is _FINALIZER or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


_FINALIZER = weakref.finalize.__call__.__code__
_current: _DeferredSignals | None = None


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer interrupts until the block ends, except in `interrupts_allowed`. No effect outside the main thread."""
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
    """Within `interrupts_deferred`, let interrupts through, as around waits and user code.

    Args:
        allow: False defers them again inside an outer `interrupts_allowed`.
    """
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
