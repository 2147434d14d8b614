"""Deferral of Ctrl-C and other signals while the engine's own code runs in the main thread.

Python raises ``KeyboardInterrupt`` in the main thread after an arbitrary bytecode. Interrupted while it removes
interceptors from a module, or resets a device, the engine would leave the module patched or a thread waiting; and what
is raised in a finalizer, Python prints and forgets. So the engine defers the signal, and delivers it at points where
nothing is half done: while the main thread waits for other threads, as it does most of the time, between layers and
plans where it works for long, and when the engine returns. A second Ctrl-C is not deferred, so that the user can always
leave.

``SIGCHLD`` is deferred likewise: the handler of torch's data loader raises when a worker process has died.

Handlers of ``SIGUSR1`` and ``SIGUSR2`` may read or save the training's state, as Lightning's own does on SLURM. They
would wait for the step that they interrupt, so these signals are deferred until the engine returns.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGCHLD", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
_AT_THE_END = _SIGNALS[2:]
"""Signals that are deferred until the engine returns, also while it waits."""


class _DeferredSignals:
    """The replaced signal handlers, and the signals that arrived since."""

    def __init__(self) -> None:
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
            self._handlers[due[0]](*due)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and any(known == number for known, _ in self._pending)
        # A handler that was installed in the meantime may still call this one after `remove`; torch's SIGCHLD one does.
        if self._gone or (again and not self._leaving):
            self._handlers[number](number, frame)
        else:
            self._pending.append((number, frame))


_current: _DeferredSignals | None = None


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer interrupts until the block ends, or to `deliver_interrupts`. No effect outside the main thread."""
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


def deliver_interrupts() -> None:
    """Call the handlers of signals that came since, which may raise; see above. No effect outside the main thread."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.deliver()
