"""Who a thread works for.

On a GPU, autograd runs backward on a thread of its own for each device, while the thread that asked for it waits. What
that one carries (which layer runs, whose locks are held) must be found there, too: else a layer that recomputes in its
own backward would find the locks taken by nobody it knows, and what it does be taken for a foreign thread's. Python's
thread-locals and context variables stay behind; what is kept here goes along, as grad mode and autocast do.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any, NamedTuple

import torch

_KEY = "lightning_roundpipe"


def _stash(found: Behalf | None) -> None:
    """Let torch keep ``found`` for the calling thread and for those that autograd lends it."""
    if _takes_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    torch._C._stash_obj_in_tls(_KEY, found)


@functools.cache
def _takes_no_reference() -> bool:
    """Whether torch gives up a reference that it never took, as 2.11 does: the object would be freed while it is used.

    The probe stays with this thread until the next object takes its place.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_KEY, probe)
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


class Behalf(NamedTuple):
    """The thread that is worked for, and what it does."""

    thread: int
    context: Any


def behalf() -> Behalf | None:
    """Of the calling thread; None if it works for none of ours."""
    found: Behalf | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return found


def thread() -> int:
    """The identity of the thread that the calling one works for: by default its own."""
    found = behalf()
    return threading.get_ident() if found is None else found.thread


class working:
    """The calling thread, and those that autograd lends it, do ``context``."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        before = self._before = behalf()
        _stash(Behalf(threading.get_ident() if before is None else before.thread, self._context))

    def __exit__(self, *_: object) -> None:
        _stash(self._before)
