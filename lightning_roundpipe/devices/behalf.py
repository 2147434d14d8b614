"""Who a thread works for.

On a GPU, autograd runs backward on a thread of its own for each device, while the thread that asked for it waits. What
that one carries (which layer runs, whose locks are held) must be found there, too: else a layer that recomputes in its
own backward would find the locks taken by nobody it knows, and what it does be taken for a foreign thread's. Python's
thread-locals and context variables stay behind; what is kept here goes along, as grad mode and autocast do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_KEY = "lightning_roundpipe"


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


@contextlib.contextmanager
def working(context: Any) -> Iterator[None]:
    """The calling thread, and those that autograd lends it, do ``context``."""
    before = behalf()
    torch._C._stash_obj_in_tls(_KEY, Behalf(thread(), context))
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_KEY, before)
