"""Lets one of the engine's threads at a time run Python.

Each torch operation releases the interpreter's lock and takes it again. While two threads run Python, every operation
hands the lock to the other thread and waits to get it back, which takes longer than a small operation. The interpreter
runs one thread at a time anyway, so the engine's threads hold a lease on it, one after another:

    a thread acquires the lease when it begins a task ── [1]
    it releases the lease while it waits, and around work that does not need the interpreter ── [2]
    threads get the lease in the order in which they asked for it, and whoever releases it wakes the next one ── [3]
    a lease that is held for longer than `TERM_S` without a call of `renew` expires: the keeper, a thread of its own,
    passes it on ── [4]
    a thread that begins a call renews its lease, or asks for another one if it has lost it ── [5]

A thread that waits for another one of the engine (`devices.waiter`) sleeps until it is woken and its turn for the lease
has come. If it woke before, it would take the interpreter's lock from the holder only to find that it has to wait.

Because of [4], an unforeseen wait, a long operation or slow user code delays other threads by a few milliseconds, and
cannot block them. Correctness does not depend on the lease. Threads that never acquire it, such as Lightning's main
thread, are not affected.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

TERM_S = 0.005
"""Seconds after which a lease expires."""
SHARE_S = 0.02
"""Seconds after which `renew` passes the lease on, if a thread waits for it."""
_TICK_S = 0.005
"""Seconds between two looks of the keeper at the latest lease."""
_IDLE_TICKS = 20
"""The keeper ends when it has seen no thread wait for so many ticks."""


class _Lease:
    """One thread's lease. Whoever pops the token, its holder or the keeper, passes the lease on."""

    __slots__ = ("began", "expires", "token")

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.expires = self.began + TERM_S
        self.token = [None]

    def end(self) -> bool:
        """End the lease and pass it on. Return False if it has ended already."""
        try:
            self.token.pop()  # atomic, so only one of two threads succeeds
        except IndexError:
            return False
        _free.append(None)
        _grant()
        return True


class _Mine(threading.local):
    """What the calling thread has.

    Attributes:
        lease: the lease that it has acquired, which may have expired since; None if it has none.
        ticket: the ticket of its last wait, to be used again.
    """

    lease: _Lease | None = None
    ticket: Ticket | None = None


class Ticket:
    """A thread's request for the lease. The thread sleeps from `wait` until the lease is granted to it."""

    __slots__ = ("_granted", "lease")

    def __init__(self) -> None:
        self._granted = threading.Lock()
        self._granted.acquire()
        self.lease: _Lease | None = None

    def submit(self) -> None:
        """Put the ticket in line [3]. Any thread may call this, once."""
        _line.append(self)
        _grant()

    def grant(self) -> None:
        global _latest
        self.lease = _latest = _Lease()
        self._granted.release()

    def wait(self) -> None:
        """Wait until the calling thread holds the lease."""
        self._granted.acquire()
        _mine.lease, _mine.ticket = self.lease, self


_free: collections.deque[None] = collections.deque([None])
"""Has one item while no thread holds the lease. Whoever pops it may grant the lease."""
_line: collections.deque[Ticket] = collections.deque()
_latest = _Lease()
_mine = _Mine()
_keeps = False
"""Whether the keeper's thread runs."""


def _grant() -> None:
    """Grant the lease to the first thread in line, if it is free.

    No lock is needed. Whoever frees the lease looks at the line afterwards, and whoever joins the line looks afterwards
    whether the lease is free. In either order, one of them sees the other.
    """
    while _line:
        if not _free:  # the holder or the keeper will grant it
            if not _keeps:
                _keep()
            return
        try:
            _free.pop()
        except IndexError:  # another thread was faster
            continue
        try:
            ticket = _line.popleft()
        except IndexError:  # another thread was faster
            _free.append(None)
            continue
        ticket.grant()
        return


def _keep() -> None:
    """Start the keeper, which does not run."""
    global _keeps
    _keeps = True
    threading.Thread(target=_pass_on_expired, name="roundpipe-lease", daemon=True).start()


def _pass_on_expired() -> None:
    """Pass on leases that expire while threads wait [4], until none waits any more."""
    global _keeps
    idle = 0
    while True:
        time.sleep(_TICK_S)
        if _line:
            idle = 0
            lease = _latest
            if time.perf_counter() >= lease.expires:
                lease.end()
            continue
        idle += 1
        if idle == _IDLE_TICKS:
            _keeps = False
            if not _line or _keeps:  # a thread that came since has started another keeper
                return
            _keeps, idle = True, 0


def _forget() -> None:
    """Free the lease in a forked process, which has none of its parent's threads but the calling one."""
    global _keeps, _free, _line
    _keeps, _free, _line = False, collections.deque([None]), collections.deque()
    _mine.__dict__.clear()


os.register_at_fork(after_in_child=_forget)


def acquire() -> None:
    """Wait until the calling thread holds the lease [1]."""
    global _latest
    if not _line:
        try:
            _free.pop()
        except IndexError:
            pass
        else:
            _mine.lease = _latest = _Lease()
            return
    ticket = Ticket()
    ticket.submit()
    ticket.wait()


def release() -> bool:
    """Release the lease, if the calling thread has acquired it [2].

    Returns:
        Whether the thread had acquired it. The lease may have expired since.
    """
    lease = _mine.lease
    if lease is None:
        return False
    _mine.lease = None
    lease.end()
    return True


def renew() -> None:
    """Begin a call: extend the calling thread's lease, or get another one if it has expired [5]. It may wait.

    After `SHARE_S`, the thread passes the lease on if others wait for it, and gets it again after them. A thread that
    has no lease needs none, and this does nothing.
    """
    lease = _mine.lease
    if lease is None:
        return
    if lease.token:
        now = time.perf_counter()
        if now < lease.began + SHARE_S or not _line:
            lease.expires = now + TERM_S
            return
        lease.end()
    acquire()


def ticket() -> Ticket | None:
    """Return a ticket for the calling thread if it has acquired the lease, which may have expired since; else None."""
    if _mine.lease is None:
        return None
    ticket, _mine.ticket = _mine.ticket, None  # its next one is another one, until this one has been granted
    return ticket or Ticket()


def released(wait: Callable[..., T], *args: Any) -> T:
    """Call ``wait`` without the lease [2]."""
    had = release()
    try:
        return wait(*args)
    finally:
        if had:
            acquire()
