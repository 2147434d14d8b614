"""The context in which a thread works.

On a GPU, autograd runs backward on a thread of its own per device, while the calling thread waits. The context of the
caller (which layer runs, for which microbatch) must be known there. Python's thread-locals and context variables do not
follow into autograd's threads; what is kept here does, as grad mode and autocast do.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

_KEY = "lightning_roundpipe"


def _stash(found: Any) -> None:
    """Let torch keep ``found`` for the calling thread, and pass it on to autograd's threads."""
    if _takes_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    torch._C._stash_obj_in_tls(_KEY, found)


@functools.cache
def _takes_no_reference() -> bool:
    """Return whether torch takes no reference to the object but releases one later, as 2.11 does.

    The object would be freed while it is in use. The probe stays with this thread until the next object replaces it.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_KEY, probe)
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def context_of_thread() -> Any:
    """Return the calling thread's context; None if it runs none of the engine's work."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


class working:
    """A context in which the calling thread, and autograd's threads that work for it, carry ``context``."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before = context_of_thread()
        _stash(self._context)

    def __exit__(self, *_: object) -> None:
        _stash(self._before)
