"""How long a thread that wakes up waits for the interpreter.

A thread that computes in Python holds the interpreter for 5 ms before another thread may run. A GPU whose worker waits
for it idles as long. So the switch interval is shorter while GPUs are in use, but no shorter than necessary, because
each switch costs some microseconds.

The garbage collector holds the interpreter, too. A full collection walks through all objects of the process, of which
torch, Lightning and transformers alone make half a million: 0.3 s. So those that exist when a run starts are left out
until it ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

from lightning_roundpipe.devices.process_context import shared_context

SWITCH_INTERVAL_S = 1e-4
"""The switch interval in seconds while GPUs are in use."""

_HALF_A_MICROSECOND = 5e-7
"""``sys.setswitchinterval`` truncates to microseconds, so a value that it returned may lose its last one."""


@shared_context
def quick_switches() -> Iterator[None]:
    """Switch threads at least every `SWITCH_INTERVAL_S` inside the context. Any thread may enter."""
    before = sys.getswitchinterval()
    if before <= SWITCH_INTERVAL_S:
        yield
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before + _HALF_A_MICROSECOND)


@shared_context
def unwalked_objects() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collection inside the context. Any thread may enter.

    Nothing changes if the user has called ``gc.freeze`` or ``gc.disable``.
    """
    freezes = gc.isenabled() and not gc.get_freeze_count()
    if freezes:
        gc.collect()
        gc.freeze()
    yield
    if freezes:
        gc.unfreeze()
